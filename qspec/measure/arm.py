"""Arms of a benchmark, the requests that they answer, and the runs that come of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qspec.nn.lm import LM
from qspec.speculation.types import Drafter, DraftLength, Generation, StepRecord


@dataclass(frozen=True)
class Arm:
    """A target with or without a draft. Sizes feed the bandwidth ceiling; 0 means not known.

    Arms share no drafter and no policy that learns: one would teach the other. What a drafter remembers of earlier
    requests is forgotten between repeats, which would ask it what it has answered.
    weight_bytes: weights that one target pass reads; draft_bytes: the same for one draft token; kv_bytes_per_token:
    target cache bytes of one position; c_hat: arithmetic operations of a draft token / of a target row. new_drafter:
    makes another one for every request of a batch; None: the arm is not measured in batches.
    """

    target: LM
    drafter: Drafter | None = None
    policy: DraftLength | None = None
    weight_bytes: int = 0
    draft_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    c_hat: float | None = None
    new_drafter: Callable[[], Drafter] | None = None


@dataclass(frozen=True)
class TokenizedPrompt:
    """A tokenised prompt."""

    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Run:
    """One timed generation; `prompt` is the index of its request."""

    arm: str
    temperature: float
    repeat: int
    prompt: int
    generation: Generation


def steps_of(runs: Iterable[Run]) -> list[StepRecord]:
    """All decoding steps, in order."""
    return [step for run in runs for step in run.generation.steps]
