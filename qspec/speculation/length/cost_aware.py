"""The draft length that gains most at measured acceptance and cost, down to none, and never at a lasting loss."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from qspec.speculation.length.history import History
from qspec.speculation.types import More

SHARE = 0.01
"""Plain steps that a drafter earns by each step in which it is left alone, to be lost by another look at it."""
ALLOWANCE = 8.0
"""The most gains, in plain steps, that an account keeps against later losses; half of it is lent at first."""
FIRST_PLAIN, PLAIN_EVERY = 3, 128
"""Plain steps before the first draft; steps with drafts after which a plain one is timed again."""
DECAY = 0.96
"""Weight that a step keeps when the next one comes: about the last 25 count."""
BINS = 10
"""Classes of confidence; for each of them accepted tokens are counted."""
WEIGHT = 4.0
"""Samples that the more general estimate is worth to a more special one (domain, number of rows)."""
WINDOW = 9
"""Timings that a median is taken of."""
HELD_UP = 2.0
"""Factor of the expected seconds from which a step counts as held up: the machine slept, or was busy with something
else.
"""


class CostAware:
    """Maximises tokens per second, from no drafts to `max_k` (arXiv 2211.17192, theorem 3.8, with measured terms).

    A token is drafted if the chance that it and all before it are accepted is more than its seconds would bring at the
    present speed. Its own chance is the share of tokens of about its confidence that were accepted lately, by drafter
    and domain. A drafter that states confidences asks token by token; tokens of others all count alike (as certain).

    Each drafter (of several, `More.begins` tells them apart) has an account by domain of what its steps gained over
    plain ones, everything that drafting took included. When the account is used up the drafter is left alone, whatever
    the counts say, until the steps without it have earned, at `SHARE` each, what a look at it can lose: a draft of one
    token. A drafter that must read committed tokens first (the prompt, or what was decoded without it) is used where
    its usual gain, over the rest of the answer, exceeds what the reading takes.

    The first steps are plain, and the first drafts are single tokens until their cost is known.
    """

    def __init__(self, max_k: int = 16) -> None:
        self._max = max_k
        self._sources: dict[str, DrafterHistory] = {}
        self._plain, self._rows = Median(), RowSeconds(max_k)
        self._speed, self._since_plain = Mean(), 0
        self._answers = History(Mean)
        self._clear()
        self._begin("", 0, None)

    def _clear(self) -> None:
        """A step begins: no drafter was asked."""
        self._current: DrafterHistory | None = None
        self._named, self._confidences, self._chance = False, list[float](), 1.0

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        if self._made:
            self._answers.of(self._domain).add(self._made, 1)
        self._begin(domain, prompt, ahead)
        for source in self._sources.values():
            source.begin(domain, prompt)

    def next(self) -> int:
        if self._plain.count < FIRST_PLAIN or self._since_plain >= PLAIN_EVERY or not self._plain.value:
            return 0
        if not self._sources:
            return 1
        return max(map(self._allow, self._sources.values()))

    def judge(self) -> More:
        return self

    def begins(self, name: str) -> int:
        self._named, source = True, self._source(name)
        if source.most:
            self._current, self._confidences, self._chance = source, [], 1.0
        return source.most

    def __call__(self, confidence: float) -> bool:
        if self._current is None:
            self._current = self._source("")
        self._confidences.append(confidence)
        self._chance *= self._current.here.rate(confidence)
        return self._chance > self._price(self._current, len(self._confidences))

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        current, seconds = self._current, t_draft + t_verify
        if current is None and not self._named and (drafted or t_draft):
            current = self._source("")
        for source in self._sources.values():
            if source is not current:
                source.behind += accepted + 1
                source.account.rest += SHARE / len(self._sources)
        if drafted:
            self._since_plain += 1
        else:
            self._since_plain = 0
            self._plain.add(t_verify)
            seconds = t_draft + self._plain.value
        if current is not None:
            seconds = self._settle(current, drafted, accepted, t_draft, seconds)
        self._speed.add(accepted + 1, seconds)
        self._made += accepted + 1
        self._clear()

    def _begin(self, domain: str, prompt: int, ahead: int | None) -> None:
        self._domain, self._prompt, self._made = domain, prompt, 0
        self._ahead = min(inf if ahead is None else ahead, self._answers.of(domain).value)

    def _source(self, name: str) -> "DrafterHistory":
        if name not in self._sources:
            self._sources[name] = DrafterHistory(self._domain, self._prompt + self._made)
        return self._sources[name]

    def _allow(self, source: "DrafterHistory") -> int:
        """Decide how many tokens a drafter may draft in this step; one that states confidences finds its own length."""
        account, plain = source.account, self._plain.value
        reading, gain = source.reading / plain, account.gain.value * (self._ahead - self._made)
        source.most = 0
        if account.left > 0 and reading <= max(account.left, gain):
            source.most = self._max if source.states else self._length(source)
        single = (source.token.value + self._rows.more[1]) / plain
        if account.looks or (not source.most and account.look(reading, single)):
            source.most = 1
        return source.most

    def _length(self, source: "DrafterHistory") -> int:
        chance, rate = 1.0, source.here.rate(1.0)
        for n in range(self._max):
            chance *= rate
            if chance <= self._price(source, n + 1):
                return n
        return self._max

    def _price(self, source: "DrafterHistory", n: int) -> float:
        """Chance that the n-th token needs: tokens that would come in its seconds at the present speed.

        The first token of a look is free, and so is a single one before costs are known.
        """
        known = source.token.count and self._rows.known
        if n == 1 and (source.account.looks or not known):
            return 0.0
        if n > self._max or not known:
            return inf
        row = max(0.0, self._rows.more[n] - self._rows.more[n - 1])
        return max(1 / self._plain.value, self._speed.value) * (source.token.value + row)

    def _settle(self, source: "DrafterHistory", drafted: int, accepted: int, t_draft: float, seconds: float) -> float:
        """Learn from a step with a drafter; return its seconds without those that it was held up."""
        plain, tried = self._plain.value, max(drafted, len(self._confidences))
        drafting, verifying = tried * source.token.value, seconds - t_draft
        if source.token.count and self._rows.known:
            seconds = min(seconds, HELD_UP * (source.reading + drafting + plain + self._rows.more[drafted]))
        if plain:
            reading = max(0.0, seconds - verifying - drafting) if source.behind else 0.0
            source.account.book(accepted + 1 - seconds / plain, reading / plain, accepted + 1, drafted > 0)
            if drafted:
                self._rows.add(drafted, verifying, plain)
        source.learn(drafted, accepted, t_draft, self._confidences)
        return seconds


class DrafterHistory:
    """A drafter: its seconds, what became of its tokens in this domain and in all, and its account."""

    def __init__(self, domain: str, behind: int) -> None:
        self.token, self._read = Median(), Mean()  # seconds: of drafting a token, of reading a committed one
        self._everywhere = everywhere = AcceptanceCounts()
        self._memory = History(lambda: (AcceptanceCounts(everywhere), Account()))
        self.here, self.account = self._memory.of(domain)
        self.states, self.most = False, 1
        self.behind = behind  # committed tokens that it has not read
        self._first, self._unsplit = True, (0, 0.0, 0)

    def begin(self, domain: str, prompt: int) -> None:
        """Start a request."""
        self.account.invested = 0.0
        self.here, self.account = self._memory.of(domain)
        self.behind, self._first = prompt, True

    @property
    def reading(self) -> float:
        """Seconds of reading what was committed without it; 0 before they are known."""
        return self.behind * self._read.value if self._read.weight else 0.0

    def learn(self, drafted: int, accepted: int, seconds: float, confidences: Sequence[float]) -> None:
        """Note what became of a proposal, and its seconds."""
        tried = max(drafted, len(confidences))
        if tried:
            self.states = bool(confidences)
            self._time(tried, seconds)
        if drafted:
            tested = (confidences or [1.0] * drafted)[: min(drafted, accepted + 1)]
            for acceptance in (self.here, self._everywhere):
                acceptance.add(tested, accepted)
        self.behind = 0

    def _time(self, tried: int, seconds: float) -> None:
        """Book seconds: a request's first proposal, which also reads the prompt, as reading, the others as drafting."""
        if self._first:
            self._unsplit = tried, seconds, self.behind
        else:
            self.token.add(seconds / tried)
        self._first = False
        tried, seconds, behind = self._unsplit
        if behind and self.token.count:
            self._read.add(max(0.0, seconds - tried * self.token.value), behind)
            self._unsplit = 0, 0.0, 0


class AcceptanceCounts:
    """Decayed counts of tested tokens by confidence. Few of them are pulled towards the `wider` counts, and few of
    those towards the confidence itself.
    """

    def __init__(self, wider: "AcceptanceCounts | None" = None) -> None:
        self._wider = wider
        self._accepted, self._tested = [0.0] * BINS, [0.0] * BINS

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        """Count the tested tokens of a proposal, of which the first `accepted` were accepted."""
        for counts in (self._accepted, self._tested):
            counts[:] = [DECAY * count for count in counts]
        for i, confidence in enumerate(confidences):
            self._accepted[_bin(confidence)] += i < accepted
            self._tested[_bin(confidence)] += 1

    def rate(self, confidence: float) -> float:
        """Share of tokens of about this confidence that are accepted."""
        i, prior = _bin(confidence), confidence if self._wider is None else self._wider.rate(confidence)
        return (self._accepted[i] + WEIGHT * prior) / (self._tested[i] + WEIGHT)


class RowSeconds:
    """Seconds that drafts add to a pass, by their number (`more`): means, pulled towards a line through all of them."""

    def __init__(self, most: int) -> None:
        self._by_drafts, self._line = [Mean() for _ in range(most + 1)], Mean()
        self.more, self.known = [0.0] * (most + 1), False

    def add(self, drafts: int, seconds: float, plain: float) -> None:
        """Take a pass's seconds, cut at `HELD_UP` times the expected ones; nothing is expected of drafts at first."""
        more = max(0.0, min(seconds, HELD_UP * (plain + self.more[drafts])) - plain)
        self._line.add(more, drafts)
        for n, mean in enumerate(self._by_drafts):
            mean.add(more * (n == drafts), n == drafts)
            self.more[n] = (mean.total + WEIGHT * n * self._line.value) / (mean.weight + WEIGHT)
        self.known = True


class Median:
    """Median of the last `WINDOW` values, 0 before there are any."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.count = len(self._values)
        self.value = sorted(self._values)[self.count // 2]


class Mean:
    """Decayed total over decayed weight, infinite before there are any."""

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0

    def add(self, total: float, weight: float) -> None:
        self.total, self.weight = DECAY * self.total + total, DECAY * self.weight + weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else inf


@dataclass
class Account:
    """Balance of a drafter: the loss that it may still make, and the gain of steps without it, in plain steps."""

    balance: float = field(default_factory=lambda: ALLOWANCE / 2)
    invested: float = 0.0  # lost to reading in this request, to be paid back by its end
    rest: float = 0.0
    looks: bool = False  # up to the first token that is tested
    gain: Mean = field(default_factory=Mean)  # per token, without what was invested

    @property
    def left(self) -> float:
        return round(self.balance + self.invested, 9)

    def look(self, reading: float, draft: float) -> bool:
        """Begin a look if twice the reading and a token that is not accepted have been earned."""
        if self.rest < 2 * reading + draft:
            return False
        self.balance, self.looks, self.rest = max(self.balance, reading + draft), True, 0.0
        return True

    def book(self, gain: float, invested: float, tokens: int, drafted: bool) -> None:
        """Book a step that took `gain` plain steps less than its tokens would have taken without drafts; reading took
        `invested`.
        """
        self.balance = min(ALLOWANCE, self.balance + gain)
        self.invested, self.rest = self.invested + invested, 0.0
        self.looks = self.looks and not drafted and self.left > 0
        self.gain.add(gain + invested, tokens)


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)
