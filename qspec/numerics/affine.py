"""Affine quantization: `x ≈ scale * (code - zero_point)`. Blocks in, blocks out; `QTensor` ties it to a shape."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qspec.numerics.blocks import Granularity, from_blocks, scale_shape, to_blocks
from qspec.numerics.formats import SCALE_FLOOR, NumFormat


@dataclass(frozen=True)
class QTensor:
    """A quantized matrix.

    codes: `[N, K]` in `fmt.storage`; scale: float32, shape of `blocks.scale_shape`; zero_point: like scale or None
    (symmetric).
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    fmt: NumFormat
    granularity: Granularity

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantize(self) -> Tensor:
        """The float32 matrix `[N, K]` that the codes stand for."""
        blocks = to_blocks(self.codes.float(), self.granularity)
        zero = None if self.zero_point is None else self.zero_point.reshape(-1, 1)
        values = dequantize_blocks(blocks, self.scale.reshape(-1, 1), zero)
        return from_blocks(values, self.shape, self.granularity)


def symmetric_scale(amax: Tensor, fmt: NumFormat) -> Tensor:
    """Scale so that `amax` maps to the largest positive code; floored so that it stays finite and usable."""
    return (amax.float() / fmt.qmax).clamp_min(SCALE_FLOOR)


def affine_scale(lo: Tensor, hi: Tensor, fmt: NumFormat) -> tuple[Tensor, Tensor]:
    """Scale and integer zero point that map `[lo, hi]` (widened to hold 0) onto the full integer range."""
    lo, hi = lo.float().clamp_max(0), hi.float().clamp_min(0)
    scale = ((hi - lo) / (fmt.qmax - fmt.qmin)).clamp_min(SCALE_FLOOR)
    zero = (fmt.qmin - lo / scale).round().clamp(fmt.qmin, fmt.qmax)
    return scale, zero


def quantize_blocks(x: Tensor, scale: Tensor, zero: Tensor | None, fmt: NumFormat) -> Tensor:
    """Codes (in `fmt.storage`) of float blocks `[B, S]` under scale (and zero point) `[B, 1]`; saturating."""
    q = x.float() / scale
    if not fmt.is_float:
        q = q.round()
    if zero is not None:
        q = q + zero
    return q.clamp(fmt.qmin, fmt.qmax).to(fmt.storage)


def dequantize_blocks(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Float32 values of codes `[B, S]`."""
    q = codes.float()
    return (q if zero is None else q - zero) * scale


def quantize_matrix(x_NK: Tensor, scale: Tensor, zero: Tensor | None, fmt: NumFormat, gran: Granularity) -> QTensor:
    """Quantize a matrix with given scales (any shape with one entry per block, in row-major block order)."""
    shape = (x_NK.shape[0], x_NK.shape[1])
    flat_zero = None if zero is None else zero.reshape(-1, 1)
    codes = quantize_blocks(to_blocks(x_NK, gran), scale.reshape(-1, 1), flat_zero, fmt)
    out = scale_shape(shape, gran)
    # float8 tensors do not reshape through padding on every build; go through uint8 views.
    whole = from_blocks(codes.view(torch.uint8), shape, gran).contiguous().view(fmt.storage)
    return QTensor(whole, scale.reshape(out), None if zero is None else zero.reshape(out), fmt, gran)
