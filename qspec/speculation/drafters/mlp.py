"""A speculator head: drafts from the target's own hidden state, without a cache."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.draft_heads import draft_heads
from qspec.nn.lm import LM, HiddenLM
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics.speculation.trees import merged_chains
from qspec.speculation.types import NOTHING, Ask, More, Proposal, Randomness, Sampling


class MlpDrafter:
    """Drafts as many tokens as the head has stages, each of the state before and of the token chosen there.

    tokens: how many ids of the target are no padding (default: all); ids from there on are never drafted, nor are those
    outside of the head's draft vocabulary: the distributions of proposals have probability 0 there. eos_ids: nothing is
    drafted behind one. candidates above 1: a tree of the likeliest paths, `top_k` of every stage being looked at.
    """

    def __init__(
        self,
        head: MLPSpeculator,
        eos_ids: Collection[int] = (),
        tokens: int | None = None,
        candidates: int = 1,
        top_k: Sequence[int] = (),
    ) -> None:
        self._head, self._eos_ids, self._candidates = head, frozenset(eos_ids), candidates
        tokens = head.shape.vocab_size if tokens is None else tokens
        self._ids_D = torch.arange(head.shape.vocab_size) if head.ids_D is None else head.ids_D
        self._known = int((self._ids_D < tokens).sum())  # ids rise
        widths = top_k or [max(1, 5 - i) for i in range(head.shape.n_predict)]
        self._widths = [min(width, self._known) for width in widths]
        self._heads = draft_heads(head, self._ids_D, self._known)
        self._target: HiddenLM | None = None

    @property
    def head(self) -> MLPSpeculator:
        return self._head

    def group(self) -> Hashable:
        return self._head, self._known, self._candidates

    def follow(self, target: LM) -> None:
        """Read the states of this sequence from now on. Raises `RecipeError` for a model that does not tell them."""
        if not isinstance(target, HiddenLM):
            rule = f"{type(target).__name__} does not tell its hidden states"
            raise RecipeError("an MLP speculator", rule, "draft with another kind for it")
        self._target = target

    def reset(self) -> None:
        """Nothing of a sequence is kept."""

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens: a chain, with distributions where they are needed, or a tree, which ignores `more`."""
        if k < 1:
            return NOTHING
        return self.propose_many([self], [Ask(context, k, sampling, generator, more)])[0]

    @classmethod
    @torch.no_grad()
    def propose_many(cls, drafters: Sequence["MlpDrafter"], asks: Sequence[Ask]) -> list[Proposal]:
        """Chains go through the head together, trees one after the other."""
        first, pairs = drafters[0], list(zip(drafters, asks, strict=True))
        if first._candidates > 1:
            return [drafter._tree(ask) for drafter, ask in pairs]
        start = perf_counter()
        chains = [drafter._chain(ask) for drafter, ask in pairs]
        hidden_BH = torch.cat([drafter._hidden(ask) for drafter, ask in pairs])
        depth, newest = max(chain.k for chain in chains), [ask.context[-1] for ask in asks]
        first._heads.chains(hidden_BH, newest, depth, lambda i, *stage: chains[i].choose(*stage))
        tokens = [torch.tensor(chain.tokens, dtype=torch.long) for chain in chains]
        probs_KD = [first._widened(chain.probs_KD) for chain in chains]
        share = (perf_counter() - start) / sum(chain.stages for chain in chains)
        made = zip(tokens, probs_KD, chains, strict=True)
        return [Proposal(tokens_K, probs_KV, share * chain.stages) for tokens_K, probs_KV, chain in made]

    def _chain(self, ask: Ask) -> "_Chain":
        shape = self._head.shape
        return _Chain(ask, min(ask.k, shape.n_predict), self._ids_D[: self._known], shape.vocab_size, self._eos_ids)

    def _tree(self, ask: Ask) -> Proposal:
        start, depth = perf_counter(), min(ask.k, self._head.shape.n_predict)
        paths_PK, scores_P = self._heads.paths(self._hidden(ask), ask.context[-1], self._widths[:depth])
        likeliest = scores_P.topk(min(self._candidates, len(scores_P))).indices
        paths = map(self._until_eos, paths_PK[likeliest].tolist())
        return Proposal.certain(merged_chains(paths), perf_counter() - start)

    def _hidden(self, ask: Ask) -> Tensor:
        """State `[1, H]` in front of the newest token."""
        target, length = self._target, len(ask.context)
        assert target is not None, "follow a target first"
        assert target.length == length - 1, f"{length} tokens, the target has read {target.length}"
        return target.hidden()

    def _until_eos(self, path: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(path) if token in self._eos_ids), len(path))
        return path[:end]

    def _widened(self, probs_KD: list[Tensor]) -> Tensor | None:
        """Distributions over the target's vocabulary, 0 for ids that the head does not know."""
        if not probs_KD:
            return None
        wide_KV = torch.zeros(len(probs_KD), self._head.shape.vocab_size)
        wide_KV[:, self._ids_D[: self._known]] = torch.cat(probs_KD)
        return wide_KV


@dataclass
class _Chain:
    """The draft of one request on its way, at most `k` tokens of `ids_D`, ids of a vocabulary of `size`.

    stages: how many of the head it went through.
    """

    ask: Ask
    k: int
    ids_D: Tensor
    size: int
    eos_ids: Collection[int]
    tokens: list[int] = field(default_factory=list)
    probs_KD: list[Tensor] = field(default_factory=list)
    stages: int = 0

    def choose(self, best: int, probability: float, logits_1D: Tensor) -> int | None:
        """`nn.cpp.heads.Choose` of this chain."""
        self.stages += 1
        sampling, more = self.ask.sampling, self.ask.more
        place, probs_1D = best, None if sampling.greedy else sampling.probs(logits_1D)
        if more is not None and not more(probability if probs_1D is None else float(probs_1D.max())):
            return None
        if probs_1D is not None:
            place_1, needed_1D = self.ask.draw(probs_1D, len(self.tokens), self.size, self.ids_D)
            place = int(place_1)
            if needed_1D is not None:
                self.probs_KD.append(needed_1D)
        self.tokens.append(int(self.ids_D[place]))
        return None if len(self.tokens) == self.k or self.tokens[-1] in self.eos_ids else place
