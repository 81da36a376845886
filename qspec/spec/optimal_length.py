"""The draft length that gains most at measured acceptance and cost, down to none, and never at a lasting loss."""

from math import ceil, inf

from qspec.numerics.speedup import expected_tokens, optimal_gamma
from qspec.spec.account import LOOK, Account
from qspec.spec.history import History, Outcomes, Timings
from qspec.spec.types import More

SHARE = 0.01
"""Of all decoding time, what drafts may lose beyond what they have saved before they are tried again."""
MARGIN = 0.02
"""Expected gain below which drafting is not worth its risk."""
FIRST_PLAIN, PLAIN_EVERY, PLAIN_RARELY = 3, 16, 128
"""Plain steps before the first draft; steps with drafts after which one is timed again, for each that is known."""
FIRST_LENGTH = 2
"""Tokens of the first drafts, whose cost nobody knows."""
RETURN = 2.0
"""Times what the drafter has to read first, which a request must be expected to save."""
OUTLIER = 2.0
"""Times the expected seconds of a step, above which the machine was busy with something else."""


class Optimal:
    """Maximises expected tokens per second (arXiv 2211.17192, theorem 3.8, with measured terms), from 0 to `max_k`.

    Tokens: `1 + sum_i prod_{j <= i} a_j`, with a_j the acceptance at position j, decayed counts of the request's domain
    drawn to a prior. Seconds: `gamma t_draft + t_verify(gamma + 1)`, medians of recent steps, and what the drafter
    first has to read: the prompt, or what was decoded without it. A request too short to pay that back is decoded
    plainly, whatever a step would gain. Drafters that state their confidence draft until one more token would cost more
    tokens, at the best rate, than it can bring.

    Each domain has an `Account` of what its steps with drafts have gained over plain ones, everything that drafting
    took included; where that turns to a loss drafts stop, whatever the estimates say. At 0 a step is counted and its
    pass is timed, and the drafter is left alone. A look at drafts again comes after waits that double each time it
    brings nothing, and only when all that drafts have lost, and could lose now, is within `SHARE` of all decoding time.
    The first three steps are plain, and drafts are short until their cost is known.
    """

    def __init__(self, k: int = 5, max_k: int = 16, share: float = SHARE) -> None:
        self._k, self._max, self._share = k, max_k, share
        self._everything = Outcomes(max_k)
        self._memory = History(lambda: (Outcomes(max_k, self._everything.pooled), Account()))
        self._times = Timings()
        self._since_plain, self._plain_after, self._made = 0, 0, 0
        self._seconds, self._lost = 0.0, 0.0
        self._stated = False
        self._domain, self._account = self._memory.of("")
        self.reset()

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        if self._made:
            self._account.end_request(self._made, self._pays)
        self._domain, self._account = self._memory.of(domain)
        self._asked: list[float] = []
        self._behind, self._made = prompt, 0
        self._plan()
        if self._account.on and not self._pays:
            self._account.stop()
        tokens = [n for n in (ahead, self._account.answer) if n is not None]
        saving = self._saving * self._account.spoken * min(tokens, default=inf)
        self._too_short = RETURN * self._times.read(prompt) > saving

    def next(self) -> int:
        account = self._account
        if self._since_plain >= self._plain_after:
            return 0
        if not account.on and not account.look:
            if account.left > 0 or self._keeps_waiting():
                return 0
            account.start_look()
        if account.look or not self._times.knows_draft:
            return self._best
        if self._too_short:
            return 0
        return self._max if self._stated else self._best

    def judge(self) -> More:
        self._asked, self._stands = [], 1.0
        return self._more

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        t_verify = self._times.not_held_up(drafted + 1, t_verify)
        self._seconds += t_draft + t_verify
        self._made += accepted + 1
        if drafted == 0:
            self._plain_step(t_draft, t_verify)
            return
        self._since_plain += 1
        self._stated = bool(self._asked)
        for outcomes in (self._domain, self._everything):
            outcomes.add(drafted, accepted, self._asked)
        expected = self._times.read(self._behind) + self._times.draft * drafted + self._verify[min(drafted, self._max)]
        if not self._times.knows_draft or drafted + 1 not in self._times.timed:
            expected = inf
        invested = max(0.0, t_draft - self._times.draft * drafted) if self._behind else 0.0
        self._times.add_draft(drafted, t_draft, self._behind)
        self._times.add_verify(drafted + 1, t_verify)
        self._behind = 0
        self._plan()
        self._book(min(t_draft + t_verify, OUTLIER * expected), accepted + 1, invested)

    def _plain_step(self, t_draft: float, t_verify: float) -> None:
        """One without drafts, or where a drafter that was asked had nothing to say."""
        self._since_plain = 0
        self._account.left -= 1
        self._times.add_verify(1, t_verify)
        if self._plain_after < PLAIN_RARELY:
            self._plain_timed()
        if t_draft:
            self._book(t_draft + self._verify[0], 1, t_draft if self._behind else 0.0, silent=True)
            self._behind = 0
        else:
            self._behind += 1

    def _plain_timed(self) -> None:
        """One of the first timings of a plain pass: rarer from then on."""
        known = self._times.plain
        if known >= FIRST_PLAIN:
            self._plain_after = min(PLAIN_EVERY * known, PLAIN_RARELY)
        if known <= FIRST_PLAIN:
            self._plan()

    def _book(self, seconds: float, tokens: int, invested: float, silent: bool = False) -> None:
        """Settle a step for which the drafter was asked; gains pay earlier losses back."""
        plain = self._verify[0]
        if plain:
            gain = tokens * plain - seconds
            self._lost = max(0.0, self._lost - gain)
            self._account.book(gain / plain, invested / plain, self._pays, silent)

    def _keeps_waiting(self) -> bool:
        """Whether a look could now lose more than may be lost; if so the wait is set to when it cannot."""
        draft, plain = self._times.draft, self._verify[0]
        step = draft * self._best + self._verify[self._best] - plain  # with nothing accepted
        loss = self._lost + self._times.read(self._behind) + LOOK * step
        self._account.left = ceil((loss - self._share * self._seconds) / (self._share * plain)) if plain else 0
        return self._account.left > 0

    def _plan(self) -> None:
        """Best length above 0, whether it pays, what a token gains by it, and the price of each further token."""
        self._rates = self._domain.rates()
        self._verify = self._times.verify(self._max + 1)
        draft, plain = self._times.draft, self._verify[0]
        if not plain or not self._times.knows_draft:
            self._best, self._price = min(self._k, FIRST_LENGTH), [0.0] * self._max
            self._pays, self._saving = True, inf
            return
        c, costs = draft / plain, [seconds / plain for seconds in [0.0, *self._verify]]
        self._best = optimal_gamma(self._rates, c, self._max, costs.__getitem__, least=1)
        seconds = self._best * draft + self._verify[self._best]
        rate = expected_tokens(self._rates, self._best) / seconds
        self._saving = plain - 1 / rate
        self._pays = rate * plain > 1 + MARGIN
        steps = zip(self._verify, self._verify[1:], strict=False)
        self._price = [rate * (draft + max(0.0, after - before)) for before, after in steps]

    def _more(self, confidence: float) -> bool:
        """Whether the chance that the next token stands is worth its price in tokens."""
        self._asked.append(confidence)
        self._stands *= self._domain.calibrated(confidence)
        n = len(self._asked)
        return n < self._max and self._stands * self._rates[n] > self._price[n]
