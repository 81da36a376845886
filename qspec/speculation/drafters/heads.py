"""Drafts of heads, whatever the head: the ids that it may draft, and the chain of one request on its way."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
import math

import torch
from torch import Tensor

from qspec.speculation.types import Ask, Proposal


@dataclass(frozen=True)
class DraftIds:
    """Ids `[D]` of a vocabulary of `size` that a head has rows for, rising; the first `known` may be drafted."""

    ids_D: Tensor
    known: int
    size: int

    @classmethod
    def below(cls, tokens: int | None, ids_D: Tensor | None, size: int) -> "DraftIds":
        """Those below `tokens` may be drafted, the rest is padding; None: all of the head's. ids_D: None is all."""
        ids_D = torch.arange(size) if ids_D is None else ids_D
        return cls(ids_D, len(ids_D) if tokens is None else int((ids_D < tokens).sum()), size)

    def proposals(self, chains: Sequence["HeadChain"], seconds: float) -> list[Proposal]:
        """The drafts of chains that took so long together: each has its share by stages."""
        share = seconds / sum(chain.stages for chain in chains)
        return [
            Proposal(torch.tensor(chain.tokens, dtype=torch.long), self._widened(chain.probs_KD), share * chain.stages)
            for chain in chains
        ]

    def wide(self, logits_TD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, minus infinity for ids that the head has no rows for."""
        return torch.full((len(logits_TD), self.size), -math.inf).index_copy_(1, self.ids_D, logits_TD)

    def _widened(self, probs_KD: list[Tensor]) -> Tensor | None:
        """Distributions over the whole vocabulary, 0 for ids that are never drafted."""
        if not probs_KD:
            return None
        wide_KV = torch.zeros(len(probs_KD), self.size)
        wide_KV[:, self.ids_D[: self.known]] = torch.cat(probs_KD)
        return wide_KV


@dataclass
class HeadChain:
    """The draft of one request, at most `k` tokens. stages: how many of the head it went through."""

    ask: Ask
    k: int
    ids: DraftIds
    eos_ids: Collection[int]
    tokens: list[int] = field(default_factory=list)
    probs_KD: list[Tensor] = field(default_factory=list)
    stages: int = 0

    def choose(self, best: int, probability: float, logits_1D: Tensor) -> int | None:
        """`nn.cpp.heads.Choose` of this chain."""
        self.stages += 1
        sampling, more, ids_D = self.ask.sampling, self.ask.more, self.ids.ids_D[: self.ids.known]
        place, probs_1D = best, None if sampling.greedy else sampling.probs(logits_1D)
        if more is not None and not more(probability if probs_1D is None else float(probs_1D.max())):
            return None
        if probs_1D is not None:
            place_1, needed_1D = self.ask.draw(probs_1D, len(self.tokens), self.ids.size, ids_D)
            place = int(place_1)
            if needed_1D is not None:
                self.probs_KD.append(needed_1D)
        self.tokens.append(int(ids_D[place]))
        return None if len(self.tokens) == self.k or self.tokens[-1] in self.eos_ids else place
