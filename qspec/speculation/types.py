"""Values that drafters, verification and the engine exchange."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
import secrets
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.lm import LM
from qspec.numerics.speculation.probs import exponentials, fits_float32, race, sample, target_probs
from qspec.numerics.speculation.trees import Tree


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and fits_float32(self.temperature)):
            fix = "use 0 for greedy or a positive number"
            raise RecipeError(f"temperature {self.temperature}", "below 0, not finite, or lost in float32", fix)
        if self.top_k < 0:
            raise RecipeError(f"top_k {self.top_k}", "below 0", "use 0 to keep every token or a positive number")
        if not (0 < self.top_p <= 1 and fits_float32(self.top_p)):
            fix = "use 1 to keep every token or a share of mass"
            raise RecipeError(f"top_p {self.top_p}", "outside (0, 1], or lost in float32", fix)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits_TV: Tensor) -> Tensor:
        """Distributions `[T, V]` that tokens are drawn from; the same for target and draft."""
        return target_probs(logits_TV, self.temperature, self.top_k, self.top_p)


def draw_uniforms(n: int, generator: torch.Generator) -> Tensor:
    """`n` float64 numbers in [0, 1), on the generator's device."""
    return torch.rand(n, dtype=torch.float64, device=generator.device, generator=generator)


class Repeatable:
    """Randomness that depends on a seed and on a token's position: the same text, whatever was drafted or ran before.

    The target's token at a position wins a race (`numerics.probs.race`) that the draft was not asked about; a draft
    that races by the same numbers mostly guesses it. So a text does not depend on how long drafts are, who makes them,
    or whether there are any. Fewer drafts are accepted than under the rejection rule, where drafts are drawn: at total
    variation d of draft and target (1 - d) / (1 + d) or more of them, against 1 - d.
    """

    def __init__(self, seed: int) -> None:
        self._numbers = lru_cache(_NUMBERS)(partial(exponentials, seed))

    def choose(self, probs_TV: Tensor, positions: Sequence[int], size: int, ids: Tensor | slice) -> Tensor:
        """Tokens drawn from distributions at some positions: places `[T]` in rows over `ids` of a vocabulary of `size`.

        Distributions of one position, over whichever part of the vocabulary, race by the same numbers.
        """
        arrivals_TV = torch.stack([self._numbers(position, size)[ids] for position in positions])
        return race(probs_TV, arrivals_TV.to(probs_TV.device))


Randomness = torch.Generator | Repeatable
"""Where random tokens come from. A generator's numbers are used up as they come, by drafts and by verification."""
_NUMBERS = 16
"""Positions whose numbers are kept, from a draft to its verification: a draft's length, mostly."""


def randomness(seed: int | None) -> Randomness:
    """Randomness of a seed, which repeats a text; None: new every time, with as many accepted drafts as possible."""
    return torch.Generator().manual_seed(secrets.randbits(63)) if seed is None else Repeatable(seed)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens `[K]` (K may be 0) and the distributions they were drawn from, `[K, V]`, or None: one-hot (certain).

    parents_K: the node before each token, -1 for the newest committed one, parents first; None is a chain. The
    distribution of a node is that of its draw *given* its earlier siblings: the same again for draws with replacement,
    without the earlier ones and normalised for draws without (`verify` says why). Nodes that were chosen and not drawn
    (the likeliest ones, say) are certain. V is the target's vocabulary; `seconds` is what drafting took; `source` says
    which of several drafters it was.
    """

    tokens_K: Tensor
    probs_KV: Tensor | None
    seconds: float = 0.0
    parents_K: tuple[int, ...] | None = None
    source: str = ""

    @classmethod
    def certain(cls, tree: Tree, seconds: float) -> "Proposal":
        """A proposal of nodes that were chosen, not drawn."""
        return cls(torch.tensor(tree.tokens_K, dtype=torch.long), None, seconds, tuple(tree.parents_K))

    @property
    def parents(self) -> tuple[int, ...]:
        """`parents_K`, spelled out for a chain."""
        return tuple(range(-1, len(self.tokens_K) - 1)) if self.parents_K is None else self.parents_K

    @property
    def is_chain(self) -> bool:
        """Whether no token has a sibling and none is left out."""
        return self.parents_K is None or self.parents_K == tuple(range(-1, len(self.parents_K) - 1))


NOTHING = Proposal(torch.empty(0, dtype=torch.long), None)
"""No draft: the step is plain."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification: the accepted draft nodes, in order, and the target's own next token.

    `bonus`: they reach the draft's end; `recovered`: the next token replaces the rejected drafts.
    """

    accepted: tuple[int, ...]
    next_token: int
    kind: Literal["bonus", "recovered"]


class More(Protocol):
    """The question that a drafter asks before each token of a chain: whether to draft on."""

    def __call__(self, confidence: float) -> bool:
        """Whether to draft one more token, of which the likeliest has this probability.

        Asked before a token is drawn: leaving one out for what it is would bias the output distribution.
        """

    def begins(self, name: str) -> int:
        """Say which of several drafters asks from here on; returns the most tokens that it may draft, 0 for none."""


class Drafter(Protocol):
    """Proposes continuations. Keeps what cache it likes; `context` is always the whole committed sequence.

    Between two `reset`s the context only grows.
    """

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """Tokens that may follow `context`: a chain of at most `k`, or a tree at most `k` deep.

        A drafter that knows probabilities asks `more` before every token (of a chain); others leave it alone.
        """

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""


class Ask(NamedTuple):
    """The arguments of `Drafter.propose`."""

    context: list[int]
    k: int
    sampling: Sampling
    generator: Randomness
    more: More | None = None

    def draw(self, probs_1V: Tensor, ahead: int, size: int, ids: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """A draft token `[1]` for `ahead` places behind the context's end, as a place in its distribution, and that
        distribution.

        The distribution covers `ids` of a vocabulary of `size`; None is returned where verification does not need it
        (`Repeatable`).
        """
        if isinstance(self.generator, Repeatable):
            return self.generator.choose(probs_1V, [len(self.context) + ahead], size, ids), None
        return sample(probs_1V, draw_uniforms(1, self.generator)), probs_1V


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """One whose kind drafts for several requests in passes that they share (`together`)."""

    def group(self) -> Hashable:
        """Drafters of one kind and equal groups draft together."""

    @classmethod
    def propose_many(cls, drafters: Sequence[Self], asks: Sequence[Ask]) -> list[Proposal]:
        """Proposals of a group of drafters, each as its own `propose` would give; `seconds` are shares of the common
        time.
        """


@runtime_checkable
class Follower(Protocol):
    """A drafter that reads its target, besides the tokens."""

    def follow(self, target: LM) -> None:
        """Read this sequence of the target from now on: called before the first proposal of every request."""


@runtime_checkable
class HeadDrafter(Drafter, Follower, Protocol):
    """A drafter by a head, which reads states of its target."""

    def first(self, tokens_T: Tensor) -> Tensor:
        """Logits `[T - 1, V]` of the first draft behind each of the newest T tokens of the target, but for the first.

        The target's latest pass has read these. Minus infinity for ids that the head does not draft. A head with a
        cache sees no earlier token.
        """


class DraftLength(Protocol):
    """Policy for how many tokens to draft next."""

    def next(self) -> int:
        """Most draft tokens of the coming step (0 = decode plainly)."""

    def judge(self) -> More | None:
        """The judge that a step's drafter asks whether to draft on; None where confidence does not matter."""

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        """Learn from a verified step and its seconds."""

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        """A new request of `prompt` tokens starts, to be continued by at most `ahead` (None: nobody knows).

        `domain` names its kind, for policies that remember kinds.
        """


@dataclass(frozen=True)
class StepRecord:
    """Accounting of one step: counts, and seconds spent drafting, verifying, and on everything else.

    Every step commits `accepted` + 1 tokens. A stop token inside the accepted run counts as the step's own next token,
    and what was drafted from there on is not counted. For a tree, `drafted` is the depth that could be accepted: the
    tree's own, or that of a branch that was accepted up to its end. `nodes`: every drafted token, stop token or not.
    `source`: the proposal's, for a drafter that has several.
    """

    drafted: int
    accepted: int
    t_draft: float
    t_verify: float
    t_other: float
    nodes: int = 0
    source: str = ""


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
