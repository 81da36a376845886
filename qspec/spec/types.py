"""What drafters, verification and the engine say to each other."""

from dataclasses import dataclass, field
import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.numerics.probs import target_law


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            fix = "use 0 for greedy or a positive number"
            raise RecipeError(f"temperature {self.temperature}", "below 0 or not finite", fix)
        if self.top_k < 0:
            raise RecipeError(f"top_k {self.top_k}", "below 0", "use 0 to keep every token or a positive number")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p {self.top_p}", "outside (0, 1]", "use 1 to keep every token or a share of mass")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def law(self, logits_TV: Tensor) -> Tensor:
        """Laws `[T, V]` that tokens are drawn from; the same for target and draft."""
        return target_law(logits_TV, self.temperature, self.top_k, self.top_p)


def draw_uniforms(n: int, generator: torch.Generator) -> Tensor:
    """`n` float64 numbers in [0, 1), on the generator's device: the only place where randomness enters."""
    return torch.rand(n, dtype=torch.float64, device=generator.device, generator=generator)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens `[K]` (K may be 0) and the laws they were drawn from, `[K, V]`, or None: one-hot (certain).

    V is the target's vocabulary; `seconds` is what drafting took.
    """

    tokens_K: Tensor
    probs_KV: Tensor | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification: how many leading draft tokens stand, and the target's own next token.

    `bonus`: every draft token stood; `recovered`: the next token replaces the first that did not.
    """

    accepted: int
    next_token: int
    kind: Literal["bonus", "recovered"]


class Drafter(Protocol):
    """Proposes continuations. Keeps what cache it likes; `context` is always the whole committed sequence.

    Between two `reset`s the context only grows.
    """

    def propose(self, context: list[int], k: int, sampling: Sampling, generator: torch.Generator) -> Proposal:
        """At most `k` tokens that may follow `context`."""

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""


class DraftLength(Protocol):
    """Policy for how many tokens to draft next."""

    def next(self) -> int:
        """Draft length of the coming step (0 = decode plainly)."""

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a verified step."""

    def reset(self) -> None:
        """A new request starts."""


@dataclass(frozen=True)
class StepRecord:
    """Accounting of one step: counts, and seconds spent drafting, verifying, and on everything else.

    Every step commits `accepted` + 1 tokens. A stop token inside the accepted run counts as the step's own next token,
    and what was drafted from there on is not counted.
    """

    drafted: int
    accepted: int
    t_draft: float
    t_verify: float
    t_other: float


Stop = Literal["length", "eos", "context"]


@dataclass(frozen=True)
class Generation:
    """Result of one request. `tokens` excludes the prompt and includes a stop token if one ended it.

    The first token comes from the prompt's pass, every other one from `steps`. `stopped` is `context` if the target's
    cache was full.
    """

    tokens: list[int]
    steps: list[StepRecord] = field(default_factory=list)
    ttft: float = 0.0  # seconds from request to first token
    seconds: float = 0.0  # seconds from first to last token
    stopped: Stop = "length"
