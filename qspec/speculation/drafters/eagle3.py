"""An EAGLE-3 head: drafts from the target's states of several layers, with a cache of its own.

Slot p of the cache is the head's row of position p: the target's states there, and the token behind it. Slots of drafts
are written from the head's own outputs; before the next proposal they are given up, and those of accepted drafts are
written anew from the states that the target has by then.
"""

from collections.abc import Collection, Hashable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.draft_heads import eagle3_chains
from qspec.nn.eagle3 import Eagle3, HeadCache
from qspec.nn.lm import LM, TappedLM
from qspec.speculation.drafters.heads import DraftIds, HeadChain
from qspec.speculation.types import NOTHING, Ask, More, Proposal, Randomness, Sampling


class Eagle3Drafter:
    """Drafts chains of any length.

    tokens: how many ids of the target are no padding (default: all); ids from there on are never drafted, nor are those
    outside of the head's draft vocabulary: the distributions of proposals have probability 0 there. eos_ids: nothing is
    drafted behind one.
    """

    def __init__(self, head: Eagle3, eos_ids: Collection[int] = (), tokens: int | None = None) -> None:
        self._head, self._eos_ids = head, frozenset(eos_ids)
        self._ids = DraftIds.below(tokens, head.ids_D, head.shape.vocab_size)
        self._true = 0  # slots written from the target's states
        self._target: TappedLM | None = None

    @property
    def head(self) -> Eagle3:
        return self._head

    def group(self) -> Hashable:
        return self._head, self._ids.known, None if self._target is None else self._target.max_length

    def follow(self, target: LM) -> None:
        """Read the states of this sequence from now on. Raises `RecipeError` for a model that does not tell them."""
        if not isinstance(target, TappedLM):
            rule = f"{type(target).__name__} does not tell the states of its layers"
            raise RecipeError("an EAGLE-3 head", rule, "draft with another kind for it")
        target.tap(self._head.shape.taps)
        self._target, self._true = target, 0
        self._chains = eagle3_chains(self._head, self._ids.ids_D, self._ids.known, target)
        self._cache = self._chains.cache()

    def reset(self) -> None:
        """`follow` begins with an empty cache."""

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """A chain of at most `k` tokens, with distributions where they are needed."""
        return NOTHING if k < 1 else self.propose_many([self], [Ask(context, k, sampling, generator, more)])[0]

    @classmethod
    @torch.no_grad()
    def propose_many(cls, drafters: Sequence["Eagle3Drafter"], asks: Sequence[Ask]) -> list[Proposal]:
        """All chains go through the head together, row by row."""
        start, first, pairs = perf_counter(), drafters[0], list(zip(drafters, asks, strict=True))
        chains = [HeadChain(ask, ask.k, drafter._ids, drafter._eos_ids) for drafter, ask in pairs]
        states, tokens = zip(*(drafter._news(ask.context) for drafter, ask in pairs), strict=True)
        caches, depth = [drafter._cache for drafter in drafters], max(ask.k for ask in asks)
        first._chains.chains(caches, states, tokens, depth, lambda i, *stage: chains[i].choose(*stage))
        for drafter, ask in pairs:
            drafter._true = len(ask.context) - 1
        return first._ids.proposals(chains, perf_counter() - start)

    @torch.no_grad()
    def first(self, tokens_T: Tensor) -> Tensor:
        assert self._target is not None, "follow a target first"
        head, start, rows = self._head, self._target.length - len(tokens_T), len(tokens_T) - 1
        f_TH = head.fuse(self._target.tapped(start)[:rows])
        return self._ids.wide(head.logits(head.run(f_TH, tokens_T[1:], torch.arange(rows), HeadCache(head.shape))))

    def _news(self, context: list[int]) -> tuple[Tensor, Tensor]:
        """States `[T, S]` of the positions that the target has read since, and the tokens behind them `[T]`."""
        target, length = self._target, len(context)
        assert target is not None, "follow a target first"
        assert target.length == length - 1, f"{length} tokens, the target has read {target.length}"
        self._cache.truncate(min(self._true, self._cache.length))
        return target.tapped(self._true), torch.tensor(context[self._true + 1 :])
