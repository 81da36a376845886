"""Policies for how many tokens to draft next."""

from collections import deque
from collections.abc import Callable, Sequence

from qspec.errors import RecipeError
from qspec.numerics.speculation.threshold import best_threshold
from qspec.speculation.length.cost_aware import CostAware
from qspec.speculation.length.history import History
from qspec.speculation.types import DraftLength, More

POLICIES = ("fixed", "heuristic", "confidence", "optimal")
SEEN = 128
"""Tested tokens that a threshold is fitted to."""

Schedule = Sequence[tuple[int, int, int]]
"""`(lo, hi, K)`: at batch sizes lo … hi at most K draft tokens; sizes between and behind ranges keep the K before."""


class Fixed:
    """Always the same length."""

    def __init__(self, k: int) -> None:
        self._k = k

    def next(self) -> int:
        return self._k

    def judge(self) -> More | None:
        return None

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        """A fixed length learns nothing."""

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        """A fixed length holds nothing."""


class Heuristic:
    """Two more after a draft that was accepted whole, one less after a rejection, within `[1, max_k]`."""

    def __init__(self, k: int = 5, max_k: int = 16) -> None:
        self._first, self._max, self._k = k, max_k, k

    def next(self) -> int:
        return self._k

    def judge(self) -> More | None:
        return None

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        """An empty draft teaches nothing."""
        if drafted:
            self._k = min(self._k + 2, self._max) if accepted == drafted else max(self._k - 1, 1)

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        self._k = self._first


class Confidence:
    """Drafts until the draft's own probability of its newest token falls below a threshold, at most `max_k` tokens.

    The threshold is fitted to the last `SEEN` tested tokens of the request's domain once some were accepted and some
    were not: least false-positive rate + 3 × false-negative rate. Tokens below it stay in their proposal and are tested
    too. Drafters that state no confidence draft `k`.
    """

    def __init__(self, k: int = 5, max_k: int = 16, threshold: float = 0.4) -> None:
        self._k, self._max = k, max_k
        self._memory = History(lambda: _Threshold(threshold))
        self._stating = set[str]()  # drafters that state their confidence
        self.reset()

    @property
    def threshold(self) -> float:
        return self._now.value

    def next(self) -> int:
        return self._max if self._stating else self._k

    def most(self, name: str) -> int:
        """The most tokens that the named one of several drafters may draft."""
        return self._max if name in self._stating else self._k

    def judge(self) -> More:
        self._doubt = _Doubt(self._now.value, self.most)
        return self._doubt

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        if drafted:
            confidences = self._doubt.confidences
            if confidences:
                self._stating.add(self._doubt.name)
            self._now.add(confidences[: min(drafted, accepted + 1)], accepted)

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        self._now = self._memory.of(domain)
        self._doubt = _Doubt(self._now.value, self.most)


class _Doubt:
    """Ends a draft behind the first token below a threshold: that one stays, to be tested."""

    def __init__(self, threshold: float, most: Callable[[str], int]) -> None:
        self._threshold, self._most, self._sure = threshold, most, True
        self.name, self.confidences = "", list[float]()

    def begins(self, name: str) -> int:
        self.name, self._sure, self.confidences = name, True, []
        return self._most(name)

    def __call__(self, confidence: float) -> bool:
        wanted, self._sure = self._sure, confidence >= self._threshold
        if wanted:
            self.confidences.append(confidence)
        return wanted


class _Threshold:
    """A threshold and the tested tokens it is fitted to."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._seen: deque[tuple[float, bool]] = deque(maxlen=SEEN)

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        self._seen.extend((confidence, i < accepted) for i, confidence in enumerate(confidences))
        threshold = best_threshold([seen[0] for seen in self._seen], [seen[1] for seen in self._seen])
        self.value = self.value if threshold is None else threshold


class BatchLimited:
    """Another policy, capped by batch size: speculation pays less the more rows a pass already has.

    `batch` is called before each step (default: one sequence). At K = 0 the step is plain decoding.
    """

    def __init__(self, policy: DraftLength, schedule: Schedule, batch: Callable[[], int] = lambda: 1) -> None:
        self.policy, self.schedule, self._batch = policy, schedule, batch

    def next(self) -> int:
        limit = limit_at(self.schedule, self._batch())
        return 0 if limit == 0 else min(self.policy.next(), limit)

    def judge(self) -> More | None:
        return self.policy.judge()

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        self.policy.update(drafted, accepted, t_draft, t_verify)

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        self.policy.reset(domain, prompt, ahead)


def limit_at(schedule: Schedule, batch: int) -> int:
    """The most draft tokens at a batch size, by the last range that begins at or below it."""
    return [k for lo, _, k in schedule if lo <= batch][-1]


def constant(policy: DraftLength | None) -> int | None:
    """The draft length of one request that a policy always gives; None for one that learns."""
    if isinstance(policy, BatchLimited):
        k = constant(policy.policy)
        return None if k is None else min(k, limit_at(policy.schedule, 1))
    return policy.next() if isinstance(policy, Fixed) else None


def build(policy: str, k: int, max_k: int, threshold: float = 0.4, by_batch: Schedule = ()) -> DraftLength:
    """The policy of that name; raises `RecipeError` for other names and for lengths that do not fit."""
    if k < 1:
        raise RecipeError(f"draft length k={k}", "a draft has at least 1 token", "set draft_length.k to 1 or more")
    if policy not in POLICIES:
        raise RecipeError(f"draft length policy {policy!r}", "not a policy", f"use one of: {', '.join(POLICIES)}")
    if policy != "fixed" and k > max_k:
        raise RecipeError(f"draft length k={k}", f"above max_k={max_k}", "lower draft_length.k or raise max_k")
    made: dict[str, Callable[[], DraftLength]] = {
        "fixed": lambda: Fixed(k),
        "heuristic": lambda: Heuristic(k, max_k),
        "confidence": lambda: Confidence(k, max_k, threshold),
        "optimal": lambda: CostAware(max_k),
    }
    return BatchLimited(made[policy](), by_batch) if by_batch else made[policy]()
