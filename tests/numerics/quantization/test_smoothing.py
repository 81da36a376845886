"""Smoothing is exact before rounding, follows the paper's equation, and is searched by the error that counts."""

import math

from hypothesis import given, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import quantize_activation_dynamic, quantize_weight
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.codes import dequantize_blocks
from qspec.numerics.quantization.formats import INT8
from qspec.numerics.quantization.smoothing import (
    output_error,
    scale_columns,
    search_strength,
    smoothing_scale,
    weights_amax,
)

GRID = (0.0, 0.25, 0.5, 0.75)
amaxes = st.lists(st.floats(0, 1e4, width=32), min_size=4, max_size=4).map(torch.tensor)


def w8a8(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """A linear layer with per-token and per-channel INT8."""
    codes_TK, scale_T1 = quantize_activation_dynamic(x_TK, INT8)
    return dequantize_blocks(codes_TK, scale_T1, None) @ quantize_weight(w_NK, INT8, PerChannel()).dequantize().T


def outlier_layer() -> tuple[Tensor, list[Tensor]]:
    """Inputs with one channel a hundred times larger than the rest, and two layers that read them."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(32, 16, generator=generator)
    x_TK[:, 5] *= 100
    return x_TK, [torch.randn(n, 16, generator=generator) for n in (8, 12)]


@given(amaxes, amaxes, st.floats(0, 1))
def test_product_is_unchanged(x_amax_K: Tensor, w_amax_K: Tensor, strength: float) -> None:
    """Catches factors applied in the same direction on both sides, or infinite and zero ones at empty channels."""
    s_K = smoothing_scale(x_amax_K, w_amax_K, strength)
    assert (s_K > 0).all()
    assert s_K.isfinite().all()
    x_TK, w_NK = torch.tensor([[1.0, -1, 1, 1]]).double() * x_amax_K, torch.ones(2, 1).double() * w_amax_K
    smooth = (x_TK / s_K) @ scale_columns(w_NK, s_K).T
    # float64: a handful of roundings of 1.1e-16 over products that may cancel, relative to the largest of them.
    assert torch.allclose(smooth, x_TK @ w_NK.T, rtol=0, atol=1e-14 * (1 + (x_amax_K * w_amax_K).max().item()))


def test_equation_4() -> None:
    """Catches swapped exponents."""
    s_K = smoothing_scale(torch.tensor([16.0, 4.0]), torch.tensor([4.0, 9.0]), 0.5)
    assert s_K.tolist() == pytest.approx([2, 2 / 3])
    assert smoothing_scale(torch.tensor([16.0]), torch.tensor([4.0]), 1.0).item() == pytest.approx(16)
    assert smoothing_scale(torch.tensor([16.0]), torch.tensor([4.0]), 0.0).item() == pytest.approx(1 / 4)


def test_half_strength_balances_both_sides() -> None:
    """Catches a factor that moves difficulty the wrong way: at 0.5 both maxima become equal."""
    x_TK, weights = outlier_layer()
    x_amax_K, w_amax_K = x_TK.abs().amax(0), weights_amax(weights)
    s_K = smoothing_scale(x_amax_K, w_amax_K, 0.5)
    torch.testing.assert_close(x_amax_K / s_K, w_amax_K * s_K)  # default float32 tolerance: a few roundings


def test_empty_channels_are_left_alone() -> None:
    """Catches 0 / 0 at channels that calibration never saw, or that no layer reads."""
    assert smoothing_scale(torch.tensor([0.0, 5.0, 0.0]), torch.tensor([3.0, 0.0, 0.0]), 0.5).tolist() == [1, 1, 1]


def test_weights_amax_covers_all_readers() -> None:
    """Catches factors taken from one of q, k and v only."""
    a_NK, b_NK = torch.tensor([[1.0, -9.0], [2.0, 3.0]]), torch.tensor([[-5.0, 4.0]])
    assert weights_amax([a_NK, b_NK.bfloat16()]).tolist() == [5, 9]


def test_search_returns_the_best_of_the_grid() -> None:
    """Catches a search by another error than the one it reports, and one that smooths without gain."""
    x_TK, weights = outlier_layer()
    x_amax_K = x_TK.abs().amax(0)
    strength, error = search_strength(x_TK, weights, x_amax_K, w8a8, GRID)
    assert strength is not None
    scales = {a: smoothing_scale(x_amax_K, weights_amax(weights), a) for a in GRID}
    errors = {a: output_error(x_TK, weights, s_K, w8a8) for a, s_K in scales.items()}
    assert errors[strength] == error == min(errors.values())
    # Without smoothing the outlier costs the other channels log2(100) of their 7 bits: far more than a factor 4.
    assert error < output_error(x_TK, weights, torch.ones(16), w8a8) / 4


def test_error_is_against_float_and_summed() -> None:
    """Catches an error against the smoothed product instead of the float one, or a mean over layers."""
    x_TK, weights = outlier_layer()
    s_K = torch.full((16,), 2.0)

    def exact_plus_one(x_TK: Tensor, w_NK: Tensor) -> Tensor:
        return x_TK @ w_NK.T + 1

    # 1e-4: float32 sums of 16 products of up to a few hundred, beside an error of exactly 1 per output.
    assert output_error(x_TK, weights, s_K, exact_plus_one) == pytest.approx(2, rel=1e-4)


def test_search_never_picks_a_broken_strength() -> None:
    """Catches NaN comparing as the smallest error."""
    x_TK, weights = outlier_layer()
    calls = iter(range(99))

    def first_is_nan(x_TK: Tensor, w_NK: Tensor) -> Tensor:
        call = next(calls) // len(weights)  # strength 0, strength 0.5, left alone
        return x_TK @ w_NK.T * (math.nan, 1, 2)[call]

    strength, error = search_strength(x_TK, weights, x_TK.abs().amax(0), first_is_nan, (0.0, 0.5))
    assert strength == 0.5
    assert math.isfinite(error)


def test_equal_errors_take_the_smaller_strength() -> None:
    """Catches a choice that depends on the order of the grid."""
    x_TK, weights = outlier_layer()
    calls = iter(range(99))

    def zero_until_left_alone(x_TK: Tensor, w_NK: Tensor) -> Tensor:
        return x_TK.new_zeros(len(x_TK), len(w_NK)) * (1 if next(calls) < 2 * len(weights) else math.inf)

    assert search_strength(x_TK, weights, x_TK.abs().amax(0), zero_until_left_alone, (0.5, 0.25))[0] == 0.25


def test_search_leaves_a_layer_alone_that_gains_nothing() -> None:
    """Catches smoothing for its own sake: an exact layer cannot get better."""
    x_TK, weights = outlier_layer()
    exact = search_strength(x_TK, weights, x_TK.abs().amax(0), lambda x, w: x @ w.T * 0, GRID)
    assert exact[0] is None
