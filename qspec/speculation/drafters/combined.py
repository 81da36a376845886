"""Two drafters for one target: a lookup that costs nothing, and a model where it finds nothing that pays."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from time import perf_counter

from qspec.nn.lm import LM
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.request import propose_together
from qspec.speculation.types import NOTHING, Ask, Drafter, Follower, More, Proposal, Randomness, Sampling

LOOKUP, MODEL = "lookup", "model"


class CombinedDrafter:
    """Asks `lookup` first, and `model` where that drafts nothing: it found nothing, or `more` wanted nothing of it.

    `more` may skip either drafter, or shorten its draft. `more` never sees the tokens that would be drafted, so the
    output distribution stays the target's. Proposals say their source: `lookup` or `model`.
    """

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup, self._model = lookup, model

    @property
    def model(self) -> Drafter:
        return self._model

    def group(self) -> Hashable:
        """One group for all: the models' own groups decide which of them draft together."""
        return None

    def follow(self, target: LM) -> None:
        """Show the target to the model, if that reads it."""
        if isinstance(self._model, Follower):
            self._model.follow(target)

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        return self.propose_many([self], [Ask(context, k, sampling, generator, more)])[0]

    @classmethod
    def propose_many(cls, drafters: Sequence["CombinedDrafter"], asks: Sequence[Ask]) -> list[Proposal]:
        """Lookups are asked one after the other, models together."""
        pairs = list(zip(drafters, asks, strict=True))
        proposals = [drafter._looked_up(ask) for drafter, ask in pairs]
        silent = [i for i, proposal in enumerate(proposals) if not len(proposal.tokens_K)]
        left = {i: allowed for i in silent if (allowed := _allowed(asks[i], MODEL)).k}
        made = propose_together([(drafters[i]._model, allowed) for i, allowed in left.items()])
        for i, proposal in zip(left, made, strict=True):
            proposals[i] = replace(proposal, seconds=proposals[i].seconds + proposal.seconds, source=MODEL)
        return proposals

    def _looked_up(self, ask: Ask) -> Proposal:
        start, allowed = perf_counter(), _allowed(ask, LOOKUP)
        proposal = self._lookup.propose(*allowed) if allowed.k else NOTHING
        return replace(proposal, seconds=perf_counter() - start, source=LOOKUP)

    def reset(self) -> None:
        self._lookup.reset()
        self._model.reset()

    def forget(self) -> None:
        """Forget earlier requests, where the lookup remembers them."""
        if isinstance(self._lookup, SuffixDrafter):
            self._lookup.forget()
        self.reset()


def _allowed(ask: Ask, name: str) -> Ask:
    """The same ask, cut to the number of tokens that `more` allows the drafter."""
    return ask if ask.more is None else ask._replace(k=min(ask.k, ask.more.begins(name)))
