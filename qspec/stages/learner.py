"""What a training asks of the draft that it trains, and of the data: the same for heads and for models."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from qspec.numerics.speculator import expected_tokens
from qspec.schema.training import Loss


@dataclass(frozen=True)
class Judgement:
    """Held-out acceptance of each draft, teacher-forced: sum of minima at temperature 1, agreement of the likeliest."""

    sampled: list[float]
    greedy: list[float]
    n: int

    @property
    def score(self) -> float:
        """Expected tokens per step, mean of both."""
        return (expected_tokens(self.sampled) + expected_tokens(self.greedy)) / 2


class Data(Protocol):
    """Numbered starts of what is learned: states, or whole sequences."""

    @property
    def starts(self) -> Tensor: ...

    def per_step(self, states: int) -> int:
        """Starts that make up a step of so many states."""

    def order(self, seed: int, epoch: int) -> Tensor:
        """All starts, in the random order of an epoch."""


D = TypeVar("D", bound=Data, contravariant=True)


class Learner(Protocol[D]):
    """A draft in training; parameters that need no gradient stay as they are."""

    @property
    def module(self) -> nn.Module: ...

    def backward(self, data: D, starts_T: Tensor, loss: Loss) -> float:
        """Add the gradient of the mean loss at some starts to the parameters'; returns that loss."""

    def judge(self, data: D) -> Judgement:
        """Acceptance on held-out data, at evenly spread starts where there are many."""
