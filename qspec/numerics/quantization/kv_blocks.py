"""Codes of KV blocks `[…, S]` with scales of their own: linear, affine or piecewise, and outliers kept apart.

A block is one token of a head (S = head_dim, centred on zero) or one channel over a group of tokens (S = group, with
an offset: keys have channels far from zero).

| codes | block | scales stored with it |
|---|---|---|
| float8 | any | float32: scale |
| integers | centred | float32: scale |
| integers | offset | float16: step, lowest value |
| piecewise | centred | float16: centre step, tail step |
| piecewise | offset | float16: centre step, tail step, middle |

**Piecewise codes** (after arXiv 2002.00104) spend one of their own b bits on the piece, and hold no zero. As a signed
number c of b bits, with n = 2**(b-2), steps s (centre) and t (tails), and the cut at n * s:

    c >= 0: centre, value (c - n + 1/2) * s           2n = 2**(b-1) levels, evenly over [-cut, cut]
    c <  0: tail, j = c + 2n, m = j mod n, value ±(n * s + (m + 1/2) * t), minus for j < n: n levels a side

The cut is the one of least squared error among `CUTS`; 1/2 gives both pieces one step.
"""

from dataclasses import dataclass
import math

import torch
from torch import Tensor

from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, symmetric_scale
from qspec.numerics.quantization.formats import NumFormat

CUTS = tuple(i / 16 for i in range(1, 10))
"""Cuts that are tried, as shares of a block's largest magnitude."""
_LEAST_STEP, _MOST = 2.0**-20, 65504.0
"""Of float16: a step that keeps four bits, and the largest number."""


@dataclass(frozen=True)
class BlockCode:
    """How blocks `[…, S]` become codes. `offset`: they need not be centred on zero (integers only)."""

    fmt: NumFormat
    piecewise: bool = False
    offset: bool = False

    @property
    def scales(self) -> tuple[int, torch.dtype]:
        """How many numbers are stored with a block, and their dtype."""
        if self.piecewise:
            return 2 + self.offset, torch.float16
        return (2, torch.float16) if self.offset and not self.fmt.is_float else (1, torch.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[…, S]` in the format's storage, and scales `[…, n]`."""
        x = x.float()
        if self.piecewise:
            return _encode_piecewise(x, self.fmt, self.offset)
        if self.offset and not self.fmt.is_float:
            return _encode_affine(x, self.fmt)
        scale = symmetric_scale(x.abs().amax(-1, keepdim=True), self.fmt)
        return quantize_blocks(x, scale, None, self.fmt), scale

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Float32 values `[…, S]`."""
        if self.piecewise:
            return _decode_piecewise(codes, scales.float(), self.fmt)
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


def _encode_piecewise(x: Tensor, fmt: NumFormat, offset: bool) -> tuple[Tensor, Tensor]:
    middle = torch.zeros_like(x[..., :1])
    if offset:
        low, high = x.aminmax(dim=-1, keepdim=True)
        middle = ((low + high) / 2).clamp(-_MOST, _MOST).half().float()
    centred, n = x - middle, 1 << (fmt.bits - 2)
    reach = centred.abs().amax(-1, keepdim=True)
    cuts = torch.tensor(CUTS).reshape(-1, *[1] * x.dim())
    steps = torch.cat((_half(reach * cuts / n), _half(reach * (1 - cuts) / n)), -1)
    codes = _piecewise_codes(centred, steps, n)
    error = (_piecewise_values(codes, steps, n) - centred).square().sum(-1, keepdim=True)
    best = error.argmin(0, keepdim=True)  # the first of equals
    codes, steps = (_chosen(each, best) for each in (codes, steps))
    return codes, (torch.cat((steps, middle), -1) if offset else steps).half()


def _decode_piecewise(codes: Tensor, scales: Tensor, fmt: NumFormat) -> Tensor:
    values = _piecewise_values(codes, scales[..., :2], 1 << (fmt.bits - 2))
    return values + scales[..., 2:] if scales.shape[-1] == 3 else values


def _piecewise_codes(x: Tensor, steps: Tensor, n: int) -> Tensor:
    s, t = steps.split(1, -1)
    centre = ((x / s).floor() + n).clamp(0, 2 * n - 1)
    tail = ((x.abs() - n * s) / t).floor().clamp(0, n - 1) + n * (x >= 0) - 2 * n
    nearer = x.abs() <= n * s + (t - s) / 4  # halfway between the levels beside the cut
    return torch.where(nearer, centre, tail).to(torch.int8)


def _piecewise_values(codes: Tensor, steps: Tensor, n: int) -> Tensor:
    (s, t), c = steps.split(1, -1), codes.float()
    j = c + 2 * n
    above = j >= n
    far = n * s + (j - n * above + 0.5) * t
    return torch.where(c >= 0, (c - n + 0.5) * s, torch.where(above, far, -far))


def _chosen(of_cuts: Tensor, best: Tensor) -> Tensor:
    """Of `[cuts, …, N]` what the best cut gave, `[…, N]`."""
    return of_cuts.gather(0, best.expand(1, *of_cuts.shape[1:]))[0]


def _half(step: Tensor) -> Tensor:
    """A step as float16 will hold it."""
    return step.clamp(_LEAST_STEP, _MOST).half().float()
