"""Folds leave the function as it was, in every convention of the norm gain, with one rounding at the end."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.smoothing import divide_gain, divide_rows, fold_norm, scale_columns

# float64: sums of 16 products of about 1, each good to 1.1e-16.
EXACT = 1e-13


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def norm(x_TK: Tensor, gain_K: Tensor, offset: float) -> Tensor:
    """RMSNorm as Llama (offset 0) and Gemma (offset 1) compute it."""
    return x_TK * x_TK.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (gain_K + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fold_norm_keeps_the_function(offset: float) -> None:
    """Catches a gain folded into rows, or Gemma's offset forgotten on either side."""
    x_TK, gain_K, weights = draw(5, 16), draw(16, seed=1), [draw(8, 16, seed=2), draw(4, 16, seed=3)]
    new_gain_K, folded = fold_norm(gain_K, offset, weights)
    assert (new_gain_K + offset == 1).all()
    for w_NK, new_NK in zip(weights, folded, strict=True):
        before, after = norm(x_TK, gain_K, offset) @ w_NK.T, norm(x_TK, new_gain_K, offset) @ new_NK.T
        torch.testing.assert_close(after, before, rtol=0, atol=EXACT)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_divide_gain_with_scale_columns_keeps_the_function(offset: float) -> None:
    """Catches the factor applied to the stored gain instead of the effective one (Gemma)."""
    x_TK, gain_K, w_NK, s_K = draw(5, 16), draw(16, seed=1), draw(8, 16, seed=2), draw(16, seed=3).exp()
    after = norm(x_TK, divide_gain(gain_K, offset, s_K), offset) @ scale_columns(w_NK, s_K).T
    torch.testing.assert_close(after, norm(x_TK, gain_K, offset) @ w_NK.T, rtol=0, atol=EXACT)


def test_divide_rows_with_scale_columns_keeps_the_function() -> None:
    """Catches a bias left undivided: the next layer would then see it `s` times too large."""
    x_TK, first_NK, bias_N = draw(5, 8), draw(16, 8, seed=1), draw(16, seed=2)
    second_MN, s_N = draw(4, 16, seed=3), draw(16, seed=4).exp()
    before = (x_TK @ first_NK.T + bias_N) @ second_MN.T
    w_NK, b_N = divide_rows(first_NK, bias_N, s_N)
    assert b_N is not None
    torch.testing.assert_close((x_TK @ w_NK.T + b_N) @ scale_columns(second_MN, s_N).T, before, rtol=0, atol=EXACT)
    assert divide_rows(first_NK, None, s_N)[1] is None


def test_one_rounding() -> None:
    """Catches products formed in bfloat16: the result must be the float64 product, rounded once."""
    gain_K, w_NK, s_K = draw(16).bfloat16(), draw(8, 16, seed=1).bfloat16(), draw(16, seed=2).exp().float()
    new_gain_K, (folded,) = fold_norm(gain_K, 1.0, [w_NK])
    assert new_gain_K.dtype == folded.dtype == torch.bfloat16
    assert torch.equal(folded, (w_NK.double() * (gain_K.double() + 1)).bfloat16())
    assert torch.equal(divide_gain(gain_K, 1.0, s_K), ((gain_K.double() + 1) / s_K.double() - 1).bfloat16())
    assert torch.equal(scale_columns(w_NK, s_K), (w_NK.double() * s_K.double()).bfloat16())


def test_inputs_are_left_alone() -> None:
    """Catches an in-place fold: a loaded model is shared and never mutated."""
    gain_K, w_NK = draw(16), draw(8, 16, seed=1)
    kept = gain_K.clone(), w_NK.clone()
    fold_norm(gain_K, 0.0, [w_NK])
    divide_rows(w_NK, None, torch.full((8,), 2.0))
    assert torch.equal(gain_K, kept[0])
    assert torch.equal(w_NK, kept[1])
