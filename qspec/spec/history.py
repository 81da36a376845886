"""What draft-length policies remember: which draft tokens stood, how long passes take, and both by kind of request."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Generic, TypeVar

from qspec.numerics.speedup import pass_cost

T = TypeVar("T")

DECAY = 0.97
"""Weight that a step keeps when the next one comes: about the last 33 steps count."""
PRIOR_RATE = 0.7
PRIOR_WEIGHT = 2.0
POSITION_WEIGHT = 4.0
"""Tested tokens that the rate of all positions is worth to one of them, and a stated confidence to its own record."""
BINS = 10
WINDOW = 9
"""Timings that a median is taken of."""


class History(Generic[T]):
    """One memory per domain, made when it is first asked for; the `most` recently used ones are kept."""

    def __init__(self, make: Callable[[], T], most: int = 64) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[str, T] = OrderedDict()

    def of(self, domain: str) -> T:
        if domain not in self._kept:
            self._kept[domain] = self._make()
        self._kept.move_to_end(domain)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return self._kept[domain]

    def __len__(self) -> int:
        return len(self._kept)


class Outcomes:
    """Decayed counts of draft tokens that were tested, by position and by confidence.

    prior: rate that is believed, at the weight of `PRIOR_WEIGHT` tokens, before there are counts.
    """

    def __init__(self, positions: int, prior: float = PRIOR_RATE) -> None:
        self._prior = prior
        self._stood, self._tested = [0.0] * positions, [0.0] * positions
        self._bin_stood, self._bin_tested = [0.0] * BINS, [0.0] * BINS

    def add(self, drafted: int, accepted: int, confidences: Sequence[float] = ()) -> None:
        """Learn from a proposal: its accepted tokens stood, the next one fell, the others were not tested."""
        for counts in (self._stood, self._tested, self._bin_stood, self._bin_tested):
            counts[:] = [DECAY * count for count in counts]
        last = len(self._tested) - 1
        for i in range(min(drafted, accepted + 1)):
            position, stands = min(i, last), float(i < accepted)
            self._stood[position] += stands
            self._tested[position] += 1
            if i < len(confidences):
                self._bin_stood[_bin(confidences[i])] += stands
                self._bin_tested[_bin(confidences[i])] += 1

    @property
    def pooled(self) -> float:
        """Rate of all positions together."""
        return _shrunk(sum(self._stood), sum(self._tested), self._prior, PRIOR_WEIGHT)

    def rates(self) -> list[float]:
        """Rate of each position among the drafts that stood up to it, drawn to the pooled one where counts are few."""
        pooled = self.pooled
        return [_shrunk(s, n, pooled, POSITION_WEIGHT) for s, n in zip(self._stood, self._tested, strict=True)]

    def calibrated(self, confidence: float) -> float:
        """Rate at which tokens of about this confidence have stood; the confidence itself before there are counts."""
        i = _bin(confidence)
        return _shrunk(self._bin_stood[i], self._bin_tested[i], confidence, POSITION_WEIGHT)


class Timings:
    """Medians of recent durations in seconds: of drafting a token, and of verifying by the number of rows."""

    def __init__(self) -> None:
        self._draft: deque[float] = deque(maxlen=WINDOW)
        self._verify: dict[int, deque[float]] = {}

    def add_draft(self, seconds: float) -> None:
        self._draft.append(seconds)

    def add_verify(self, rows: int, seconds: float) -> None:
        self._verify.setdefault(rows, deque(maxlen=WINDOW)).append(seconds)

    @property
    def knows_draft(self) -> bool:
        return bool(self._draft)

    @property
    def knows_plain(self) -> bool:
        return 1 in self._verify

    @property
    def draft(self) -> float:
        return median(self._draft) if self._draft else 0.0

    def verify(self, most: int) -> list[float]:
        """Seconds of a pass over 1 … `most` rows: medians, and lines between them."""
        known = {rows: median(seconds) for rows, seconds in self._verify.items()} or {1: 0.0}
        return [pass_cost(known, rows) for rows in range(1, most + 1)]


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


def _shrunk(stood: float, tested: float, towards: float, weight: float) -> float:
    return (stood + weight * towards) / (tested + weight)
