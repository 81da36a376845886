"""Toy language models whose laws are known in closed form, and drafters that misbehave on purpose."""

from collections.abc import Iterator, Sequence
import itertools

import torch
from torch import Tensor

from qspec.spec.types import More, Proposal, Sampling


class TableLM:
    """Next-token logits depend on the last two tokens: `table[a, b]` is the row behind `…, a, b` (0 stands before the
    first token). `tokens` is its cache, `rows` the number of tokens of every call.
    """

    def __init__(self, table_VVV: Tensor, max_length: int = 10_000) -> None:
        self.table_VVV, self.max_length = table_VVV, max_length
        self.tokens: list[int] = []
        self.rows: list[int] = []

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
        assert self.length <= self.max_length, "the cache is full"
        before_T = torch.cat([torch.tensor([old]), tokens_T[:-1]])
        return self.table_VVV[before_T, tokens_T][-(last or len(tokens_T)) :]

    def truncate(self, length: int) -> None:
        assert length <= self.length, "truncate cannot lengthen a cache"
        del self.tokens[length:]


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


def sequence_law(table_VVV: Tensor, sampling: Sampling, prompt: Sequence[int], n: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `n` tokens, straight from the table."""
    laws_VVV = sampling.law(table_VVV)
    return {path: _path_probability(laws_VVV, prompt, path) for path in paths(table_VVV.shape[-1], n)}


def paths(vocab: int, n: int) -> Iterator[tuple[int, ...]]:
    """All sequences of `n` tokens."""
    return itertools.product(range(vocab), repeat=n)


def _path_probability(laws_VVV: Tensor, prompt: Sequence[int], path: Sequence[int]) -> float:
    text, probability = [0, *prompt], 1.0
    for token in path:
        probability *= float(laws_VVV[text[-2], text[-1], token])
        text.append(token)
    return probability
