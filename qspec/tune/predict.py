"""From measured pieces to any combination: time of a token, harm, memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import math
from typing import NamedTuple

from qspec.numerics.speculation.replay import Steps, expected_walk, overlap, runs_of, walk
from qspec.numerics.speculation.speedup import pass_cost
from qspec.numerics.statistics.student import ratio_interval
from qspec.tune.pieces import Json, middle

Passes = Mapping[int, Mapping[int, tuple[float, float]]]
"""By batch size and rows of each sequence: seconds of a pass, and their relative error."""
UNKNOWN = 7.0
"""Relative error from which an interval is a thousand times either way, as when a machine stood still in a pass."""


@dataclass(frozen=True)
class TargetPiece:
    """A target under one scheme and KV format. kl: nats per token from the original; ttft: seconds to a first token.

    kl_ci: its 95 % interval, None from a single window.
    """

    passes: Passes
    kl: float
    kl_ci: tuple[float, float] | None
    top1: float
    ttft: float
    distributions: Json


@dataclass(frozen=True)
class DraftPiece:
    """A draft's `distributions` and `passes`, or its `runs` on the text (by target, or under "" for all of them).

    prompts: seconds in which a draft model reads each text's prompt. seconds: of a call without a model; per token for
    a speculator head, which has no call that is shorter.
    """

    passes: Passes = field(default_factory=dict)
    distributions: Json | None = None
    prompts: Sequence[float] = ()
    runs: Mapping[str, Json] = field(default_factory=dict)
    seconds: float = 0.0
    per_token: bool = False

    def seconds_of(self, drafted: int, unread: int, text: int, batch: int) -> float:
        """Seconds of all passes of one step's drafts.

        The first round of a request reads the prompt in its first pass. Without a model `batch` sequences cost so many
        times one: of heads, which draft for all in one pass a token, that is an upper bound.
        """
        if self.distributions is None:
            return batch * self.seconds * (drafted if self.per_token else 1)
        if drafted == 0:
            return 0.0
        first = batch * self.prompts[text] if unread == 0 else pass_seconds(self.passes, batch, unread)
        return first + (drafted - 1) * pass_seconds(self.passes, batch, 1)


@dataclass(frozen=True)
class Rounds:
    """Seconds of a round beside its passes, by its draft length: the engine's, and a draft model's."""

    engine: Mapping[int, float]
    draft: Mapping[int, float]

    def seconds(self, drafted: int, model: bool) -> float:
        return pass_cost(self.engine, drafted) + (pass_cost(self.draft, drafted) if model else 0.0)


@dataclass(frozen=True)
class PairPrediction:
    """One combination at one draft length and batch size 1. seconds: of a token, with a 95 % interval.

    The interval knows the spread of times and texts, not the model's own error: `Outcome` adds that.
    """

    target: str
    draft: str
    gamma: int
    seconds: float
    ci: tuple[float, float]
    tokens_per_step: float
    kl: float
    kl_ci: tuple[float, float] | None
    top1: float
    ttft: float
    memory: float

    @property
    def name(self) -> str:
        return f"{self.target} + {self.draft}, {self.gamma} tokens" if self.gamma else f"{self.target}, plain"

    @property
    def costs(self) -> tuple[float, float, float]:
        """Costs that the front is over."""
        return self.seconds, self.kl, self.memory

    @property
    def limited(self) -> tuple[float, ...]:
        """Values that budgets limit, the time of a token first."""
        return self.seconds, self.kl, self.ttft, self.memory / 1e9


class Replayed(NamedTuple):
    """The steps of one text, by its number, and how many tokens they decode."""

    text: int
    steps: Steps
    tokens: int


class SeparableModel:
    """The separable model: seconds of a request over its tokens, from pieces that know nothing of each other."""

    def __init__(
        self, targets: Mapping[str, TargetPiece], drafts: Mapping[str, DraftPiece], rounds: Rounds | None = None
    ) -> None:
        self._targets, self._drafts = targets, drafts
        self._rounds = rounds or Rounds({0: 0.0}, {0: 0.0})
        self._steps: dict[tuple[str, str, int], list[Replayed]] = {}

    def draft(self, name: str) -> DraftPiece:
        return self._drafts[name]

    def with_draft(self, name: str, piece: DraftPiece) -> "SeparableModel":
        """The model with this one draft beside all targets."""
        return SeparableModel(self._targets, {name: piece}, self._rounds)

    def predict(self, target: str, draft: str, gamma: int, memory: float) -> PairPrediction:
        """One combination, alone on the device."""
        piece = self._targets[target]
        seconds = self.seconds(target, draft, gamma)
        tokens, error = self.tokens_per_step(target, draft, gamma), min(UNKNOWN, self._error(target, draft, gamma))
        ci = (seconds * math.exp(-error), seconds * math.exp(error))
        harm = piece.kl, piece.kl_ci, piece.top1
        return PairPrediction(target, draft, gamma, seconds, ci, tokens, *harm, piece.ttft, memory)

    def seconds(self, target: str, draft: str, gamma: int, batch: int = 1) -> float:
        """Seconds of a token of each of `batch` sequences, once its prompt is read by the target."""
        if gamma == 0:
            rounds = batch * self._rounds.seconds(0, model=False)
            return pass_seconds(self._targets[target].passes, batch, 1) + rounds
        texts = self.steps(target, draft, gamma)
        return sum(self._spent(target, draft, one, batch) for one in texts) / sum(one.tokens for one in texts)

    def tokens_per_step(self, target: str, draft: str, gamma: int) -> float:
        if gamma == 0:
            return 1.0
        texts = self.steps(target, draft, gamma)
        return sum(one.tokens for one in texts) / sum(sum(one.steps.values()) for one in texts)

    def steps(self, target: str, draft: str, gamma: int) -> list[Replayed]:
        """The replay of every text."""
        key = target, draft, gamma
        if key not in self._steps:
            replays = enumerate(self._replayed(target, draft, gamma))
            self._steps[key] = [Replayed(text, steps, tokens) for text, (steps, tokens) in replays if tokens > 0]
        return self._steps[key]

    def schedule(self, target: str, draft: str, lengths: Sequence[int], batches: Sequence[int]) -> dict[int, int]:
        """The best draft length at every batch size; 0: plain decoding."""
        return {b: min([0, *lengths], key=lambda g: self.seconds(target, draft, g, b)) for b in batches}

    def _spent(self, target: str, draft: str, one: Replayed, batch: int) -> float:
        """Seconds of a text: `sum (t_draft + t_verify(d + 1) + t_round(d))` over its steps of d drafts."""
        piece, verify = self._drafts[draft], self._targets[target].passes
        return sum(
            count
            * (
                piece.seconds_of(drafted, unread, one.text, batch)
                + pass_seconds(verify, batch, drafted + 1)
                + batch * self._rounds.seconds(drafted, model=piece.distributions is not None)
            )
            for (drafted, unread), count in one.steps.items()
        )

    def _replayed(self, target: str, draft: str, gamma: int) -> Iterator[tuple[Steps, int]]:
        piece, ours = self._drafts[draft], self._targets[target].distributions
        if piece.distributions is None:
            runs = piece.runs.get(target) or piece.runs[""]
            for drafted_T, runs_T in zip(runs["drafted"], runs["runs"], strict=True):
                yield walk(drafted_T, runs_T, gamma), len(runs_T) - 1
        elif ours["probs"]:
            for p_T, q_T in zip(ours["probs"], piece.distributions["probs"], strict=True):
                yield expected_walk([overlap(p, q) for p, q in zip(p_T, q_T, strict=True)], gamma), len(p_T) - 1
        else:
            for a_T, b_T in zip(ours["top"], piece.distributions["top"], strict=True):
                runs_T = runs_of([a == b for a, b in zip(a_T, b_T, strict=True)])
                yield walk([gamma] * len(runs_T), runs_T, gamma), len(runs_T) - 1

    def _error(self, target: str, draft: str, gamma: int) -> float:
        """Half-width of the interval, relative: that of a token's seconds over texts, and that of the times."""
        time = _error(self._targets[target].passes, gamma + 1)
        if gamma == 0:
            return time
        if self._drafts[draft].passes:
            time = math.hypot(time, _error(self._drafts[draft].passes, 1))
        texts = self.steps(target, draft, gamma)
        spent, tokens = [self._spent(target, draft, one, 1) for one in texts], [float(one.tokens) for one in texts]
        low, high = ratio_interval(spent, tokens) or (0.0, 0.0)
        return math.hypot(time, (high - low) / 2 / (sum(spent) / sum(tokens)))


def pass_seconds(passes: Passes, batch: int, rows: int) -> float:
    """Between measured batch sizes and rows along straight lines."""
    return pass_cost({b: pass_cost({r: s for r, (s, _) in at.items()}, rows) for b, at in passes.items()}, batch)


def _error(passes: Passes, rows: int) -> float:
    at = passes[min(passes)]
    return at[min(at, key=lambda r: abs(r - rows))][1]


def passes_of(times: Json) -> Passes:
    """Medians and their errors of what `pass_times` measured."""
    return {int(b): {int(r): middle(s) for r, s in at.items()} for b, at in times.items() if all(at.values())}
