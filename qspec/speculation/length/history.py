"""What draft-length policies remember: which draft tokens stood, how long passes take, and both by kind of request."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Generic, TypeVar

from qspec.numerics.speculation.speedup import pass_cost

T = TypeVar("T")

DECAY = 0.97
"""About the last 33 steps count."""
PRIOR_RATE = 0.7
PRIOR_WEIGHT = 2.0
POSITION_WEIGHT = 4.0
"""Tested tokens that the rate of all positions is worth to one of them, and a stated confidence to its own record."""
BINS = 10
HELD_UP = 2.0
"""Times what is expected of a pass, or of a step, above which the machine slept or was busy with something else."""
WINDOW = 9
"""Timings that a median is taken of."""
AGE = 32
"""Plain passes after which a timing of every other number of rows is forgotten."""
LINE_WEIGHT = 2.0
"""Timings of a number of rows that the line through all of them is worth."""
PRIOR_SLOPE, SLOPE_WEIGHT = 0.1, 8.0
"""What a further row costs of a plain pass before it is known, and the weight of that: two timings of three rows."""


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

    towards: wider counts that these are drawn to where they are few; those without are drawn to `PRIOR_RATE`, and to
    what a confidence says. decay: weight that a step keeps when the next one comes.
    """

    def __init__(self, positions: int, towards: "Outcomes | None" = None, decay: float = DECAY) -> None:
        self._towards, self._decay = towards, decay
        self._stood, self._tested = [0.0] * positions, [0.0] * positions
        self._bin_stood, self._bin_tested = [0.0] * BINS, [0.0] * BINS

    def add(self, drafted: int, accepted: int, confidences: Sequence[float] = ()) -> None:
        """Learn from a proposal: its accepted tokens stood, the next one fell, the others were not tested."""
        for counts in (self._stood, self._tested, self._bin_stood, self._bin_tested):
            counts[:] = [self._decay * count for count in counts]
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
        prior = PRIOR_RATE if self._towards is None else self._towards.pooled
        return _shrunk(sum(self._stood), sum(self._tested), prior, PRIOR_WEIGHT)

    def rates(self) -> list[float]:
        """Rate of each position among the drafts that stood up to it, drawn to the pooled one where counts are few."""
        pooled = self.pooled
        return [_shrunk(s, n, pooled, POSITION_WEIGHT) for s, n in zip(self._stood, self._tested, strict=True)]

    def calibrated(self, confidence: float) -> float:
        """Rate at which tokens of about this confidence have stood; the confidence itself before there are counts."""
        i, prior = _bin(confidence), confidence if self._towards is None else self._towards.calibrated(confidence)
        return _shrunk(self._bin_stood[i], self._bin_tested[i], prior, POSITION_WEIGHT)


class DraftTimes:
    """Medians of recent seconds: of drafting a token, and of reading what was committed without the drafter."""

    def __init__(self) -> None:
        self._draft: deque[float] = deque(maxlen=WINDOW)
        self._read: dict[int, deque[float]] = {}
        self._unsplit: tuple[int, int, float] | None = None

    def add(self, tokens: int, seconds: float, behind: int) -> None:
        """A draft of so many tokens, which first read the `behind` committed ones that it had not been asked about."""
        if behind and self._draft:
            self._add_read(tokens, behind, seconds)
        elif behind:
            self._unsplit = tokens, behind, seconds
        else:
            self._draft.append(seconds / tokens)
            if self._unsplit is not None:
                self._add_read(*self._unsplit)
                self._unsplit = None

    def _add_read(self, tokens: int, behind: int, seconds: float) -> None:
        rest = max(0.0, seconds - tokens * self.draft)
        self._read.setdefault(1 << behind.bit_length() - 1, deque(maxlen=WINDOW)).append(rest / behind)

    @property
    def known(self) -> bool:
        return bool(self._draft)

    @property
    def draft(self) -> float:
        return median(self._draft) if self._draft else 0.0

    def read(self, behind: int) -> float:
        """Seconds of reading so many committed tokens before the next draft."""
        if not behind or not self._read:
            return 0.0
        return behind * pass_cost({size: median(rates) for size, rates in self._read.items()}, behind)


class VerifyTimes:
    """Medians of recent seconds of the target's passes, by number of rows."""

    def __init__(self) -> None:
        self._by_rows: dict[int, deque[float]] = {}
        self._plain = 0

    def add(self, rows: int, seconds: float) -> None:
        self._by_rows.setdefault(rows, deque(maxlen=WINDOW)).append(seconds)
        self._plain += rows == 1
        if rows == 1 and self._plain % AGE == 0:
            self._age()

    def _age(self) -> None:
        """Forget the oldest timing of every number of rows: what was dear on a busy machine is tried again."""
        for rows in [rows for rows in self._by_rows if rows > 1]:
            self._by_rows[rows].popleft()
            if not self._by_rows[rows]:
                del self._by_rows[rows]

    def not_held_up(self, rows: int, seconds: float) -> float:
        """A pass's time, at most twice that of its rows one by one: beyond that it was held up, as by sleep."""
        return min(seconds, HELD_UP * rows * median(self._by_rows[1])) if rows > 1 and self.plain else seconds

    @property
    def plain(self) -> int:
        """How many recent plain passes there are timings of."""
        return len(self._by_rows.get(1, ()))

    def seconds(self, most: int) -> list[float]:
        """Of a pass over 1 … `most` rows.

        Medians where there are many timings; a line through all of them, which starts at a row's and rises by
        `PRIOR_SLOPE` before anything is known, where there are few: a length that seemed dear once would not be tried
        again.
        """
        medians = {rows: median(seconds) for rows, seconds in self._by_rows.items()}
        plain = medians.get(1, 0.0)
        slope = self._slope(medians, plain)
        line = [plain + slope * more for more in range(most)]
        apart = {1: 0.0}
        for rows, seconds in medians.items():
            n = len(self._by_rows[rows])
            apart[rows] = n / (n + LINE_WEIGHT) * (seconds - plain - slope * (rows - 1))
        last = max(apart)
        return [seconds + pass_cost(apart, min(rows, last)) for rows, seconds in enumerate(line, 1)]

    def _slope(self, medians: Mapping[int, float], plain: float) -> float:
        over, under = PRIOR_SLOPE * plain * SLOPE_WEIGHT, SLOPE_WEIGHT
        for rows, seconds in medians.items():
            more, n = rows - 1, len(self._by_rows[rows])
            over, under = over + n * more * (seconds - plain), under + n * more**2
        return max(0.0, over / under)


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


def _shrunk(stood: float, tested: float, towards: float, weight: float) -> float:
    return (stood + weight * towards) / (tested + weight)
