"""A draft model: a smaller `LM` that speaks the target's vocabulary."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from qspec.nn.lm import LM, BatchLM
from qspec.speculation.types import NOTHING, Ask, More, Proposal, Randomness, Sampling

FEW = 16
"""The most unread tokens with which a sequence joins a pass that others share: such a pass makes logits of all its
rows.
"""


class ModelDrafter:
    """Drafts a chain token by token from `lm`, under the same sampling settings as the target.

    vocab_size: the target's padded vocabulary (default: the draft's own); tokens: how many ids of it are no padding
    (default: all). Ids from there on are never drafted. eos_ids: drafting ends behind one of these, since nothing
    behind it can be accepted. This reads every token on the host as it is drawn; without them a proposal is read once.
    """

    def __init__(
        self, lm: LM, vocab_size: int | None = None, eos_ids: Collection[int] = (), tokens: int | None = None
    ) -> None:
        self._lm = lm
        self._vocab_size = lm.vocab_size if vocab_size is None else vocab_size
        self._tokens = self._vocab_size if tokens is None else min(tokens, self._vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._cached: list[int] = []
        self._group: Hashable = lm.weights if isinstance(lm, BatchLM) else id(self)

    @property
    def lm(self) -> LM:
        return self._lm

    @property
    def tokens(self) -> int:
        """Ids below this bound may be drafted."""
        return self._tokens

    def group(self) -> Hashable:
        return self._group

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens, as many as the draft's cache has room for, and their distributions (None: not needed).

        `more` gets the largest probability of each token's distribution (for greedy requests, of the draft's
        distribution at temperature 1). This reads every token on the host.
        """
        return self.propose_many([self], [Ask(context, k, sampling, generator, more)])[0]

    @classmethod
    def propose_many(cls, drafters: Sequence["ModelDrafter"], asks: Sequence[Ask]) -> list[Proposal]:
        """Every token is one pass for all that go on; long contexts are read one after the other."""
        chains = [drafter._chain(ask) for drafter, ask in zip(drafters, asks, strict=True)]
        while going := [chain for chain in chains if not chain.ended]:
            few = [chain for chain in going if len(chain.feed_T) <= FEW]
            alone = [[chain] for chain in going if len(chain.feed_T) > FEW]
            for group in filter(None, [few, *alone]):
                _draft_a_token(group)
        made = zip(drafters, asks, chains, strict=True)
        return [drafter._proposal(ask.context, chain) for drafter, ask, chain in made]

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""
        self._lm.truncate(0)
        self._cached = []

    def _chain(self, ask: Ask) -> "_Chain":
        start = perf_counter()
        k = max(0, min(ask.k, self._lm.max_length - len(ask.context) + 1))  # the last draft token is never fed
        feed_T, sizes = self._missing(ask.context), (self._tokens, self._vocab_size)
        return _Chain(self._lm, ask, k, *sizes, self._eos_ids, feed_T, k == 0, perf_counter() - start)

    def _missing(self, context: list[int]) -> Tensor:
        """Roll the cache back to the beginning that it shares with `context`; returns the tokens behind, at least the
        last.
        """
        limit = min(len(self._cached), len(context) - 1)
        common = next((i for i in range(limit) if self._cached[i] != context[i]), limit)
        self._lm.truncate(common)
        self._cached = context[:common]
        return torch.tensor(context[common:])

    def _proposal(self, context: list[int], chain: "_Chain") -> Proposal:
        tokens_K = torch.cat(chain.tokens) if chain.tokens else NOTHING.tokens_K
        self._cached = (context + tokens_K.tolist())[: self._lm.length]
        probs_KV = self._widen(torch.cat(chain.drawn_1V)) if chain.drawn_1V else None
        return Proposal(tokens_K, probs_KV, chain.seconds)

    def _widen(self, probs_KV: Tensor) -> Tensor:
        """Probability 0 for ids that are never drafted."""
        return pad(probs_KV, (0, self._vocab_size - probs_KV.shape[-1]))


@dataclass
class _Chain:
    """A draft on its way: at most `k` tokens, of the first `known` ids of `size`; `feed_T` is read next."""

    lm: LM
    ask: Ask
    k: int
    known: int
    size: int
    eos_ids: Collection[int]
    feed_T: Tensor
    ended: bool
    seconds: float
    tokens: list[Tensor] = field(default_factory=list)
    drawn_1V: list[Tensor] = field(default_factory=list)

    def add(self, logits_1V: Tensor) -> None:
        """One more token, from the logits behind what was fed; or none, if none is wanted."""
        sampling, more = self.ask.sampling, self.ask.more
        logits_1V = logits_1V[:, : self.known]
        probs_1V = None if sampling.greedy else sampling.probs(logits_1V)
        if more is not None and not more(float((logits_1V.softmax(-1) if probs_1V is None else probs_1V).max())):
            self.ended = True
            return
        if probs_1V is None:
            self.feed_T = logits_1V.argmax(-1)
        else:
            self.feed_T, needed_1V = self.ask.draw(probs_1V, len(self.tokens), self.size, slice(self.known))
            if needed_1V is not None:
                self.drawn_1V.append(needed_1V)
        self.tokens.append(self.feed_T)
        self.ended = len(self.tokens) == self.k or (bool(self.eos_ids) and int(self.feed_T) in self.eos_ids)


def _draft_a_token(chains: Sequence[_Chain]) -> None:
    """One more token of each, from one pass, whose seconds they share."""
    start = perf_counter()
    for chain, logits_TV in zip(chains, _pass(chains), strict=True):
        chain.add(logits_TV[-1:])
    share = (perf_counter() - start) / len(chains)
    for chain in chains:
        chain.seconds += share


def _pass(chains: Sequence[_Chain]) -> list[Tensor]:
    if len(chains) == 1:
        return [chains[0].lm.forward(chains[0].feed_T, last=1)]
    lms = cast("list[BatchLM]", [chain.lm for chain in chains])  # forks of one model
    return lms[0].forward_many(lms, [chain.feed_T for chain in chains], [None] * len(chains))
