"""The likeliest continuations of a draft model, as a tree."""

from collections.abc import Collection
from time import perf_counter

import torch
from torch import Tensor

from qspec.nn.lm import TreeLM
from qspec.numerics.speculation.trees import Tree, depths, likeliest, spelled, subtree
from qspec.speculation.types import More, Proposal, Randomness, Sampling

NO_TREE = Tree([], [])


class TreeDrafter:
    """Expands best first: each pass reads the `width` likeliest nodes not yet read and offers `width` children of each.

    After at most `depth` passes it proposes the `nodes` of largest path probability under the draft's distribution
    (greedy: at temperature 1). They are chosen, not drawn, so they are certain (one-hot), which is exact for sampling
    too. Nodes that will not be proposed are not read, and nothing is drafted behind one of `eos_ids`. tokens: how many
    ids of the target are no padding (default: all of the draft's); ids from there on are never drafted. Source:
    EAGLE-2, arXiv 2406.16858, section 4.
    """

    def __init__(
        self,
        lm: TreeLM,
        width: int = 4,
        depth: int = 4,
        nodes: int = 16,
        eos_ids: Collection[int] = (),
        tokens: int | None = None,
    ) -> None:
        self._lm, self._width, self._depth, self._nodes = lm, width, depth, nodes
        self._tokens = lm.vocab_size if tokens is None else tokens
        self._eos_ids = frozenset(eos_ids)
        self._cached: list[int] = []
        self._read = NO_TREE  # nodes that wait behind the cache

    @property
    def lm(self) -> TreeLM:
        return self._lm

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """A tree at most `k` deep, as far as the draft's cache has room."""
        start, tree = perf_counter(), NO_TREE
        if len(context) <= self._lm.max_length:
            logits_1V = self._lm.forward(self._missing(context), last=1)
            self._cached = list(context)
            tree = self._grown(self._probs(logits_1V, sampling), min(k, self._depth), sampling)
        return Proposal.certain(tree, perf_counter() - start)

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""
        self._lm.truncate(0)
        self._cached, self._read = [], NO_TREE

    def _missing(self, context: list[int]) -> Tensor:
        """Bring the cache to the beginning that it shares with `context`, accepted nodes included; returns the tokens
        behind.
        """
        limit = min(len(self._cached), len(context) - 1)
        common = next((i for i in range(limit) if self._cached[i] != context[i]), limit)
        path = spelled(self._read, context[common:-1]) if common == len(self._cached) else []
        self._cached, self._read = context[:common], NO_TREE
        if path:
            self._lm.keep(path)
        else:
            self._lm.truncate(common)
        self._cached = context[: common + len(path)]
        return torch.tensor(context[len(self._cached) :])

    def _grown(self, root_1V: Tensor, depth: int, sampling: Sampling) -> Tree:
        tree, reach_K, read = Tree([], []), list[float](), list[int]()
        self._offer(tree, reach_K, [-1], root_1V)
        for _ in range(depth - 1):
            room = self._lm.max_length - self._lm.length - len(read)
            best = self._next(tree, reach_K, read, depth)[:room]
            if not best:
                break
            read += best
            tokens_T = torch.tensor([tree.tokens_K[node] for node in best])
            logits_TV = self._lm.forward_tree(tokens_T, subtree(tree, read).parents_K)
            self._offer(tree, reach_K, best, self._probs(logits_TV, sampling))
        self._read = subtree(tree, read)
        return subtree(tree, likeliest(reach_K, self._nodes))

    def _offer(self, tree: Tree, reach_K: list[float], parents: list[int], probs_TV: Tensor) -> None:
        """Add the likeliest tokens behind some nodes."""
        probs_TW, tokens_TW = probs_TV.topk(min(self._width, probs_TV.shape[-1]))
        for parent, probs_W, tokens_W in zip(parents, probs_TW.tolist(), tokens_TW.tolist(), strict=True):
            before = reach_K[parent] if parent >= 0 else 1.0
            for probability, token in zip(probs_W, tokens_W, strict=True):
                if probability > 0:
                    tree.tokens_K.append(token)
                    tree.parents_K.append(parent)
                    reach_K.append(before * probability)

    def _next(self, tree: Tree, reach_K: list[float], read: list[int], depth: int) -> list[int]:
        """Nodes to read: the likeliest that would be proposed now and may have children."""
        depths_K, known = depths(tree.parents_K), set(read)
        open_nodes = [
            node
            for node in likeliest(reach_K, self._nodes)
            if node not in known and depths_K[node] + 1 < depth and tree.tokens_K[node] not in self._eos_ids
        ]
        return sorted(open_nodes, key=lambda node: -reach_K[node])[: self._width]

    def _probs(self, logits_TV: Tensor, sampling: Sampling) -> Tensor:
        logits_TV = logits_TV[:, : self._tokens]
        return logits_TV.softmax(-1) if sampling.greedy else sampling.probs(logits_TV)
