"""Two drafters for one target: a lookup that costs nothing, and a model where it finds nothing or does worse."""

from dataclasses import dataclass, replace
from time import perf_counter

import torch

from qspec.nn.lm import LM
from qspec.spec.drafters.suffix import SuffixDrafter
from qspec.spec.types import NOTHING, Drafter, Follower, More, Proposal, Sampling

DECAY = 0.9
"""Weight that a source's record keeps when a step of its own comes: about the last 10 count."""
RETRY, LONGEST_RETRY = 16, 1024
"""Steps after which a source that did worse is tried again; doubled by every try that does not change that."""
MODEL_STEPS = 4
"""Steps with the model's drafts before one without any is timed."""
LOOKUP, MODEL = "lookup", "model"


@dataclass
class _Record:
    """Decayed tokens and seconds of the steps that a source drafted for, and the steps until it is tried again."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    skipped: int = 0
    wait: int = RETRY

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = DECAY * self.tokens + tokens, DECAY * self.seconds + seconds
        self.steps += 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def is_due(self, *rivals: "_Record") -> bool:
        """Whether it brings as many tokens per second as any rival, so far as that is known, or is to be tried."""
        if not self.steps or self.rate >= max(rival.rate for rival in rivals):
            self.wait = RETRY
            return True
        self.skipped += 1
        if self.skipped < self.wait:
            return False
        self.skipped, self.wait = 0, min(2 * self.wait, LONGEST_RETRY)
        return True


@dataclass(frozen=True)
class _Step:
    """A proposal whose outcome the next context tells."""

    source: _Record
    length: int
    start: float


class CombinedDrafter:
    """Asks `lookup` first, `model` where it finds nothing, and none where steps without drafts bring more.

    A source whose steps have lately brought fewer tokens per second than another's or than plain ones is passed over,
    and tried again after waits that double. The choice never looks at what would be drafted, so the output law stays
    the target's. Proposals say their source: `lookup` or `model`.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup, self._model = lookup, model
        self._last: _Step | None = None
        self._cold = True
        self._unlearn()

    @property
    def model(self) -> Drafter:
        return self._model

    def follow(self, target: LM) -> None:
        """Show the target to the model, if that reads it."""
        if isinstance(self._model, Follower):
            self._model.follow(target)

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
        source, proposal = self._looked_up, NOTHING
        if self._looked_up.is_due(self._modelled, self._plain):
            proposal = self._lookup.propose(context, k, sampling, generator, more)
        if not len(proposal.tokens_K):
            source = self._plain
            if self._model_is_due():
                source = self._modelled
                proposal = self._model.propose(context, k, sampling, generator, more)
        self._last = _Step(source, len(context), start)
        name = LOOKUP if source is self._looked_up else MODEL
        return replace(proposal, seconds=perf_counter() - start, source=name)

    def reset(self) -> None:
        """A new request starts; what was learned of both sources stays."""
        self._lookup.reset()
        self._model.reset()
        self._last, self._cold = None, True

    def forget(self) -> None:
        """Forget what was learned from earlier requests, as a lookup does that remembers them."""
        self._unlearn()
        if isinstance(self._lookup, SuffixDrafter):
            self._lookup.forget()
        self.reset()

    def _unlearn(self) -> None:
        self._looked_up, self._modelled, self._plain = _Record(), _Record(), _Record()

    def _model_is_due(self) -> bool:
        """False once where no step without drafts has been timed: the model has to beat those."""
        if not self._plain.steps and self._modelled.steps >= MODEL_STEPS:
            return False
        return self._modelled.is_due(self._plain)

    def _settle(self, context: list[int], now: float) -> None:
        """Book what has come since the last proposal; a model's first one also read the prompt."""
        last = self._last
        if last is None:
            return
        if last.source is self._modelled and self._cold:
            self._cold = False
            return
        last.source.add(len(context) - last.length, now - last.start)
