"""Kurtosis, outliers, SQNR and saturation against scipy, a plain quantizer, and cases worked out by hand."""

import math
import statistics

from hypothesis import given, strategies as st
import pytest
from scipy import stats
import torch

from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.clipping import CHUNK
from qspec.numerics.quantization.distribution import (
    Extent,
    beyond_share,
    channel_amax,
    extent,
    kurtosis,
    median,
    outlier_channels,
    saturated_share,
    sqnr_db,
    weight_sqnr_db,
)
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat


@pytest.mark.parametrize("shape", [(7,), (3, 50), (2, CHUNK), (CHUNK + 1,)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_kurtosis_is_scipys(shape: tuple[int, ...], offset: float):
    """Would catch excess kurtosis, a wrong mean, or chunks that are not added up."""
    x = torch.randn(shape).pow(3) + offset
    # Same definition, both float64; only the order of the sums differs.
    assert kurtosis(x) == pytest.approx(stats.kurtosis(x.double().numpy(), axis=None, fisher=False), rel=1e-9)


def test_kurtosis_by_hand():
    """Would catch a bias correction: [0, 0, 0, 4] has second and fourth central moments 3 and 21."""
    assert kurtosis(torch.tensor([0.0, 0.0, 0.0, 4.0])) == pytest.approx(21 / 9, rel=1e-12)
    assert kurtosis(torch.tensor([-1.0, 1.0])) == 1.0


@pytest.mark.parametrize("x", [torch.full((1000,), 0.1), torch.zeros(5), torch.empty(0)], ids=["equal", "zero", "none"])
def test_kurtosis_without_spread_is_not_a_number(x: torch.Tensor):
    """Would catch a division of rounding errors by each other, which looks like a heavy tail."""
    assert math.isnan(kurtosis(x))


def test_input_channels_are_columns():
    """Would catch outliers counted over output channels, which have scales of their own."""
    assert channel_amax(torch.tensor([[1.0, -5.0, 0.0], [-2.0, 3.0, 0.5]])).tolist() == [2.0, 5.0, 0.5]


@pytest.mark.parametrize(
    ("amax", "found"),
    [
        ([1.0, 1.0, 1.0, 8.0, 8.1], [4]),  # exactly eight times the median is none
        ([1.0, 2.0, 3.0, 20.0], []),  # median 2.5, not 2
        ([1.0, 2.0, 3.0, 20.1], [3]),
        ([0.0, 0.0, 0.0, 1e-6], [3]),
        ([0.0, 0.0], []),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_outlier_channels_by_hand(amax: list[float], found: list[int], scale: float):
    """Would catch another median, a bound that is included, or an answer that depends on the matrix's scale."""
    assert outlier_channels(scale * torch.tensor(amax)).nonzero().flatten().tolist() == found


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_median_is_the_textbooks(values: list[float]):
    """Would catch torch's own, which is the lower of two middle values."""
    assert median(torch.tensor(values, dtype=torch.float64)) == pytest.approx(statistics.median(values), abs=1e-9)


def test_extent_leaves_out_what_is_not_defined():
    """Would catch one NaN that hides the range of all other layers."""
    assert extent([3.0, math.nan, 1.0, 2.0]) == Extent(1.0, 2.0, 3.0)
    assert extent(torch.tensor([[4.0, 2.0]])) == Extent(2.0, 3.0, 4.0)
    assert math.isnan(extent([math.nan]).max)
    assert math.isnan(extent([]).min)


@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        (INT8, PerChannel()),
        (FP8_E4M3, PerChannel()),
        (INT4, PerGroup(64)),
        (INT8, PerTensor()),
        (INT8, PerBlock(96, 50)),
    ],
    ids=str,
)
def test_weight_sqnr_is_that_of_the_quantizer(fmt: NumFormat, granularity: Granularity):
    """Would catch an estimate that differs from what `quantize` will do, a lost chunk, or padding that counts."""
    w = torch.randn(500, 256) * torch.rand(500, 1)
    error = quantize_weight(w, fmt, granularity).dequantize() - w
    expected = 10 * math.log10(w.double().square().sum() / error.double().square().sum())
    # The same float32 codes; squares are rounded to float32 before they are added (1e-7, or 5e-7 dB). Scales of groups
    # are rounded to float16, which the estimate leaves out: up to 2.4e-4 of a code, whose half is the largest error.
    tolerance = 1e-3 if isinstance(granularity, PerGroup) else 1e-5
    assert weight_sqnr_db(w, fmt, granularity) == pytest.approx(expected, abs=tolerance)


def test_sqnr_of_uniform_weights_follows_the_formula():
    """Would catch dB of amplitudes: on [-1, 1] the energy is 1/3 and the error of steps of 1/127 is 1/(12 * 127^2)."""
    w = torch.rand(64, 1024) * 2 - 1
    # The largest of 1024 values falls short of 1 by 0.1 %, and 65,536 samples scatter: 0.1 dB in all.
    assert weight_sqnr_db(w, INT8, PerChannel()) == pytest.approx(10 * math.log10(4 * 127**2), abs=0.1)


def test_sqnr_without_error_or_without_signal():
    """Would catch a division by zero, or an all-zero matrix that looks perfect."""
    exact = torch.tensor([[127.0, -3.0, 0.0, 64.0]])
    assert weight_sqnr_db(exact, INT8, PerChannel()) == math.inf
    assert math.isnan(weight_sqnr_db(torch.zeros(2, 4), INT8, PerChannel()))
    assert sqnr_db(100.0, 1.0) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("codes", "fmt", "symmetric", "share"),
    [
        ([-128, -127, 127, 0], INT8, True, 0.75),  # |-128| is -128 in int8
        ([-128, -127, 127, 0], INT8, False, 0.5),
        ([-8, -7, 7, 6], INT4, True, 0.75),
        ([448.0, -448.0, 416.0, 0.0], FP8_E4M3, True, 0.5),
        ([1, 2], INT8, True, 0.0),
    ],
)
def test_saturated_share_by_hand(codes: list[float], fmt: NumFormat, symmetric: bool, share: float):
    """Would catch one end that is not counted, or an overflow at the lowest code."""
    assert saturated_share(torch.tensor(codes).to(fmt.storage), fmt, symmetric) == share


def test_absmax_puts_one_code_per_scale_at_the_end():
    """Would catch a share that cannot be told from clipping: this is the floor that the report names."""
    q = quantize_weight(torch.randn(40, 512), FP8_E4M3, PerChannel())
    # Neighbours of the maximum that round to the same code add a few.
    assert 1 / 512 <= saturated_share(q.codes, q.fmt) < 4 / 512


def test_beyond_share_counts_by_head():
    """Would catch a limit that is broadcast over tokens instead of heads."""
    x_HTD = torch.tensor([[[1.0, -3.0]], [[5.0, -7.0]]])
    assert beyond_share(x_HTD, torch.tensor([2.0, 100.0])) == 0.25
    assert beyond_share(x_HTD, torch.tensor([4.0])) == 0.5
    assert beyond_share(x_HTD, torch.tensor([7.0])) == 0.0
