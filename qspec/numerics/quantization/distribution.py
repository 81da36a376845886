"""How values are distributed: what makes a matrix hard to quantize, and what rounding it costs. Sums are float64."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from qspec.numerics.quantization.blocks import Granularity, to_blocks
from qspec.numerics.quantization.clipping import ABSMAX, CHUNK, clipped_range, squared_error
from qspec.numerics.quantization.formats import NumFormat

OUTLIER_RATIO = 8.0
"""An outlier channel reaches further than this many times the median channel (see `outlier_channels`)."""


@dataclass(frozen=True)
class Extent:
    """Least, middle and greatest of several values."""

    min: float
    median: float
    max: float


def extent(values: Tensor | Iterable[float]) -> Extent:
    """Extent of all values that are not NaN; NaN throughout when there are none."""
    flat = values.flatten().double() if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)
    known = flat[~flat.isnan()]
    if not known.numel():
        return Extent(math.nan, math.nan, math.nan)
    return Extent(float(known.min()), median(known), float(known.max()))


def median(values: Tensor) -> float:
    """Middle value; the mean of the two middle ones of an even number. No limit on the size."""
    flat = values.flatten().double()
    lower, upper = float(flat.median()), -float((-flat).median())
    return lower if lower == upper else (lower + upper) / 2


def channel_amax(x_NK: Tensor) -> Tensor:
    """Largest magnitude of every input channel (column), float32 `[K]`."""
    return x_NK.abs().amax(0).float()


def outlier_channels(amax_K: Tensor) -> Tensor:
    """Which channels are outliers, bool `[K]`: their largest magnitude is above `OUTLIER_RATIO` times the median one's.

    Channels are compared with each other, so the answer does not depend on the matrix's scale. Where the median is 0
    every channel that holds a value is an outlier.
    """
    return amax_K > OUTLIER_RATIO * median(amax_K)


def kurtosis(x: Tensor) -> float:
    """Fourth standardized moment of all values (Pearson): 3 if they are normal, 1.8 if uniform; NaN without spread.

    Heavy tails make it large: the range that a scale must cover then is far wider than where most values lie.
    """
    if not x.numel():
        return math.nan
    mean = float(x.sum(dtype=torch.float64)) / x.numel()
    second = fourth = 0.0
    for part in _chunks(x):
        squares = part.to(torch.float64, copy=True).sub_(mean).square_()
        second += float(squares.sum())
        fourth += float(squares @ squares)
    return x.numel() * fourth / second**2 if second else math.nan


def sqnr_db(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio of two energies in dB: infinite without noise, NaN without signal."""
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def weight_sqnr_db(w_NK: Tensor, fmt: NumFormat, granularity: Granularity) -> float:
    """SQNR in dB of a weight rounded to nearest with symmetric absmax scales; one bit more is about 6 dB.

    Weights alone are compared, no output: every element counts the same, whatever its input. Works on `CHUNK` elements
    at a time.
    """
    blocks_BS = to_blocks(w_NK, granularity)
    signal = noise = 0.0
    for part in torch.split(blocks_BS, _rows(blocks_BS)):
        lo_B1, hi_B1 = clipped_range(part, fmt, ABSMAX, True)
        noise += float(squared_error(part, lo_B1, hi_B1, fmt, True).sum())
        signal += float(part.square().sum(dtype=torch.float64))
    return sqnr_db(signal, noise)


def saturated_share(codes: Tensor, fmt: NumFormat, symmetric: bool = True) -> float:
    """Share of codes at the ends of the range (±qmax; qmin and qmax with a zero point).

    A range that is the maximum (absmax) puts one code per scale there; what exceeds that was clipped.
    """
    low = -fmt.qmax if symmetric else fmt.qmin
    parts = (part.float() if fmt.is_float else part for part in _chunks(codes))
    ends = sum(int(((part <= low) | (part >= fmt.qmax)).sum()) for part in parts)
    return ends / codes.numel() if codes.numel() else math.nan


def beyond_share(x_HTD: Tensor, limit: Tensor) -> float:
    """Share of values whose magnitude exceeds `limit` (`[1]`, or `[H]` per head): they saturate when quantized."""
    return float((x_HTD.float().abs() > limit.reshape(-1, 1, 1)).double().mean())


def _rows(blocks_BS: Tensor) -> int:
    """Blocks to work on at once."""
    return max(1, CHUNK // blocks_BS.shape[1])


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """Flat pieces of at most `CHUNK` elements."""
    return iter(torch.split(x.flatten(), CHUNK))
