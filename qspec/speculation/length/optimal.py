"""The draft length that gains most at measured acceptance and cost, down to none, and never at a lasting loss."""

from math import ceil, inf

from qspec.speculation.length.history import HELD_UP, History, VerifyTimes
from qspec.speculation.length.source import FIRST_LENGTH, FIRST_WAIT, LOOK, Source
from qspec.speculation.types import More

SHARE = 0.01
"""Of all decoding time, what drafts may lose beyond what they have saved before they are tried again."""
FIRST_PLAIN, PLAIN_EVERY, PLAIN_RARELY = 3, 16, 128
"""Plain steps before the first draft; steps with drafts after which one is timed again, for each that is known."""
OFTEN, RARELY = 64, 8
"""First steps with drafts, each of which seconds of passes are told anew behind; then every so many."""
LATELY = 0.99
"""Weight that a step keeps in the present speed when the next one comes."""
RECENT = 0.3
"""Weight of a request in the mean length of answers."""


class Optimal:
    """Maximises tokens per second, from no drafts to `max_k` (arXiv 2211.17192, theorem 3.8, with measured terms).

    A drafter that states its confidence asks token by token: the next one is drafted if the chance that all of them
    stand, by what became of tokens of about these confidences, is more than its seconds would bring at the present
    speed. Of others the length of the largest `E[tokens] / seconds` is drafted. What stood is counted with decay, by
    domain, drawn to the counts of all domains, those to a prior. Seconds are medians of recent steps: of drafting, of
    verifying by number of rows, and of what the drafter first has to read, which is the prompt, or what was decoded
    without it. A request too short to pay that back is decoded plainly, whatever a step would gain.

    Each drafter (of several, `More.begins` tells them apart) has an `Account` by domain of what its steps have gained
    over plain ones, everything that drafting took included; where that turns to a loss it is left alone, whatever the
    estimates say. At 0 a step is counted and its pass is timed. A look at it again comes after waits that double each
    time it brings nothing, and only when all that drafts have lost, and could lose now, is within `SHARE` of all
    decoding time. The first three steps are plain, and drafts are short until their cost is known.
    """

    def __init__(self, k: int = 5, max_k: int = 16, share: float = SHARE) -> None:
        self._k, self._max, self._share = k, max_k, share
        self._sources: dict[str, Source] = {}
        self._open: list[Source] = []
        self._verify_times = VerifyTimes()
        self._verify = self._verify_times.seconds(max_k + 1)
        self._answers = History(_Answers)
        self._since_plain, self._plain_after, self._made, self._planned = 0, 0, 0, 0
        self._seconds, self._lost = 0.0, 0.0
        self._lately = 0.0, 0.0  # tokens, seconds
        self._judge = _Judge(self)
        self._begin("", 0)

    def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
        if self._made:
            self._answers.of(self._domain).add(self._made)
            for source in self._sources.values():
                source.account.end_request(source.pays)
        self._begin(domain, prompt)
        self._time_passes()
        lengths = [n for n in (ahead, self._answers.of(domain).mean) if n is not None]
        for source in self._sources.values():
            source.begin(domain, prompt)
            source.plan(self._verify)
            source.expect(prompt, min(lengths, default=inf), self._verify[0])

    def _begin(self, domain: str, prompt: int) -> None:
        self._domain, self._prompt, self._made = domain, prompt, 0

    def next(self) -> int:
        if self._since_plain >= self._plain_after:
            return 0
        if not self._sources:
            return min(self._k, FIRST_LENGTH)
        self._open = [source for source in self._sources.values() if self._may_draft(source)]
        return max(map(self.most, self._open), default=0)

    def judge(self) -> More:
        return self._judge

    def update(self, drafted: int, accepted: int, t_draft: float = 0.0, t_verify: float = 0.0) -> None:
        t_verify = self._verify_times.not_held_up(drafted + 1, t_verify)
        tokens, (lately, took) = accepted + 1, self._lately
        self._seconds, self._made = self._seconds + t_draft + t_verify, self._made + tokens
        self._lately = LATELY * lately + tokens, LATELY * took + t_draft + t_verify
        asked = self._asked() if drafted or t_draft else None
        for source in self._sources.values():
            if source is not asked:
                source.behind += tokens
                source.account.left -= 1
        if drafted == 0:
            self._plain_pass(t_verify)
        if asked is not None:
            self._settle(asked, drafted, accepted, t_draft, t_verify)
        self._judge.clear()

    def source(self, name: str) -> Source:
        """The drafter of that name, which is new if it was not heard of before."""
        if name not in self._sources:
            self._sources[name] = Source(self._k, self._max, self._domain, self._prompt + self._made)
            self._open.append(self._sources[name])
        return self._sources[name]

    def most(self, source: Source) -> int:
        """Tokens that it may draft: one that states its confidence finds its length itself."""
        if source not in self._open:
            return 0
        return self._max if source.stated else source.best

    def price(self, source: Source, n: int) -> float:
        """Chance to stand that its n-th draft token is to have: what its seconds would bring at the present speed.

        One token is free before the seconds of drafting are known.
        """
        if n > self._max:
            return inf
        if not self._verify[0] or (n == 1 and not source.times.known):
            return 0.0
        tokens, seconds = self._lately
        rate = max(1 / self._verify[0], tokens / seconds)
        return rate * (source.times.draft + max(0.0, self._verify[n] - self._verify[n - 1]))

    def _asked(self) -> Source | None:
        """Who was asked in this step: of several the last one, if any; one that told no name is the only one."""
        return self._judge.source or (None if self._judge.named else self.source(""))

    def _may_draft(self, source: Source) -> bool:
        account = source.account
        if account.on:
            return not (source.too_short and source.times.known)
        if not account.look:
            if account.left > 0 or self._keeps_waiting(source):
                return False
            self._time_passes()
            account.start_look(LOOK * self._worst(source) / self._verify[0])
        return True

    def _worst(self, source: Source) -> float:
        """Seconds that a step loses if nothing of its draft stands."""
        return source.times.draft * source.best + self._verify[source.best] - self._verify[0]

    def _keeps_waiting(self, source: Source) -> bool:
        """Whether a look could now lose more than may be lost: asked again before long, since costs change."""
        loss = self._lost + source.times.read(source.behind) + LOOK * self._worst(source)
        plain = self._verify[0]
        left = ceil((loss - self._share * self._seconds) / (self._share * plain)) if plain else 0
        source.account.left = min(left, FIRST_WAIT)
        return left > 0

    def _plain_pass(self, seconds: float) -> None:
        """One row was verified: nothing was drafted. The more such timings there are, the rarer they are made."""
        self._since_plain = 0
        self._verify_times.add(1, seconds)
        if self._plain_after < PLAIN_RARELY:
            known = self._verify_times.plain
            if known >= FIRST_PLAIN:
                self._plain_after = min(PLAIN_EVERY * known, PLAIN_RARELY)
            if known <= FIRST_PLAIN:
                self._time_passes()

    def _settle(self, source: Source, drafted: int, accepted: int, t_draft: float, t_verify: float) -> None:
        """Learn from a step that a drafter was asked in, and book what it gained."""
        confidences, silent = self._judge.confidences, drafted == 0
        known, seconds = source.times.known, t_draft + (self._verify[0] if silent else t_verify)
        expected, invested = source.expected(drafted, t_draft, confidences)
        expected += self._verify[min(drafted, self._max)]
        source.learn(drafted, accepted, t_draft, confidences)
        if not silent:
            self._since_plain += 1
            self._verify_times.add(drafted + 1, t_verify)
            self._plan(source)
        if self._verify[0]:
            seconds = min(seconds, HELD_UP * expected) if known else seconds
            self._book(source, (accepted + 1) * self._verify[0] - seconds, invested, silent)

    def _plan(self, source: Source) -> None:
        """Medians move slowly, and lengths that drafters find themselves need no plan within a request."""
        self._planned += 1
        if self._planned < OFTEN or self._planned % RARELY == 0:
            self._time_passes()
        if not source.stated:
            source.plan(self._verify)

    def _time_passes(self) -> None:
        self._verify = self._verify_times.seconds(self._max + 1)

    def _book(self, source: Source, gain: float, invested: float, silent: bool) -> None:
        """Seconds that a step gained; gains pay earlier losses back."""
        self._lost = max(0.0, self._lost - gain)
        plain = self._verify[0]
        source.account.book(gain / plain, invested / plain, source.pays, silent)


class _Judge:
    """Answers what drafters ask in a step."""

    def __init__(self, policy: Optimal) -> None:
        self._policy = policy
        self.clear()

    def clear(self) -> None:
        self.source: Source | None = None
        self.named, self.confidences, self._stands = False, list[float](), 1.0

    def begins(self, name: str) -> int:
        self.named, source = True, self._policy.source(name)
        most = self._policy.most(source)
        if most:
            self.source, self.confidences, self._stands = source, [], 1.0
        return most

    def __call__(self, confidence: float) -> bool:
        if self.source is None:
            self.source = self._policy.source("")
        self.confidences.append(confidence)
        self._stands *= self.source.here.calibrated(confidence)
        return self._stands > self._policy.price(self.source, len(self.confidences))


class _Answers:
    """Tokens that requests of a kind were answered with."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, tokens: int) -> None:
        self.mean = tokens if self.mean is None else self.mean + RECENT * (tokens - self.mean)
