"""The one interface between models and the speculative engine, and what a model may offer beyond it."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from qspec.numerics.speculation.trees import Parents

FORKED = "this process was forked from the one that loaded the model: load it here"
"""The error of a model whose threads belong to another process."""


class LM(Protocol):
    """A causal language model over one sequence, with its own KV cache.

    Shape letters: T tokens of this call, V vocabulary.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Positions that the cache can hold."""

    @property
    def length(self) -> int:
        """Positions in the cache."""

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        """Append `tokens_T` (int64) and return float32 logits of the last `last` of them (default: all) `[·, V]`."""

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on (roll-back of rejected drafts)."""


@runtime_checkable
class TreeLM(LM, Protocol):
    """One that reads several continuations at once, as a tree of K nodes at the end of its cache."""

    def forward_tree(self, tokens_T: Tensor, parents_K: Parents) -> Tensor:
        """Float32 logits `[T, V]` behind the last T nodes of a tree; earlier nodes are those of the calls before.

        A node sees the cache and its own ancestors, and stands at `length` + its depth. `length` does not grow: nodes
        wait behind it for `keep`, and any other call forgets them. All K need room in the cache.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Append the nodes of `path`, each the parent of the next, and forget the others."""


@runtime_checkable
class HiddenLM(LM, Protocol):
    """One that tells the hidden states behind its logits, which a speculator head reads."""

    def hidden(self, count: int = 1) -> Tensor:
        """Float32 states `[count, hidden]` behind the newest `count` positions, after the final norm.

        The latest pass must have computed them: its rows (of `forward`: those whose logits it returned), or of a tree
        those that `keep` kept.
        """


@runtime_checkable
class TappedLM(LM, Protocol):
    """One that tells the residual stream in front of its layers, which an EAGLE-3 head reads.

    Number k is what enters layer k, as vLLM counts; the number of layers is what enters the final norm.
    """

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the residuals in front of these layers, of all positions from now on; none: keep nothing any more."""

    def tapped(self, start: int) -> Tensor:
        """Float32 residuals `[length - start, len(layers) * hidden]` of the positions from `start` on, layer by layer.

        Positions before `start` may be forgotten: `start` must not fall, but for roll-backs.
        """


@runtime_checkable
class BatchLM(TreeLM, Protocol):
    """One whose weights serve several sequences in one pass."""

    @property
    def weights(self) -> Hashable:
        """Identity of the weights, equal for all forks."""

    def fork(self) -> Self:
        """Another, empty sequence on the same weights."""

    @classmethod
    def forward_many(
        cls, sequences: Sequence[Self], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        """`forward` of each sequence, or `forward_tree` where parents are given, as each would give it alone."""


@runtime_checkable
class GreedyLM(BatchLM, Protocol):
    """One that finds the likeliest tokens without making their logits."""

    def greedy(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        """Append tokens like `forward`: the arg-max `[last or T]` of each of its rows, the first of equals."""

    @classmethod
    def greedy_many(
        cls, sequences: Sequence[Self], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        """`forward_many`: the arg-max `[T]` of each row of each sequence."""


class StatefulLM(BatchLM, HiddenLM, Protocol):
    """One of both kinds: what a speculator head learns from."""


@runtime_checkable
class ThreadedLM(LM, Protocol):
    """One that computes on threads of its own."""

    threads: int


@contextmanager
def torch_beside(lm: LM) -> Iterator[None]:
    """Torch on one thread while a model computes on its own: torch's would wait at full speed, on the same cores.

    Two cores, INT8 target, sampling: 36 tokens/s with torch's threads, 72 without.
    """
    threads = torch.get_num_threads()
    if isinstance(lm, ThreadedLM):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
