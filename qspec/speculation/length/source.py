"""What the cost-optimal policy knows of one drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from qspec.numerics.speculation.speedup import expected_tokens, optimal_gamma
from qspec.speculation.length.history import DraftTimes, History, Outcomes

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


MOST_LOST = 2.0
"""Plain steps that drafting may lose, beyond what it has saved, before it stops."""


MOST_SAVED = 8.0
"""Plain steps of earlier gains that count against losses: more would let a draft that went bad go on for long."""


FIRST_WAIT, LONGEST_WAIT = 16, 512
"""Plain steps until the next look; doubled by every look that brings nothing."""


LOOK = 2
"""Steps of which nothing stands whose loss ends a look."""


FRESH = 0.05
"""Weight of a step in the share of steps that had drafts."""


@dataclass
class Account:
    """Whether drafts are on, what they have saved lately, and the plain steps until they are tried again."""

    on: bool = True
    saved: float = 0.0
    invested: float = 0.0  # by this request's drafter, to read what was committed without it: may be lost for a while
    left: int = 0
    look: float = 0.0  # what the present look may lose
    wait: int = FIRST_WAIT
    spoken: float = 1.0  # share of recent steps that the drafter, when asked, had something to say

    def book(self, gain: float, invested: float, pays: bool, silent: bool) -> None:
        """A step took `gain` plain steps less than its tokens would have without a drafter.

        `invested` of them, lost for now, are for all steps of the request.
        pays: whether drafts are expected to gain; silent: the drafter had nothing to say, which decides nothing.
        """
        self.saved = min(MOST_SAVED, self.saved + gain)
        self.invested += invested
        self.speak(not silent)
        if self.look:
            if pays and self.saved + self.invested > 0:
                self.on, self.look, self.wait = True, 0.0, FIRST_WAIT
            elif self.saved + self.invested <= -self.look:
                self.stop()
        elif not (pays or silent) or self.saved + self.invested < -MOST_LOST:
            self.stop()

    def speak(self, something: bool = True) -> None:
        """It was asked and had something to say; or it was not asked, and is believed to have a little more."""
        self.spoken += FRESH * (something - self.spoken)

    def stop(self) -> None:
        self.on, self.look, self.saved, self.invested = False, 0.0, 0.0, 0.0
        self.left, self.wait = self.wait, min(2 * self.wait, LONGEST_WAIT)

    def start_look(self, may_lose: float) -> None:
        self.look, self.saved, self.invested = may_lose, 0.0, 0.0

    def end_request(self, pays: bool) -> None:
        """What this request invested has been paid back, or is lost."""
        self.look, self.invested = 0.0, 0.0
        if self.on and (not pays or self.saved < -MOST_LOST):
            self.stop()
