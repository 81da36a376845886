"""Dense + sparse split of a weight (SpQR, arXiv 2306.03078; SqueezeLLM, 2306.07629): few weights stay in float.

`W = D + S`: D is quantized and holds 0 where the sparse S holds the full value, so `y = D x + S x`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from qspec.numerics.quantization.blocks import Granularity, from_blocks, to_blocks
from qspec.numerics.quantization.clipping import ABSMAX, clipped_range
from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, range_scale
from qspec.numerics.quantization.formats import NumFormat

VALUES = torch.float16
"""Type of outliers: its rounding is 2^-11 of the value, far below what the codes around it lose."""
CHUNK = 1 << 18
"""Elements weighed at once: temporaries stay small beside the weight."""
SAMPLE = 1 << 16
"""Elements on which the price of a place is found."""
STEPS, MARGIN = 16, 1.1
"""Search for the price: halvings of its logarithm, and the factor by which a sample may find too many outliers."""


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix `[N, K]` in CSR form.

    indptr: int32 `[N + 1]`; indices: int32 columns, ascending in a row, each once; values: float16 or float32. Raises
    `ValueError` for parts that describe no matrix.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor
    columns: int

    def __post_init__(self) -> None:
        ends = self.indptr.diff()
        if self.indptr.numel() < 1 or int(self.indptr[0]) != 0 or bool((ends < 0).any()):
            raise ValueError("row ends of a sparse matrix start at 0 and never fall")
        if not int(self.indptr[-1]) == self.indices.numel() == self.values.numel():
            raise ValueError(
                f"{self.indices.numel()} indices, {self.values.numel()} values, {int(self.indptr[-1])} due"
            )
        if self.indices.numel() and not 0 <= int(self.indices.min()) <= int(self.indices.max()) < self.columns:
            raise ValueError(f"sparse indices leave the {self.columns} columns")
        falls = (self.indices.diff() <= 0).nonzero() + 1  # may only be where rows begin
        if not bool(torch.isin(falls, self.indptr).all()):
            raise ValueError("sparse indices do not rise within their row")

    @classmethod
    def from_dense(cls, w_NK: Tensor, mask_NK: Tensor) -> "SparseMatrix":
        """The elements of `w` that `mask` names."""
        indptr = torch.zeros(w_NK.shape[0] + 1, dtype=torch.int32)
        indptr[1:] = mask_NK.sum(1).cumsum(0)
        return cls(indptr, mask_NK.nonzero()[:, 1].int(), w_NK[mask_NK].to(VALUES), w_NK.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.indptr.numel() - 1, self.columns

    @property
    def stored_indices(self) -> Tensor:
        """Columns in the smallest type that holds them."""
        return self.indices.to(index_type(self.columns))

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return _bytes(self.shape, self.indices.numel(), self.values.element_size())

    @property
    def rows(self) -> Tensor:
        """Row of every value, `[nonzero]`."""
        return torch.repeat_interleave(torch.arange(self.shape[0]), self.indptr.diff())

    def row_range(self, start: int, stop: int) -> "SparseMatrix":
        """Rows `start…stop` as a matrix of their own."""
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        indptr = self.indptr[start : stop + 1] - first
        return SparseMatrix(indptr, self.indices[first:last], self.values[first:last], self.columns)

    def dense(self) -> Tensor:
        """Float32 `[N, K]`."""
        out = torch.zeros(self.shape)
        out[self.rows, self.indices.long()] = self.values.float()
        return out

    def matmul(self, x_TK: Tensor) -> Tensor:
        """`x S^T`, float32 `[T, N]`: the eager twin of `ops.cpu.SparseLinear`."""
        return x_TK.float() @ self.dense().T


def concatenated(members: Sequence[SparseMatrix]) -> SparseMatrix:
    """Matrices of equal width on top of each other."""
    indptr = torch.zeros(sum(member.shape[0] for member in members) + 1, dtype=torch.int32)
    indptr[1:] = torch.cat([member.indptr.diff() for member in members]).cumsum(0)
    indices = torch.cat([member.indices for member in members])
    return SparseMatrix(indptr, indices, torch.cat([member.values for member in members]), members[0].columns)


def same_matrix(a: SparseMatrix | None, b: SparseMatrix | None) -> bool:
    """Whether both hold the same numbers in the same places, bit for bit."""
    if a is None or b is None:
        return a is b
    parts = zip((a.indptr, a.indices, a.values), (b.indptr, b.indices, b.values), strict=True)
    return a.shape == b.shape and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in parts)


def nothing(shape: tuple[int, int]) -> SparseMatrix:
    """A matrix of zeros."""
    empty = torch.zeros(0, dtype=torch.int32)
    return SparseMatrix(torch.zeros(shape[0] + 1, dtype=torch.int32), empty, empty.to(VALUES), shape[1])


def index_type(columns: int) -> torch.dtype:
    """Type of stored column indices."""
    return torch.int16 if columns < 1 << 15 else torch.int32


def budget(shape: tuple[int, int], share: float) -> int:
    """Outliers that `share` percent of a matrix allow."""
    return int(shape[0] * shape[1] * share / 100)


def stored_bytes(shape: tuple[int, int], share: float) -> int:
    """Bytes that the sparse part takes beside the codes of a matrix."""
    return _bytes(shape, budget(shape, share), VALUES.itemsize) if share else 0


def split(
    w_NK: Tensor,
    share: float,
    fmt: NumFormat,
    granularity: Granularity,
    symmetric: bool = True,
    second_moment_K: Tensor | None = None,
) -> tuple[Tensor, SparseMatrix]:
    """`(dense_NK, sparse)`: at most `share` percent of the weights, those whose rounding costs most output, go apart.

    An element costs `E[x_k^2] (w - rounded)^2` of its output's squared error: the diagonal of the Hessian, as SpQR and
    SqueezeLLM take it (without statistics `E[x_k^2]` is 1). Taking it out gains that, if its block's scale stays. Where
    it is among the largest of its block the scale falls too, and with it the error of all that remain: SpQR's
    leave-one-out error, which sees nothing where two large weights share a block. So prefixes of a block's falling
    magnitudes are weighed whole. At a price p for each element kept apart, a block without its m largest costs
    `m p + sum of min(error under the smaller scale, p)`. The m of least cost is taken and, beside it, what still costs
    more than p (Lagrange relaxation: optimal for the number it takes, of the m tried); p is such that `share` is met.
    Float formats round relative to each value: only its own error counts there. Ranges are weighed unclipped.
    """
    shape = (w_NK.shape[0], w_NK.shape[1])
    moment_K = torch.ones(shape[1]) if second_moment_K is None else second_moment_K.float()
    blocks, moments = (to_blocks(x, granularity) for x in (w_NK.float(), moment_K.expand(shape)))
    weigher = _Weigher(fmt, symmetric, _prefixes(blocks.shape[1], share, fmt))
    price = 0.0 if weigher.prefixes == (0,) else weigher.price(blocks, moments, share / 100)
    rows = max(1, CHUNK // blocks.shape[1])
    parts = zip(blocks.split(rows), moments.split(rows), strict=True)
    gain_NK = from_blocks(torch.cat([weigher.gains(b, m, price) for b, m in parts]), shape, granularity)
    best = gain_NK.flatten().topk(budget(shape, share))
    mask_NK = torch.zeros(shape, dtype=torch.bool)
    mask_NK.view(-1)[best.indices[best.values > 0]] = True
    return w_NK.masked_fill(mask_NK, 0), SparseMatrix.from_dense(w_NK, mask_NK)


@dataclass(frozen=True)
class _Weigher:
    """Gain of keeping elements of blocks apart. `prefixes`: how many of the largest magnitudes to try, 0 first."""

    fmt: NumFormat
    symmetric: bool
    prefixes: tuple[int, ...]

    def price(self, blocks_BS: Tensor, moments_BS: Tensor, share: float) -> float:
        """Price at which a sample of the blocks keeps a little more than `share` of its elements apart."""
        picked = torch.arange(blocks_BS.shape[0])
        if blocks_BS.numel() > SAMPLE:
            count = max(1, SAMPLE // blocks_BS.shape[1])
            picked = torch.randint(len(picked), (count,), generator=torch.Generator().manual_seed(0), device="cpu")
        errors_PBS = torch.stack(list(self._errors(blocks_BS[picked], moments_BS[picked])))
        due, high = MARGIN * share * errors_PBS[0].numel(), float(errors_PBS[0].sum(1).max())
        low = high * 1e-12
        for _ in range(STEPS if high > 0 else 0):
            price = math.sqrt(low * high)
            best_B = errors_PBS.clamp_max(price).sum(2).argmin(0)
            count = int((errors_PBS[best_B, torch.arange(len(picked))] > price).sum())
            low, high = (price, high) if count > due else (low, price)
        return low

    def gains(self, blocks_BS: Tensor, moments_BS: Tensor, price: float) -> Tensor:
        """Gain of every element that is to be kept apart at that price, else 0, `[B, S]`."""
        gain_BS, first_B1, least_B1 = torch.zeros_like(blocks_BS), None, torch.tensor(math.inf)
        for error_BS in self._errors(blocks_BS, moments_BS):
            cost_B1 = error_BS.clamp_max(price).sum(1, keepdim=True)
            first_B1 = cost_B1 if first_B1 is None else first_B1
            removed_BS = error_BS.isinf()
            each_B1 = price + (first_B1 - cost_B1) / removed_BS.sum(1, keepdim=True).clamp_min(1)
            each_gain_BS = torch.where(removed_BS, each_B1, error_BS * (error_BS > price))
            gain_BS = torch.where(cost_B1 < least_B1, each_gain_BS, gain_BS)
            least_B1 = torch.minimum(cost_B1, least_B1)
        return gain_BS

    def _errors(self, blocks_BS: Tensor, moments_BS: Tensor) -> Iterator[Tensor]:
        """For each prefix: output errors of the elements, infinite for those of the prefix, which cannot stay."""
        size_BS = blocks_BS.abs()
        largest_BM = size_BS.topk(self.prefixes[-1] + 1, dim=1).values
        for m in self.prefixes:
            removed_BS = size_BS > largest_BM[:, m : m + 1]  # ties at the last one stay
            rest_BS = torch.where(removed_BS, 0.0, blocks_BS) if m else blocks_BS
            lo, hi = clipped_range(rest_BS, self.fmt, ABSMAX, self.symmetric)
            scale, zero = range_scale(lo, hi, self.fmt, self.symmetric)
            rounded_BS = dequantize_blocks(quantize_blocks(rest_BS, scale, zero, self.fmt), scale, zero)
            error_BS = rounded_BS.sub_(rest_BS).square_().mul_(moments_BS)
            yield torch.where(removed_BS, math.inf, error_BS) if m else error_BS


def _prefixes(size: int, share: float, fmt: NumFormat) -> tuple[int, ...]:
    """0, 1, 2, 4, … to several times what a block of `size` has to give on average."""
    most = 0 if fmt.is_float else min(size - 1, 4 * math.ceil(size * share / 100))
    return (0, *(1 << i for i in range(most.bit_length())))


def _bytes(shape: tuple[int, int], count: int, width: int) -> int:
    return count * (width + index_type(shape[1]).itemsize) + 4 * (shape[0] + 1)
