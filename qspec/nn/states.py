"""Hidden states of a sequence's last pass, kept by position for drafters that read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
