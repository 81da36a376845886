"""Scales and codes of blocks `[blocks, size]`: `x ≈ scale * (code - zero_point)`. Knows no matrix shape."""

import torch
from torch import Tensor

from qspec.numerics.quantization.formats import HALF_FLOOR, SCALE_FLOOR, NumFormat


def symmetric_scale(amax: Tensor, fmt: NumFormat) -> Tensor:
    """Scale so that `amax` maps to the largest positive code; floored so that it stays finite and usable."""
    return (amax.float() / fmt.qmax).clamp_min(SCALE_FLOOR)


def affine_scale(lo: Tensor, hi: Tensor, fmt: NumFormat) -> tuple[Tensor, Tensor]:
    """Scale and integer zero point that map `[lo, hi]` (widened to hold 0) onto the full integer range."""
    lo, hi = lo.float().clamp_max(0), hi.float().clamp_min(0)
    scale = ((hi - lo) / (fmt.qmax - fmt.qmin)).clamp_min(SCALE_FLOOR)
    zero = (fmt.qmin - lo / scale).round().clamp(fmt.qmin, fmt.qmax)
    return scale, zero


def range_scale(lo: Tensor, hi: Tensor, fmt: NumFormat, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (None when symmetric, where `lo = -hi`) of ranges; a float format has no zero point."""
    if symmetric:
        return symmetric_scale(hi, fmt), None
    if fmt.is_float:
        raise ValueError(f"{fmt.name} is symmetric only: a float format has no zero point")
    return affine_scale(lo, hi, fmt)


def half_scale(scale: Tensor) -> Tensor:
    """The nearest scales that float16 holds, where it holds any: many scales are many bytes, which decoding reads."""
    half = scale.half().float().clamp_min(HALF_FLOOR)
    return torch.where(half.isinf(), scale, half)


def quantize_blocks(x: Tensor, scale: Tensor, zero: Tensor | None, fmt: NumFormat) -> Tensor:
    """Codes (in `fmt.storage`) of float blocks `[B, S]` under scale (and zero point) `[B, 1]`; saturating.

    Ties round to even, after the zero point is added, as compressed-tensors does.
    """
    q = x.float() / scale
    if zero is not None:
        q = q + zero
    if not fmt.is_float:
        q = q.round()
    return q.clamp(fmt.qmin, fmt.qmax).to(fmt.storage)


def dequantize_blocks(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Float32 values of codes `[B, S]`."""
    q = codes.float()
    return (q if zero is None else q - zero) * scale
