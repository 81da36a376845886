"""Toy language models whose distributions are known in closed form, and drafters that misbehave on purpose."""

from collections.abc import Iterator, Sequence
import itertools
from typing import Self

import torch
from torch import Tensor

from qspec.numerics.speculation.probs import sample
from qspec.numerics.speculation.trees import depths, path_to
from qspec.speculation.types import More, Proposal, Sampling, draw_uniforms


class TableLM:
    """Next-token logits depend on the last two tokens: `table[a, b]` is the row behind `…, a, b` (0 stands before the
    first token). `tokens` is its cache, `rows` the number of tokens of every call. Implements `nn.lm.BatchLM`.
    """

    def __init__(self, table_VVV: Tensor, max_length: int = 10_000) -> None:
        self.table_VVV, self.max_length = table_VVV, max_length
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self.nodes: list[int] = []
        self.parents: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self.table_VVV.shape[-1]

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        old = self.tokens[-1] if self.tokens else 0
        self.tokens += tokens_T.tolist()
        self.rows.append(len(tokens_T))
        self.nodes, self.parents = [], []
        assert self.length <= self.max_length, "the cache is full"
        before_T = torch.cat([torch.tensor([old]), tokens_T[:-1]])
        return self.table_VVV[before_T, tokens_T][-(last or len(tokens_T)) :]

    def truncate(self, length: int) -> None:
        assert length <= self.length, "truncate cannot lengthen a cache"
        del self.tokens[length:]
        self.nodes, self.parents = [], []

    def forward_tree(self, tokens_T: Tensor, parents_K: Sequence[int]) -> Tensor:
        old = len(parents_K) - len(tokens_T)
        assert list(parents_K[:old]) == self.parents[:old], "another tree than the one begun"
        self.nodes[old:], self.parents = tokens_T.tolist(), list(parents_K)
        self.rows.append(len(tokens_T))
        assert self.length + len(self.nodes) <= self.max_length, "the cache is full"
        root = self.tokens[-1] if self.tokens else 0
        before = [self.nodes[parent] if parent >= 0 else root for parent in parents_K[old:]]
        return self.table_VVV[before, tokens_T]

    def keep(self, path: Sequence[int]) -> None:
        assert [self.parents[node] for node in path] == [-1, *path][: len(path)], "no path from the root"
        self.tokens += [self.nodes[node] for node in path]
        self.nodes, self.parents = [], []

    @property
    def weights(self) -> int:
        return id(self.table_VVV)

    def fork(self) -> Self:
        return type(self)(self.table_VVV, self.max_length)

    @classmethod
    def forward_many(
        cls, sequences: Sequence[Self], tokens: Sequence[Tensor], parents: Sequence[Sequence[int] | None]
    ) -> list[Tensor]:
        asked = zip(sequences, tokens, parents, strict=True)
        return [lm.forward(t) if p is None else lm.forward_tree(t, p) for lm, t, p in asked]


class Scripted:
    """Proposes what it is told, one-hot, whatever the context."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = tokens

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        return Proposal(torch.tensor(self.tokens[:k], dtype=torch.long), None)

    def reset(self) -> None:
        """Nothing to forget."""


class ScriptedTree(Scripted):
    """The same nodes (level by level) at every step, one-hot."""

    def __init__(self, tokens: Sequence[int], parents_K: Sequence[int]) -> None:
        super().__init__(tokens)
        self.parents_K = parents_K

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        n = sum(depth < k for depth in depths(self.parents_K))
        return Proposal(torch.tensor(self.tokens[:n]), None, 0.0, tuple(self.parents_K[:n]))


class DrawnTree:
    """Draws the nodes of a tree of one shape (level by level) from a table, siblings with or without replacement."""

    def __init__(self, table_VVV: Tensor, parents_K: Sequence[int], replacement: bool) -> None:
        self.table_VVV, self.parents_K, self.replacement = table_VVV, parents_K, replacement

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        parents_K = [p for p, depth in zip(self.parents_K, depths(self.parents_K), strict=True) if depth < k]
        text, tokens, probs = [0, *context][-2:], list[int](), list[Tensor]()
        for node, parent in enumerate(parents_K):
            ancestors = [*text, *(tokens[i] for i in path_to(parents_K, parent))]
            probs_V = sampling.probs(self.table_VVV[ancestors[-2], ancestors[-1]].unsqueeze(0))[0]
            siblings = [tokens[i] for i in range(node) if parents_K[i] == parent]
            if not self.replacement:
                probs_V = without(probs_V, siblings)
            probs.append(probs_V)
            tokens.append(int(sample(probs_V, draw_uniforms(1, generator)[0])))
        return Proposal(torch.tensor(tokens), torch.stack(probs), 0.0, tuple(parents_K))

    def reset(self) -> None:
        """Nothing to forget."""


def without(probs_V: Tensor, tokens: Sequence[int]) -> Tensor:
    """The distribution of a draw that cannot be one of `tokens`."""
    rest_V = probs_V.clone()
    rest_V[list(tokens)] = 0.0
    return rest_V / rest_V.sum()


def table(seed: int, vocab: int, scale: float = 1.5) -> Tensor:
    """Random logits `[V, V, V]`, float64."""
    return scale * torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def blend(seed: int, table_VVV: Tensor, noise: float) -> Tensor:
    """A worse copy of a table: a draft that agrees most of the time."""
    return table_VVV + noise * table(seed, table_VVV.shape[-1])


def greedy(table_VVV: Tensor, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy continuation, straight from the table."""
    text = [0, *prompt]
    for _ in range(n):
        text.append(int(table_VVV[text[-2], text[-1]].argmax()))
    return text[len(prompt) + 1 :]


def sequence_probs(
    table_VVV: Tensor, sampling: Sampling, prompt: Sequence[int], n: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `n` tokens, straight from the table."""
    probs_VVV = sampling.probs(table_VVV)
    return {path: _path_probability(probs_VVV, prompt, path) for path in paths(table_VVV.shape[-1], n)}


def paths(vocab: int, n: int) -> Iterator[tuple[int, ...]]:
    """All sequences of `n` tokens."""
    return itertools.product(range(vocab), repeat=n)


def _path_probability(probs_VVV: Tensor, prompt: Sequence[int], path: Sequence[int]) -> float:
    text, probability = [0, *prompt], 1.0
    for token in path:
        probability *= float(probs_VVV[text[-2], text[-1], token])
        text.append(token)
    return probability
