"""What drafters, verification and the engine say to each other."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Proposal:
    """Draft tokens `[K]` (K may be 0) and the laws they were drawn from, `[K, V]`, or None: one-hot (certain)."""

    tokens_K: Tensor
    probs_KV: Tensor | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification: how many leading draft tokens stand, and the target's own next token."""

    accepted: int
    next_token: int
    kind: Literal["bonus", "recovered"]


class Drafter(Protocol):
    """Proposes continuations. Keeps what cache it likes; `context` is always the whole committed sequence."""

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
    """Accounting of one step: counts, and seconds spent drafting, verifying, and on everything else."""

    drafted: int
    accepted: int
    t_draft: float
    t_verify: float
    t_other: float


@dataclass(frozen=True)
class Generation:
    """Result of one request. `tokens` excludes the prompt and includes a stop token if one ended it."""

    tokens: list[int]
    steps: list[StepRecord] = field(default_factory=list)
    ttft: float = 0.0  # seconds from request to first token
    seconds: float = 0.0  # seconds from first to last token
    stopped: Literal["length", "eos", "context"] = "length"
