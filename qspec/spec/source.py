"""What the cost-optimal policy knows of one drafter."""

from collections.abc import Sequence
from math import inf

from qspec.numerics.speedup import expected_tokens, optimal_gamma
from qspec.spec.account import MOST_LOST, Account
from qspec.spec.history import DraftTimes, History, Outcomes

FIRST_LENGTH = 2
"""Tokens of the first drafts, whose cost nobody knows."""
MARGIN = 0.02
"""Expected gain below which drafting is not worth its risk."""
RETURN = 2.0
"""Times what the drafter has to read first, which a request must be expected to save."""
SLOW_DECAY = 0.995
"""Of counts over all domains: the last 200 steps."""


class Source:
    """Its seconds and what stood of it; best length, whether that pays, and seconds that a token then saves."""

    def __init__(self, k: int, max_k: int, domain: str, behind: int) -> None:
        self._max = max_k
        self.times, everywhere = DraftTimes(), Outcomes(max_k, decay=SLOW_DECAY)
        self._everywhere = everywhere
        self._memory = History(lambda: (Outcomes(max_k, everywhere), Account()))
        self.stated, self.too_short = False, False
        self.best, self.pays, self._saving = min(k, FIRST_LENGTH), True, inf
        self.begin(domain, behind)

    def begin(self, domain: str, prompt: int) -> None:
        """A request starts."""
        self.here, self.account = self._memory.of(domain)
        self.behind = prompt  # committed tokens that it was not asked about

    def expect(self, prompt: int, tokens: float, plain: float) -> None:
        """So many tokens are to come: do not begin with drafts that lose, or that save less than reading takes.

        plain: seconds of a plain step; up to `MOST_LOST` of them the account decides.
        """
        if self.account.on and not self.pays:
            self.account.stop()
        read, saving = self.times.read(prompt), self._saving * self.account.spoken * tokens
        self.too_short = read > MOST_LOST * plain and RETURN * read > saving
        if self.too_short:
            self.account.speak()

    def expected(self, drafted: int, seconds: float, confidences: Sequence[float]) -> tuple[float, float]:
        """Seconds that such a proposal usually takes, and of this one those that reading took."""
        drafting = self.times.draft * max(drafted, len(confidences))
        return self.times.read(self.behind) + drafting, max(0.0, seconds - drafting) if self.behind else 0.0

    def learn(self, drafted: int, accepted: int, seconds: float, confidences: Sequence[float]) -> None:
        """What became of a proposal, and what it took."""
        if drafted or confidences:
            self.times.add(max(drafted, len(confidences)), seconds, self.behind)
            self.stated = bool(confidences)
        if drafted:
            for outcomes in (self.here, self._everywhere):
                outcomes.add(drafted, accepted, confidences)
        self.behind = 0

    def plan(self, verify: Sequence[float]) -> None:
        """verify: seconds of passes over 1 … rows. A drafter that states its confidence decides by each, if at all."""
        draft, plain = self.times.draft, verify[0]
        if not plain or not self.times.known:
            return
        rates, costs = self.here.rates(), [seconds / plain for seconds in [0.0, *verify]]
        self.best = optimal_gamma(rates, draft / plain, self._max, costs.__getitem__, least=1)
        rate = expected_tokens(rates, self.best) / (self.best * draft + verify[self.best])
        self._saving = plain - 1 / rate
        self.pays = self.stated or rate * plain > 1 + MARGIN
