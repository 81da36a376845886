"""A speculator head: drafts from the target's own hidden state, without a cache."""

from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.draft_heads import draft_heads
from qspec.nn.lm import LM, HiddenLM
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics.probs import sample
from qspec.numerics.trees import merged_chains
from qspec.spec.types import NOTHING, More, Proposal, Sampling, draw_uniforms


class MlpDrafter:
    """Drafts as many tokens as the head has stages, each of the state before and of the token chosen there.

    tokens: how many ids of the target are no padding (default: all); ids from there on are never drafted, nor are
    those outside of the head's draft vocabulary: the laws of proposals have probability 0 there. eos_ids: nothing is
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

    def follow(self, target: LM) -> None:
        """Read the states of this sequence from now on. Raises `RecipeError` for a model that does not tell them."""
        if not isinstance(target, HiddenLM):
            rule = f"{type(target).__name__} does not tell its hidden states"
            raise RecipeError("an MLP speculator", rule, "draft with another kind for it")
        self._target = target

    def reset(self) -> None:
        """Nothing of a sequence is kept."""

    @torch.no_grad()
    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens: a chain, whose laws are None if greedy, or a tree. `more` is asked of a chain only."""
        start, target = perf_counter(), self._target
        assert target is not None, "follow a target first"
        assert target.length == len(context) - 1, f"{len(context)} tokens, the target has read {target.length}"
        k = min(k, self._head.shape.n_predict)
        if k < 1:
            return NOTHING
        hidden_1H = target.hidden()
        if self._candidates > 1:
            paths = self._paths(hidden_1H, context[-1], k)
            return Proposal.certain(merged_chains(map(self._until_eos, paths)), perf_counter() - start)
        tokens, laws = self._chain(hidden_1H, context[-1], k, sampling, generator, more)
        return Proposal(torch.tensor(tokens, dtype=torch.long), self._widened(laws), perf_counter() - start)

    def _chain(
        self, hidden_1H: Tensor, token: int, k: int, sampling: Sampling, generator: torch.Generator, more: More | None
    ) -> tuple[list[int], list[Tensor]]:
        uniforms_K = draw_uniforms(0 if sampling.greedy else k, generator)
        tokens, laws = list[int](), list[Tensor]()

        def choose(best: int, probability: float, logits_1D: Tensor) -> int | None:
            place, law_1D = best, None if sampling.greedy else sampling.law(logits_1D)
            if more is not None and not more(probability if law_1D is None else float(law_1D.max())):
                return None
            if law_1D is not None:
                place = int(sample(law_1D, uniforms_K[len(tokens) : len(tokens) + 1]))
                laws.append(law_1D)
            tokens.append(int(self._ids_D[place]))
            return None if tokens[-1] in self._eos_ids else place

        self._heads.chain(hidden_1H, token, k, choose)
        return tokens, laws

    def _paths(self, hidden_1H: Tensor, token: int, depth: int) -> list[list[int]]:
        """The likeliest paths of `depth` tokens, the likeliest first."""
        paths_PK, scores_P = self._heads.paths(hidden_1H, token, self._widths[:depth])
        best = scores_P.topk(min(self._candidates, len(scores_P))).indices
        return [list(path) for path in paths_PK[best].tolist()]

    def _until_eos(self, path: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(path) if token in self._eos_ids), len(path))
        return path[:end]

    def _widened(self, laws: list[Tensor]) -> Tensor | None:
        """Laws over the target's vocabulary, 0 for ids that the head does not know."""
        if not laws:
            return None
        wide_KV = torch.zeros(len(laws), self._head.shape.vocab_size)
        wide_KV[:, self._ids_D[: self._known]] = torch.cat(laws)
        return wide_KV
