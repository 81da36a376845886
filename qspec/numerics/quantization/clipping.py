"""Range of a block before its scale: maximum, percentile of |x|, or least squared error."""

from dataclasses import dataclass
import math
from typing import Literal

import torch
from torch import Tensor

from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, range_scale
from qspec.numerics.quantization.formats import NumFormat

SHRINK = tuple(1 - step / 40 for step in range(29))
"""Factors of the full range that `mse` tries: 1, 0.975, … 0.3. The first one is the maximum itself."""

CHUNK = 1 << 16
"""Elements that `mse` works on at once: its temporaries stay in cache, and small beside the weight."""


@dataclass(frozen=True)
class Clip:
    """How the range of a block is chosen before its scale.

    `percentile` (of |x|, in percent) is read by the method of that name only.
    """

    method: Literal["absmax", "percentile", "mse"] = "absmax"
    percentile: float = 99.9


ABSMAX = Clip()
"""The default: nothing saturates."""


def clipped_range(
    blocks_BS: Tensor, fmt: NumFormat, clip: Clip, symmetric: bool, weight_PS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Range `(lo, hi)` of every block, float32 `[B, 1]` each; `lo = -hi` when symmetric.

    Values outside saturate. The zeros that pad a ragged tile count as values for `percentile`. `weight_PS` weighs the
    squared errors of `mse`: blocks take its rows in turn, over and over.
    """
    match clip.method:
        case "absmax":
            return _full_range(blocks_BS, symmetric)
        case "percentile":
            lo, hi = _full_range(blocks_BS, symmetric)
            bound = _percentile(blocks_BS, clip.percentile)
            return torch.maximum(lo, -bound), torch.minimum(hi, bound)
        case "mse":
            rows = max(1, CHUNK // max(1, blocks_BS.shape[1]))
            parts = [
                _least_error(part, fmt, symmetric, _rows_in_turn(weight_PS, i * rows, len(part)))
                for i, part in enumerate(torch.split(blocks_BS, rows))
            ]
            return torch.cat([lo for lo, _ in parts]), torch.cat([hi for _, hi in parts])


def squared_error(
    blocks_BS: Tensor,
    lo_B1: Tensor,
    hi_B1: Tensor,
    fmt: NumFormat,
    symmetric: bool,
    weight_BS: Tensor | None = None,
) -> Tensor:
    """Sum of squared rounding and saturation errors of every block under its range, float64 `[B, 1]`.

    `weight_BS` (or `[1, S]`) multiplies the squares.
    """
    scale, zero = range_scale(lo_B1, hi_B1, fmt, symmetric)
    total_B1 = torch.zeros_like(lo_B1, dtype=torch.float64)
    for i, part in enumerate(torch.split(blocks_BS, CHUNK, dim=1)):
        values = dequantize_blocks(quantize_blocks(part, scale, zero, fmt), scale, zero)
        squares = (values - part.float()).square()
        if weight_BS is not None:
            squares *= weight_BS[:, i * CHUNK : (i + 1) * CHUNK]
        total_B1 += squares.sum(1, keepdim=True, dtype=torch.float64)
    return total_B1


def _full_range(blocks_BS: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every block, or ∓ its largest magnitude."""
    # two passes, a tenth of the time of `aminmax` on a CPU
    lo, hi = blocks_BS.amin(1, keepdim=True).float(), blocks_BS.amax(1, keepdim=True).float()
    if not symmetric:
        return lo, hi
    amax = torch.maximum(-lo, hi)
    return -amax, amax


def _percentile(blocks_BS: Tensor, percent: float) -> Tensor:
    """Smallest |x| of a block that at least `percent` of its values do not exceed, `[B, 1]` (no interpolation)."""
    size = blocks_BS.shape[1]
    rank = math.ceil(size * percent / 100 - 1e-9)  # 51.52 % of 625 is 322, though not in binary
    magnitudes = blocks_BS.float().abs()
    return magnitudes.kthvalue(min(max(rank, 1), size), dim=1, keepdim=True).values


def _rows_in_turn(weight_PS: Tensor | None, first: int, count: int) -> Tensor | None:
    """Rows `first`, `first + 1`, … of the endless repetition of `weight`; one row that all share stays one."""
    if weight_PS is None or weight_PS.shape[0] == 1:
        return weight_PS
    return weight_PS[torch.arange(first, first + count) % weight_PS.shape[0]]


def _least_error(blocks_BS: Tensor, fmt: NumFormat, symmetric: bool, weight_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """The range among `SHRINK` times the full one with the least squared error; the widest of equals."""
    full_lo, full_hi = _full_range(blocks_BS, symmetric)
    lo, hi = full_lo, full_hi
    least = squared_error(blocks_BS, lo, hi, fmt, symmetric, weight_BS)
    for factor in SHRINK[1:]:
        error = squared_error(blocks_BS, full_lo * factor, full_hi * factor, fmt, symmetric, weight_BS)
        better = error < least
        least = torch.where(better, error, least)
        lo = torch.where(better, full_lo * factor, lo)
        hi = torch.where(better, full_hi * factor, hi)
    return lo, hi
