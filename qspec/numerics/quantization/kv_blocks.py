"""Codes of KV blocks `[…, S]`: under stored scales, or linear or affine ones of their own; and outliers kept apart.

A block is one token of a head (S = head_dim, centred on zero) or one channel over a group of tokens (S = group, with
an offset: keys have channels far from zero).

| codes | block | scales stored with it |
|---|---|---|
| float8 | any | float32: scale |
| integers | centred | float32: scale |
| integers | offset | float16: step, lowest value |
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor

from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, symmetric_scale
from qspec.numerics.quantization.formats import NumFormat

_LEAST_STEP, _MOST = 2.0**-20, 65504.0
"""Limits of float16: a step that keeps four bits, and the largest number."""


@dataclass(frozen=True)
class BlockCode:
    """How blocks `[…, S]` become codes. `offset`: they need not be centred on zero (integers only)."""

    fmt: NumFormat
    offset: bool = False

    @property
    def scales(self) -> tuple[int, torch.dtype]:
        """How many numbers are stored with a block, and their dtype."""
        return (2, torch.float16) if self.offset and not self.fmt.is_float else (1, torch.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[…, S]` in the format's storage, and scales `[…, n]`."""
        x = x.float()
        if self.offset and not self.fmt.is_float:
            return _encode_affine(x, self.fmt)
        scale = symmetric_scale(x.abs().amax(-1, keepdim=True), self.fmt)
        return quantize_blocks(x, scale, None, self.fmt), scale

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Float32 values `[…, S]`."""
        if self.offset and not self.fmt.is_float:
            step, low = scales.float().split(1, -1)
            values: Tensor = (codes.float() - self.fmt.qmin) * step + low
            return values
        return dequantize_blocks(codes, scales, None)


def quantize_static(x_HTD: Tensor, scale: Tensor, fmt: NumFormat) -> Tensor:
    """Codes `[H, T, D]` under a stored scale `[1]`, `[H]` or one that broadcasts; values past its range saturate."""
    return quantize_blocks(x_HTD, _over_heads(scale), None, fmt)


def dequantize(codes_HTD: Tensor, scale: Tensor) -> Tensor:
    """Float32 values of codes under a scale `[1]`, `[H]` or `[H, T, 1]`."""
    return dequantize_blocks(codes_HTD, _over_heads(scale), None)


def outlier_count(percent: float, size: int) -> int:
    """How many of `size` values are kept apart: at least `percent`, a whole number."""
    return math.ceil(size * percent / 100 - 1e-9)


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest magnitudes of `[…, N]`: values in float16, and int16 indices `[…, count]`; N <= 32768."""
    index = x.abs().topk(count, -1).indices
    return x.gather(-1, index).clamp(-_MOST, _MOST).half(), index.to(torch.int16)


def without(x: Tensor, outliers: Tensor) -> Tensor:
    """Blocks `[…, S]` with marked values replaced by the mean of the others, so that they stretch no range."""
    kept = (~outliers).float()
    mean = (x * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(outliers, mean, x)


def put_back(x: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """`[…, N]` with the values of `largest` where they were."""
    return x.scatter(-1, index.long(), values.float())


def _over_heads(scale: Tensor) -> Tensor:
    """A scale that broadcasts over `[H, T, D]`."""
    return scale if scale.dim() >= 3 else scale.reshape(-1, 1, 1)


def _encode_affine(x: Tensor, fmt: NumFormat) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax(dim=-1, keepdim=True)
    low = low.clamp(-_MOST, _MOST).half().float()
    step = _half((high - low) / (fmt.qmax - fmt.qmin))
    codes = ((x - low) / step + fmt.qmin).round().clamp(fmt.qmin, fmt.qmax).to(fmt.storage)
    return codes, torch.cat((step, low), -1).half()


def _half(step: Tensor) -> Tensor:
    """A step as float16 will hold it."""
    return step.clamp(_LEAST_STEP, _MOST).half().float()
