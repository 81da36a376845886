"""The draft length that gains most at measured acceptance and cost, down to none."""

from qspec.numerics.speedup import expected_tokens, optimal_gamma
from qspec.spec.history import History, Outcomes, Timings
from qspec.spec.types import More

SHARE = 0.01
"""Of all decoding time, what looking again whether speculation pays may lose."""
PLAIN_EVERY = 128
"""Steps after which a plain pass is timed again while drafts run."""
FIRST_LOOK = 2
"""Drafting steps before the first decision: one fills the draft's cache, one is timed."""


class Optimal:
    """Maximises expected tokens per second (arXiv 2211.17192, theorem 3.8, with measured terms), from 0 to `max_k`.

    Tokens: `1 + sum_i prod_{j <= i} a_j`, with a_j the acceptance at position j, decayed counts of the request's domain
    drawn to a prior. Seconds: `gamma t_draft + t_verify(gamma + 1)`, medians of recent steps; the first draft behind a
    plain step is not timed, it also feeds the draft what it missed. Drafters that state their confidence draft until
    one more token would cost more tokens, at the best rate, than it can bring.

    Where nothing pays it decodes plainly, which costs one addition and one comparison per step. It then looks again by
    two drafting steps whenever what all looks have lost so far, and would lose now, is at most `SHARE` of all decoding
    time: beyond the first look and one probe, speculation that never pays costs at most 1 %. A look that gains goes on.
    """

    def __init__(self, k: int = 5, max_k: int = 16, share: float = SHARE) -> None:
        self._k, self._max, self._share = k, max_k, share
        self._everything = Outcomes(max_k)
        self._memory = History(lambda: Outcomes(max_k, self._everything.pooled))
        self._times = Timings()
        self._looks, self._since_plain = 0, 0
        self._seconds, self._lost, self._loss = 0.0, 0.0, 0.0
        self._stated = False
        self.reset()

    def reset(self, domain: str = "") -> None:
        self._domain = self._memory.of(domain)
        self._asked: list[float] = []
        self._warm, self._probe = False, 0
        self._plan()

    def next(self) -> int:
        if self._looks < FIRST_LOOK:
            return self._k
        if not self._times.knows_plain or self._since_plain >= PLAIN_EVERY:
            return 0
        if self._best:
            return self._max if self._stated else self._best
        if self._probe == 0 and self._lost + self._loss <= self._share * self._seconds:
            self._probe = FIRST_LOOK
        return self._look if self._probe else 0

    def judge(self) -> More:
        self._asked, self._stands = [], 1.0
        return self._more

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        self._seconds += t_draft + t_verify
        if drafted == 0:
            self._lost += t_draft if self._probe else 0.0
            self._plain_step(t_verify)
            return
        self._looks += 1
        self._since_plain += 1
        self._stated = bool(self._asked)
        for outcomes in (self._domain, self._everything):
            outcomes.add(drafted, accepted, self._asked)
        if self._warm:
            self._times.add_draft(t_draft / drafted)
        self._times.add_verify(drafted + 1, t_verify)
        self._warm = True
        if self._probe:
            self._charge(t_draft + t_verify, accepted + 1)
        self._plan()

    def _plain_step(self, t_verify: float) -> None:
        self._warm, self._since_plain = False, 0
        first = not self._times.knows_plain
        self._times.add_verify(1, t_verify)
        if first:
            self._plan()

    def _charge(self, seconds: float, tokens: int) -> None:
        """Book what a step of a look lost against plain decoding of the same tokens; gains pay earlier losses back."""
        lost = seconds - tokens * self._verify[0]
        self._probe -= lost > 0
        self._lost = max(0.0, self._lost + lost)

    def _plan(self) -> None:
        """Best length, best length above 0, what looking at it would lose, and the price of each further token."""
        self._rates = self._domain.rates()
        self._verify = self._times.verify(self._max + 1)
        draft, plain = self._times.draft, self._verify[0]
        self._best, self._look, self._price = self._k, self._k, [0.0] * self._max
        if not plain:
            return
        c, costs = draft / plain, [seconds / plain for seconds in [0.0, *self._verify]]
        self._best = optimal_gamma(self._rates, c, self._max, costs.__getitem__)
        self._look = self._best or optimal_gamma(self._rates, c, self._max, costs.__getitem__, least=1)
        seconds = self._best * draft + self._verify[self._best]
        rate = expected_tokens(self._rates, self._best) / seconds
        steps = zip(self._verify, self._verify[1:], strict=False)
        self._price = [rate * (draft + max(0.0, after - before)) for before, after in steps]
        look = draft * self._look + self._verify[self._look]
        self._loss = FIRST_LOOK * max(0.0, look - plain * expected_tokens(self._rates, self._look))

    def _more(self, confidence: float) -> bool:
        """Whether the chance that the next token stands is worth its price in tokens."""
        self._asked.append(confidence)
        self._stands *= self._domain.calibrated(confidence)
        n = len(self._asked)
        return n < self._max and self._stands * self._rates[n] > self._price[n]
