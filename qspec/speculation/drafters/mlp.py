"""A speculator head: drafts from the target's own hidden state, without a cache."""

from collections.abc import Collection, Hashable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.draft_heads import draft_heads
from qspec.nn.lm import LM, HiddenLM
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics.speculation.trees import merged_chains
from qspec.speculation.drafters.heads import DraftIds, HeadChain
from qspec.speculation.types import NOTHING, Ask, More, Proposal, Randomness, Sampling


class MlpDrafter:
    """Drafts at most one token per stage of the head; a stage reads the state of the one before, and the token chosen
    there.

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
        self._ids = DraftIds.below(tokens, head.ids_D, head.shape.vocab_size)
        widths = top_k or [max(1, 5 - i) for i in range(head.shape.n_predict)]
        self._widths = [min(width, self._ids.known) for width in widths]
        self._heads = draft_heads(head, self._ids.ids_D, self._ids.known)
        self._target: HiddenLM | None = None

    @property
    def head(self) -> MLPSpeculator:
        return self._head

    def group(self) -> Hashable:
        return self._head, self._ids.known, self._candidates

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
        return first._ids.proposals(chains, perf_counter() - start)

    @torch.no_grad()
    def first(self, tokens_T: Tensor) -> Tensor:
        assert self._target is not None, "follow a target first"
        hidden_TH = self._target.hidden(len(tokens_T))[:-1]
        return self._ids.wide(self._head.advance(0, self._head.begin(hidden_TH), tokens_T[1:])[1])

    def _chain(self, ask: Ask) -> HeadChain:
        return HeadChain(ask, min(ask.k, self._head.shape.n_predict), self._ids, self._eos_ids)

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
