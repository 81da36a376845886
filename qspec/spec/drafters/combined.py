"""Two drafters for one target: a lookup that costs nothing, and a model where it finds nothing or does worse."""

from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import torch

from qspec.spec.drafters.suffix import SuffixDrafter
from qspec.spec.types import Drafter, More, Proposal, Sampling

DECAY = 0.9
"""Weight that a source's record keeps when a step of its own comes: about the last 10 count."""
RETRY = 16
"""Steps after which the lookup is tried again though it did worse."""


@dataclass
class _Record:
    """Decayed tokens and seconds of the steps that a source drafted for."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = DECAY * self.tokens + tokens, DECAY * self.seconds + seconds

    @property
    def rate(self) -> float:
        """Tokens per second; without a record, as good as can be."""
        return self.tokens / self.seconds if self.seconds else float("inf")


@dataclass(frozen=True)
class _Step:
    """A proposal whose outcome the next context tells."""

    source: _Record
    length: int
    tokens: list[int]
    start: float


class CombinedDrafter:
    """Asks `lookup` first and `model` where it finds nothing.

    Where steps with the lookup's drafts have lately brought fewer tokens per second than steps with the model's, the
    model drafts, and the lookup is tried again every `RETRY` steps. The choice never looks at what would be drafted, so
    the output law stays the target's.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup, self._model = lookup, model
        self._looked_up, self._modelled = _Record(), _Record()
        self._skipped = 0
        self._last: _Step | None = None

    @property
    def model(self) -> Drafter:
        return self._model

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        start = perf_counter()
        self._settle(context, start)
        source, proposal = self._looked_up, None
        if self._looked_up.rate >= self._modelled.rate or self._skipped >= RETRY:
            proposal = self._lookup.propose(context, k, sampling, generator, more)
            self._skipped = 0
        else:
            self._skipped += 1
        if proposal is None or not len(proposal.tokens_K):
            source, proposal = self._modelled, self._model.propose(context, k, sampling, generator, more)
        self._last = _Step(source, len(context), proposal.tokens_K.tolist(), start)
        return Proposal(proposal.tokens_K, proposal.probs_KV, perf_counter() - start, proposal.parents_K)

    def reset(self) -> None:
        """A new request starts; what was learned of both sources stays."""
        self._lookup.reset()
        self._model.reset()
        self._last, self._cold = None, True

    def forget(self) -> None:
        """Forget what was learned from earlier requests, as a lookup does that remembers them."""
        self._looked_up, self._modelled, self._skipped = _Record(), _Record(), 0
        if isinstance(self._lookup, SuffixDrafter):
            self._lookup.forget()
        self.reset()

    def _settle(self, context: list[int], now: float) -> None:
        """Book the last step; a model's first one also read the prompt, and steps without drafts say nothing."""
        last = self._last
        if last is None or not last.tokens:
            return
        if last.source is self._modelled and self._cold:
            self._cold = False
            return
        together = zip(last.tokens, context[last.length :], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], together))
        last.source.add(accepted + 1, now - last.start)
