"""The newest tokens in float, in front of codes that are written in whole groups.

Which tokens are codes depends on the position alone (`KVScheme.boundary`), not on how tokens arrived: a cache that
drafted and rolled back up to `SLACK` tokens is one that never drafted. Deeper truncation (only the reuse of a prefix
asks for it) finds rounded values where floats are gone, and goes on from those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qspec.nn.eager.kv_codes import Codes
from qspec.plan import KVScheme

SLACK = 65
"""Tokens beyond the window whose floats are kept: the longest draft and one."""


def window_length(scheme: KVScheme, max_length: int) -> int:
    """Positions of the ring: a window, a group that is not full, and what may be rolled back; 0 without a window."""
    return min(max_length, scheme.residual + scheme.step + SLACK) if scheme.step else 0


class Windowed:
    """Keys or values `[P…, T, D]` of one layer: codes up to the boundary, a ring of floats from there on."""

    def __init__(
        self, codes: Codes, scheme: KVScheme, heads: Sequence[int], max_length: int, dim: int, dtype: torch.dtype
    ) -> None:
        self.codes, self._scheme, self._size = codes, scheme, window_length(scheme, max_length)
        self._ring = torch.zeros((*heads, self._size, dim), dtype=dtype)
        self._written = self._low = self._length = 0  # ends of codes, and of what the ring no longer has; tokens

    def append(self, start: int, x_PTD: Tensor) -> Tensor:
        """Add tokens that one boundary holds for; everything up to them `[P…, start + T, D]`."""
        if start < self._length:
            self.truncate(start)
        end, boundary = start + x_PTD.shape[-2], self._scheme.boundary(start)
        assert start == self._length, f"position {start} of {self._length}"
        assert end - boundary <= self._size, f"{end - start} tokens at {start} cross a boundary"
        if boundary > self._written:
            self.codes.write(self._written, self._floats(self._written, boundary))
            self._written = boundary
        self._put(start, x_PTD)
        self._length, self._low = end, max(self._low, end - self._size)
        return torch.cat((self.codes.read(boundary).to(self._ring.dtype), self._floats(boundary, end)), -2)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on; floats that the ring lost come back rounded."""
        boundary, kept = self._scheme.boundary(length), min(self._low, length)
        if boundary < kept:
            self._put(boundary, self.codes.read(self._written)[..., boundary:kept, :])
        self._low, self._written = min(self._low, boundary), min(self._written, boundary)
        self._length = min(self._length, length)

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def _floats(self, start: int, end: int) -> Tensor:
        return self._ring.index_select(-2, torch.arange(start, end) % self._size)

    def _put(self, start: int, x_PTD: Tensor) -> None:
        positions = torch.arange(start, start + x_PTD.shape[-2]) % self._size
        self._ring.index_copy_(-2, positions, x_PTD.to(self._ring.dtype))
