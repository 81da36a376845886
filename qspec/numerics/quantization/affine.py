"""Quantized matrices: `QTensor` ties codes and scales of blocks to a shape; `quantize_*` make them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qspec.numerics.quantization.blocks import (
    Granularity,
    PerBlock,
    PerGroup,
    PerTensor,
    from_blocks,
    scale_shape,
    to_blocks,
)
from qspec.numerics.quantization.clipping import ABSMAX, Clip, clipped_range
from qspec.numerics.quantization.codes import (
    dequantize_blocks,
    half_scale,
    quantize_blocks,
    range_scale,
    symmetric_scale,
)
from qspec.numerics.quantization.formats import NumFormat


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


def quantize_matrix(x_NK: Tensor, scale: Tensor, zero: Tensor | None, fmt: NumFormat, gran: Granularity) -> QTensor:
    """Quantize a matrix with given scales (any shape with one entry per block, in row-major block order)."""
    shape = (x_NK.shape[0], x_NK.shape[1])
    flat_zero = None if zero is None else zero.reshape(-1, 1)
    codes = quantize_blocks(to_blocks(x_NK, gran), scale.reshape(-1, 1), flat_zero, fmt)
    out = scale_shape(shape, gran)
    # float8 tensors do not reshape through padding on every build; go through uint8 views.
    whole = from_blocks(codes.view(torch.uint8), shape, gran).contiguous().view(fmt.storage)
    return QTensor(whole, scale.reshape(out), None if zero is None else zero.reshape(out), fmt, gran)


def quantize_weight(
    w_NK: Tensor,
    fmt: NumFormat,
    granularity: Granularity,
    symmetric: bool = True,
    clip: Clip = ABSMAX,
    importance_K: Tensor | None = None,
) -> QTensor:
    """Round a weight to nearest: clip, scale and codes in one call. Scales of groups are numbers that float16 holds.

    `importance_K`, the mean square of each input channel, makes the `mse` clip minimise the error of the *output*
    (channels taken as uncorrelated) instead of the weight's own.
    """
    weight_PS = None if importance_K is None else _block_weights(importance_K, w_NK.shape[0], granularity)
    lo, hi = clipped_range(to_blocks(w_NK, granularity), fmt, clip, symmetric, weight_PS)
    scale, zero = range_scale(lo, hi, fmt, symmetric)
    if isinstance(granularity, PerGroup):
        scale = half_scale(scale)
    return quantize_matrix(w_NK, scale, zero, fmt, granularity)


def _block_weights(importance_K: Tensor, rows: int, granularity: Granularity) -> Tensor:
    """`importance` of the values of each block, up to where blocks repeat: all rows of a weight share it."""
    match granularity:
        case PerTensor():
            period = rows
        case PerBlock(tile_rows, _):
            period = tile_rows
        case _:
            period = 1
    return to_blocks(importance_K.float().expand(period, -1), granularity)


def quantize_activation_dynamic(x_TK: Tensor, fmt: NumFormat) -> tuple[Tensor, Tensor]:
    """Codes `[T, K]` and float32 scales `[T, 1]` of activations: symmetric, one scale per token."""
    scale_T1 = symmetric_scale(x_TK.abs().amax(-1, keepdim=True), fmt)
    return quantize_blocks(x_TK, scale_T1, None, fmt), scale_T1


def tensor_amax(x: Tensor) -> Tensor:
    """Largest magnitude of a whole tensor, float32 `[1]`; 0 when empty."""
    return x.abs().amax().float().reshape(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)
