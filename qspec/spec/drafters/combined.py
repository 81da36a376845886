"""Two drafters for one target: a lookup that costs nothing, and a model where it finds nothing that pays."""

from dataclasses import replace
from time import perf_counter

import torch

from qspec.nn.lm import LM
from qspec.spec.drafters.suffix import SuffixDrafter
from qspec.spec.types import NOTHING, Drafter, Follower, More, Proposal, Sampling

LOOKUP, MODEL = "lookup", "model"


class CombinedDrafter:
    """Asks `lookup` first, and `model` where that drafts nothing: it found nothing, or `more` wanted nothing of it.

    `more` may pass over each of them. It never sees what would be drafted, so the output law stays the target's.
    Proposals say their source: `lookup` or `model`.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup, self._model = lookup, model

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
        start, proposal, source = perf_counter(), NOTHING, LOOKUP
        for name, drafter in ((LOOKUP, self._lookup), (MODEL, self._model)):
            if not len(proposal.tokens_K) and (more is None or more.begins(name)):
                proposal, source = drafter.propose(context, k, sampling, generator, more), name
        return replace(proposal, seconds=perf_counter() - start, source=source)

    def reset(self) -> None:
        self._lookup.reset()
        self._model.reset()

    def forget(self) -> None:
        """Forget earlier requests, where the lookup remembers them."""
        if isinstance(self._lookup, SuffixDrafter):
            self._lookup.forget()
        self.reset()
