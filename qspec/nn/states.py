"""Hidden states of a sequence by position, for drafters that read them: of its last pass, or of chosen layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qspec.numerics.speculation.trees import Parents

_NONE = torch.empty(0, 0)


class States:
    """Rows `[·, hidden]` behind the newest positions of one sequence, and those of tree nodes that wait behind it."""

    def __init__(self) -> None:
        self._rows_TK, self._nodes_TK = _NONE, _NONE
        self._end = 0

    def append(self, rows_TK: Tensor, end: int) -> None:
        """A plain pass that ended at position `end` computed these rows last."""
        self._rows_TK, self._nodes_TK, self._end = rows_TK, _NONE, end

    def offer(self, rows_TK: Tensor, nodes: int) -> None:
        """The last rows of a tree of `nodes`; earlier ones are those of the calls before."""
        before = nodes - len(rows_TK)
        self._nodes_TK = torch.cat([self._nodes_TK[:before], rows_TK]) if before else rows_TK

    def keep(self, path: Sequence[int]) -> None:
        """Nodes of the tree became positions."""
        self._rows_TK, self._nodes_TK = self._nodes_TK[list(path)], _NONE
        self._end += len(path)

    def truncate(self, length: int) -> None:
        self._nodes_TK = _NONE
        if length < self._end:
            self._rows_TK = self._rows_TK[: max(0, len(self._rows_TK) - self._end + length)]
            self._end = length

    def newest(self, count: int) -> Tensor:
        """Rows of the newest `count` positions `[count, hidden]`, as far as the last pass computed them."""
        assert count <= len(self._rows_TK), (
            f"states of {count} positions asked, the last pass kept {len(self._rows_TK)}"
        )
        return self._rows_TK[len(self._rows_TK) - count :]


class Taps:
    """Residuals that entered chosen layers, of all positions since the earliest that is still read; and of tree nodes.

    `layers`: their numbers, rising; empty: nothing is tapped. Their residuals lie side by side, S numbers in all.
    """

    def __init__(self, layers: Sequence[int] = (), width: int = 0, most: int = 0) -> None:
        """width: of one residual; most: the largest number that a layer may have."""
        numbers = [-1, *layers, most + 1]
        assert all(low < high for low, high in pairwise(numbers)), f"layers {layers} of a model of {most}"
        self.layers, self._width = tuple(layers), len(layers) * width
        self._rows_TS = self._nodes_TS = torch.empty(0, self._width)
        self._first = self._end = 0

    def note(self, rows_TS: Tensor, length: int, parents_K: Parents | None) -> None:
        """A pass had these rows: those that end at position `length`, or the last of a tree's nodes behind there."""
        if parents_K is not None:
            before = len(parents_K) - len(rows_TS)
            self._nodes_TS = torch.cat([self._nodes_TS[:before], rows_TS])
            return
        self._nodes_TS = self._nodes_TS[:0]
        if length - len(rows_TS) != self._end:  # nothing was tapped in between
            self._first = self._end = length - len(rows_TS)
        self._write(rows_TS)

    def keep(self, path: Sequence[int]) -> None:
        """Nodes of the tree became positions."""
        if self.layers:
            self._write(self._nodes_TS[list(path)])
        self._nodes_TS = self._nodes_TS[:0]

    def truncate(self, length: int) -> None:
        self._nodes_TS = self._nodes_TS[:0]
        self._end = min(self._end, length)
        self._first = min(self._first, self._end)

    def since(self, start: int) -> Tensor:
        """Rows `[·, S]` of the positions from `start` on; those before are forgotten."""
        assert self._first <= start <= self._end, f"states from {start} on, known are {self._first} to {self._end}"
        rows_TS = self._rows_TS[start - self._first : self._end - self._first].clone()
        self._rows_TS, self._first = rows_TS, start
        return rows_TS.clone()

    def _write(self, rows_TS: Tensor) -> None:
        """Append rows; room doubles as it must."""
        used = self._end - self._first
        needed = used + len(rows_TS)
        if needed > len(self._rows_TS):
            grown = torch.empty(max(needed, 2 * len(self._rows_TS)), self._width)
            grown[:used] = self._rows_TS[:used]
            self._rows_TS = grown
        self._rows_TS[used:needed] = rows_TS
        self._end += len(rows_TS)
