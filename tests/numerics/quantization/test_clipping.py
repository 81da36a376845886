"""Clips: the maximum, the percentile by its definition, and a search that never loses to the maximum."""

from hypothesis import given, strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization import clipping
from qspec.numerics.quantization.affine import QTensor, quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, to_blocks
from qspec.numerics.quantization.clipping import SHRINK, Clip, clipped_range, squared_error
from qspec.numerics.quantization.formats import FORMATS, FP8_E4M3, INT4, INT8, NumFormat

MSE = Clip("mse")
rows = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=24)


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def block_error(q: QTensor, w_NK: Tensor) -> Tensor:
    """Squared error of every block, from the matrix that the codes stand for."""
    return to_blocks((q.dequantize() - w_NK).double().square(), q.granularity).sum(1)


@given(rows, st.sampled_from(list(FORMATS.values())), st.booleans())
def test_mse_is_never_worse_than_the_maximum(row: list[float], fmt: NumFormat, symmetric: bool) -> None:
    """Catches a grid without the full range, or a comparison on another scale than the one that is used."""
    w_NK, symmetric = torch.tensor([row]), symmetric or fmt.is_float
    plain = quantize_weight(w_NK, fmt, PerChannel(), symmetric)
    searched = quantize_weight(w_NK, fmt, PerChannel(), symmetric, MSE)
    assert block_error(searched, w_NK) <= block_error(plain, w_NK)


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(), PerGroup(16), PerBlock(20, 30)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_mse_is_never_worse_in_any_block(fmt: NumFormat, granularity: Granularity) -> None:
    """Catches a search that improves the sum over blocks at the cost of one of them."""
    w_NK = normal(32, 64) ** 3  # heavy tails
    plain = quantize_weight(w_NK, fmt, granularity)
    searched = quantize_weight(w_NK, fmt, granularity, clip=MSE)
    assert (block_error(searched, w_NK) <= block_error(plain, w_NK)).all()


def test_mse_finds_a_better_clip() -> None:
    """Catches a search that always answers with the maximum: INT4 of normal rows gains a lot."""
    w_NK = normal(8, 1024)
    plain = block_error(quantize_weight(w_NK, INT4, PerChannel()), w_NK)
    searched = block_error(quantize_weight(w_NK, INT4, PerChannel(), clip=MSE), w_NK)
    # The best INT4 step for a normal distribution is 0.335 sigma (mean squared error 0.0115); the maximum of 1024 draws
    # is above 3 sigma, a step of 0.43 or more. A quarter off is a safe margin below the expected third.
    assert (searched < 0.75 * plain).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_is_the_best_of_its_grid(symmetric: bool) -> None:
    """Catches a running minimum that keeps the range of another factor, or of another block."""
    blocks_BS = normal(6, 40) ** 3
    lo, hi = clipped_range(blocks_BS, INT4, MSE, symmetric)
    full_lo, full_hi = clipped_range(blocks_BS, INT4, Clip(), symmetric)
    table = torch.stack([squared_error(blocks_BS, full_lo * f, full_hi * f, INT4, symmetric) for f in SHRINK])
    assert torch.equal(squared_error(blocks_BS, lo, hi, INT4, symmetric), table.amin(0))


def test_equal_errors_keep_the_widest_range() -> None:
    """Catches needless saturation: exact blocks, and those at the floor of the scale, have nothing to gain."""
    blocks_BS = torch.stack([torch.zeros(8), torch.arange(8.0), torch.arange(8) * 2.0**-20])
    _, hi = clipped_range(blocks_BS, INT4, MSE, True)
    assert hi.flatten().tolist() == [0, 7, 7 * 2.0**-20]


@pytest.mark.parametrize("shape", [(40, 6), (2, 200)])
def test_chunks_change_nothing(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches chunks that drop blocks, or columns of a block wider than a chunk."""
    blocks_BS = normal(*shape)
    whole = clipped_range(blocks_BS, INT4, MSE, True)
    monkeypatch.setattr(clipping, "CHUNK", 64)
    parts = clipped_range(blocks_BS, INT4, MSE, True)
    assert torch.equal(whole[1], parts[1])
    assert torch.equal(whole[0], parts[0])


@given(rows, st.sampled_from((50.1, 90.0, 99.0, 99.9, 100.0)))
def test_percentile_is_the_inverted_cdf(row: list[float], percent: float) -> None:
    """Catches an off-by-one rank and interpolation between the outlier and the rest."""
    _, hi = clipped_range(torch.tensor([row]), INT8, Clip("percentile", percent), True)
    magnitudes = np.abs(np.array(row, dtype=np.float32))
    assert hi.item() == np.percentile(magnitudes, percent, method="inverted_cdf")


def test_percentile_rank_is_exact() -> None:
    """Catches binary rounding of 51.52 % of 625, which is 322 and not the next one."""
    _, hi = clipped_range(torch.arange(1.0, 626)[None], INT8, Clip("percentile", 51.52), True)
    assert hi.item() == 322


def test_percentile_of_a_large_tensor() -> None:
    """Catches a quantile kernel with a size limit: a per-tensor block is a whole weight."""
    blocks_BS = torch.arange(1.0, 2**24 + 2**20 + 1)[None]
    _, hi = clipped_range(blocks_BS, INT8, Clip("percentile", 50), True)
    assert hi.item() == blocks_BS.shape[1] // 2


@pytest.mark.parametrize("clip", [Clip(), Clip("percentile", 90), MSE], ids=lambda c: c.method)
def test_signs_of_the_range(clip: Clip) -> None:
    """Catches a symmetric range that is not, and an asymmetric one wider than its data."""
    blocks_BS = normal(5, 50) + 1
    lo, hi = clipped_range(blocks_BS, INT8, clip, True)
    assert torch.equal(lo, -hi)
    assert lo.shape == hi.shape == (5, 1)
    lo, hi = clipped_range(blocks_BS, INT8, clip, False)
    assert (lo >= blocks_BS.amin(1, keepdim=True)).all()
    assert (hi <= blocks_BS.amax(1, keepdim=True)).all()
    assert (lo < hi).all()


def test_ranges_are_float32() -> None:
    """Catches a search in bfloat16, whose errors are larger than those it compares."""
    for clip in (Clip(), Clip("percentile", 90), MSE):
        lo, hi = clipped_range(normal(2, 32).bfloat16(), FP8_E4M3, clip, True)
        assert lo.dtype == hi.dtype == torch.float32


def uneven(k: int) -> Tensor:
    """Mean squares of input channels that lie four decades apart, as outlier channels do."""
    return 10 ** (4 * torch.rand(k, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(), PerGroup(16), PerBlock(20, 24)], ids=str)
@pytest.mark.parametrize("chunk", [clipping.CHUNK, 100])
def test_importance_belongs_to_columns(granularity: Granularity, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights of another column, group or tile, and rows of weights that go out of step between chunks."""
    monkeypatch.setattr(clipping, "CHUNK", chunk)
    w_NK, importance_K = normal(32, 64) ** 3, uneven(64)
    q = quantize_weight(w_NK, INT4, granularity, clip=MSE, importance_K=importance_K)
    blocks_BS, weight_BS = to_blocks(w_NK, granularity), to_blocks(importance_K.expand(32, 64), granularity)
    lo, hi = clipped_range(blocks_BS, INT4, Clip(), True)
    table = torch.stack([squared_error(blocks_BS, lo * f, hi * f, INT4, True, weight_BS) for f in SHRINK])
    found = (weight_BS * to_blocks(q.dequantize() - w_NK, granularity).square()).sum(1, dtype=torch.float64)
    # Equal but for the order of float32 products; scales of groups are rounded to float16 after the search.
    assert torch.allclose(found, table.amin(0).flatten(), rtol=0.01 if isinstance(granularity, PerGroup) else 1e-5)


def test_equal_importance_changes_nothing() -> None:
    """Catches weights that are squared, or meet the error before it is: the best clip must not depend on their size."""
    w_NK = normal(8, 256) ** 3
    plain = quantize_weight(w_NK, INT4, PerGroup(32), clip=MSE)
    weighted = quantize_weight(w_NK, INT4, PerGroup(32), clip=MSE, importance_K=torch.full((256,), 4.0))
    assert torch.equal(plain.codes, weighted.codes)
    assert torch.equal(plain.scale, weighted.scale)


def test_importance_lowers_the_output_error() -> None:
    """Catches a clip that serves the weight where inputs are uneven: it must serve what the layer computes."""
    w_NK, x_TK = normal(64, 256) ** 3, normal(200, 256, seed=2) * uneven(256).sqrt()
    plain = quantize_weight(w_NK, INT4, PerGroup(64), clip=MSE)
    weighted = quantize_weight(w_NK, INT4, PerGroup(64), clip=MSE, importance_K=x_TK.square().mean(0))
    errors = [(x_TK @ (q.dequantize() - w_NK).T).square().sum() for q in (weighted, plain)]
    assert errors[0] < 0.9 * errors[1]  # 0.7 here; a tenth is far above what the sampling of 200 rows moves
    assert block_error(weighted, w_NK).sum() >= block_error(plain, w_NK).sum()  # the price, by definition


def test_other_clips_do_not_look_at_importance() -> None:
    """Catches a maximum or percentile that depends on data: only `mse` has an error to weigh."""
    w_NK, importance_K = normal(8, 64), uneven(64)
    for clip in (Clip(), Clip("percentile", 90)):
        weighted = quantize_weight(w_NK, INT8, PerChannel(), clip=clip, importance_K=importance_K)
        assert torch.equal(weighted.codes, quantize_weight(w_NK, INT8, PerChannel(), clip=clip).codes)
