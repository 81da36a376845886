"""Where keys or values of one layer lie as codes, preallocated. P leading dimensions (heads), T tokens, D head size.

Each class writes tokens `[P…, T, D]` from a position on, and reads the first `end` of them back as floats.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qspec.numerics.quantization.formats import FP8_E4M3, NumFormat
from qspec.numerics.quantization.kv_blocks import BlockCode, largest, outlier_count, put_back, quantize_static, without
from qspec.numerics.quantization.packing import pack_nibbles, unpack_nibbles
from qspec.ops.cpu import decode_fp8_e4m3
from qspec.plan import KVPart


class Codes(Protocol):
    """Storage of one layer's keys, values, or both."""

    def write(self, start: int, x_PTD: Tensor) -> None:
        """Store positions `start…start+T`."""

    def read(self, end: int) -> Tensor:
        """Positions 0…`end`, in the compute dtype or float32."""

    def stored(self, length: int) -> list[Tensor]:
        """Views of what is stored for the first `length` positions (float8 as bytes), to compare and to move."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""


class FloatCodes:
    """No codes: the compute dtype."""

    def __init__(self, heads: Sequence[int], length: int, dim: int, dtype: torch.dtype) -> None:
        self._data = torch.empty((*heads, length, dim), dtype=dtype)

    def write(self, start: int, x_PTD: Tensor) -> None:
        self._data[..., start : start + x_PTD.shape[-2], :] = x_PTD

    def read(self, end: int) -> Tensor:
        return self._data[..., :end, :]

    def stored(self, length: int) -> list[Tensor]:
        return [self.read(length)]

    @property
    def nbytes(self) -> int:
        return self._data.nbytes


class StaticCodes:
    """Stored scales that broadcast over `[P…, T, D]`."""

    def __init__(self, heads: Sequence[int], length: int, dim: int, fmt: NumFormat, scale: Tensor) -> None:
        self._codes, self._fmt, self._scale = _empty((*heads, length, dim), fmt), fmt, scale

    def write(self, start: int, x_PTD: Tensor) -> None:
        end = start + x_PTD.shape[-2]
        self._codes[..., start:end, :] = quantize_static(x_PTD, self._scale, self._fmt)

    def read(self, end: int) -> Tensor:
        return _as_float(self._codes[..., :end, :]) * self._scale

    def stored(self, length: int) -> list[Tensor]:
        return [self._codes[..., :length, :].view(torch.uint8)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes


class TokenCodes:
    """A scale per token and head, made when it is written; outliers too."""

    def __init__(self, heads: Sequence[int], length: int, dim: int, part: KVPart) -> None:
        self._code = BlockCode(part.fmt)
        self._codes = _empty((*heads, length, dim), part.fmt)
        count, dtype = self._code.scales
        self._scales = torch.ones((*heads, length, count), dtype=dtype)
        self._outliers = _Outliers((*heads, length), part.outliers, dim)

    def write(self, start: int, x_PTD: Tensor) -> None:
        end = start + x_PTD.shape[-2]
        rest, where = self._outliers.take(x_PTD, start, end)
        codes, scales = self._code.encode(rest if where is None else without(rest, where))
        self._codes[..., start:end, :], self._scales[..., start:end, :] = _packed(codes, self._code.fmt), scales

    def read(self, end: int) -> Tensor:
        values = _as_float(_unpacked(self._codes[..., :end, :], self._code.fmt)) * self._scales[..., :end, :]
        return self._outliers.put_back(values, end)

    def stored(self, length: int) -> list[Tensor]:
        codes = self._codes[..., :length, :].view(torch.uint8)
        return [codes, self._scales[..., :length, :], *self._outliers.stored(length)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._outliers.nbytes


class ChannelCodes:
    """A scale per channel and group of g tokens; whole groups are written and read. G groups, S = g * D in one.

    Outliers are the largest of a head and group, indexed in `[g, D]`.
    """

    def __init__(self, heads: Sequence[int], length: int, dim: int, part: KVPart) -> None:
        groups = -(-length // part.group)
        self._group, self._dim = part.group, dim
        self._code = BlockCode(part.fmt, offset=True)
        self._codes = _empty((*heads, groups, part.group, dim), part.fmt)
        count, dtype = self._code.scales
        self._scales = torch.ones((*heads, groups, dim, count), dtype=dtype)
        self._outliers = _Outliers((*heads, groups), part.outliers, part.group * dim)

    def write(self, start: int, x_PTD: Tensor) -> None:
        first, last = self._groups(start), self._groups(start + x_PTD.shape[-2])
        x_PGS = x_PTD.reshape(*x_PTD.shape[:-2], last - first, self._group * self._dim)
        rest, where = self._outliers.take(x_PGS, first, last)
        blocks = self._by_channel(rest)
        codes, scales = self._code.encode(blocks if where is None else without(blocks, self._by_channel(where)))
        self._scales[..., first:last, :, :] = scales
        # float8 tensors do not move on every build; bytes do.
        moved = codes.view(torch.uint8).transpose(-1, -2).contiguous().view(codes.dtype)
        self._codes[..., first:last, :, :] = _packed(moved, self._code.fmt)

    def read(self, end: int) -> Tensor:
        last = self._groups(end)
        codes = _as_float(_unpacked(self._codes[..., :last, :, :], self._code.fmt))
        values = self._code.decode(codes.transpose(-1, -2), self._scales[..., :last, :, :]).transpose(-1, -2)
        return self._outliers.put_back(values.flatten(-2), last).reshape(*values.shape[:-3], end, self._dim)

    def stored(self, length: int) -> list[Tensor]:
        last = length // self._group
        codes = self._codes[..., :last, :, :].view(torch.uint8)
        return [codes, self._scales[..., :last, :, :], *self._outliers.stored(last)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._outliers.nbytes

    def _groups(self, position: int) -> int:
        assert position % self._group == 0, f"{position} is not at the edge of a group of {self._group}"
        return position // self._group

    def _by_channel(self, x_PGS: Tensor) -> Tensor:
        """`[P…, G, D, g]`"""
        return x_PGS.reshape(*x_PGS.shape[:-1], self._group, self._dim).transpose(-1, -2)


class _Outliers:
    """The largest magnitudes of blocks `[P…, N, S]` in float16, with int16 indices; nothing for 0 percent."""

    def __init__(self, blocks: Sequence[int], percent: float, size: int) -> None:
        self._count, self._size = outlier_count(percent, size), size
        self._values = torch.zeros((*blocks, self._count), dtype=torch.float16)
        self._index = torch.zeros((*blocks, self._count), dtype=torch.int16)

    def take(self, x_PNS: Tensor, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Keep those of blocks `first…last`; the blocks as floats, and where theirs are."""
        x_PNS = x_PNS.float()
        if not self._count:
            return x_PNS, None
        values, index = largest(x_PNS, self._count)
        self._values[..., first:last, :], self._index[..., first:last, :] = values, index
        return x_PNS, torch.zeros_like(x_PNS, dtype=torch.bool).scatter_(-1, index.long(), True)

    def put_back(self, x_PNS: Tensor, last: int) -> Tensor:
        return put_back(x_PNS, *self.stored(last)) if self._count else x_PNS

    def stored(self, last: int) -> list[Tensor]:
        return [self._values[..., :last, :], self._index[..., :last, :]] if self._count else []

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._index.nbytes


def _empty(shape: Sequence[int], fmt: NumFormat) -> Tensor:
    """Zero codes; INT4 ones two to a byte along the last dimension."""
    if fmt.bits == 4:
        return torch.zeros((*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return torch.zeros(tuple(shape), dtype=torch.uint8).view(fmt.storage)


def _packed(codes: Tensor, fmt: NumFormat) -> Tensor:
    return pack_nibbles(codes) if fmt.bits == 4 else codes


def _unpacked(codes: Tensor, fmt: NumFormat) -> Tensor:
    return unpack_nibbles(codes) if fmt.bits == 4 else codes


def _as_float(codes: Tensor) -> Tensor:
    return decode_fp8_e4m3(codes) if codes.dtype == FP8_E4M3.storage else codes.float()
