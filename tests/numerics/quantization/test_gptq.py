"""Error feedback against a slow textbook, its guarantees, and what happens when matrices misbehave."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization import gptq
from qspec.numerics.quantization.affine import QTensor, quantize_weight
from qspec.numerics.quantization.blocks import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    from_blocks,
    to_blocks,
)
from qspec.numerics.quantization.clipping import ABSMAX, Clip
from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.quantization.gptq import DAMPING, factor, feed_back

N, K = 24, 160  # more than one block of columns
SCHEMES = [
    (INT8, PerChannel(), True, ABSMAX),
    (INT4, PerGroup(32), True, ABSMAX),
    (INT4, PerGroup(32), True, Clip("mse")),
    (INT4, PerGroup(16), False, ABSMAX),
    (FP8_E4M3, PerChannel(), True, ABSMAX),
    (FP8_E4M3, PerTensor(), True, ABSMAX),
    (FP8_E4M3, PerBlock(16, 32), True, ABSMAX),
]
all_schemes = pytest.mark.parametrize(("fmt", "granularity", "symmetric", "clip"), SCHEMES)


def layer(seed: int = 0, rows: int = 400) -> tuple[Tensor, Tensor]:
    """A weight, and second moments of correlated inputs whose channels differ in size, as in trained models."""
    generator = torch.Generator().manual_seed(seed)
    w_NK = torch.randn(N, K, generator=generator)
    mixing_KK = torch.randn(K, K, generator=generator) * torch.rand(K, generator=generator).exp() ** 3
    x_TK = torch.randn(rows, 40, generator=generator) @ mixing_KK[:40] + torch.randn(rows, K, generator=generator)
    return w_NK, x_TK.T @ x_TK


def textbook(w_NK: Tensor, rounded: QTensor, hessian_KK: Tensor, damping: float) -> Tensor:
    """Optimal brain quantization in order of falling diagonal: every step inverts what is left of H anew."""
    damped = hessian_KK.double() + damping * hessian_KK.diagonal().double().mean() * torch.eye(K, dtype=torch.float64)
    blocks = to_blocks(w_NK, rounded.granularity)
    scale_NK = from_blocks(rounded.scale.reshape(-1, 1).expand_as(blocks), (N, K), rounded.granularity)
    zero_NK = None
    if rounded.zero_point is not None:
        zero_NK = from_blocks(rounded.zero_point.reshape(-1, 1).expand_as(blocks), (N, K), rounded.granularity)
    w, values = w_NK.double().clone(), torch.empty(N, K)
    left = sorted(range(K), key=lambda j: -float(hessian_KK[j, j]))
    while left:
        j = left[0]
        zero_N = None if zero_NK is None else zero_NK[:, j]
        codes_N = quantize_blocks(w[:, j], scale_NK[:, j], zero_N, rounded.fmt)
        values[:, j] = dequantize_blocks(codes_N, scale_NK[:, j], zero_N)
        inverse = torch.linalg.inv(damped[left][:, left])
        w[:, left] -= torch.outer((w[:, j] - values[:, j]) / inverse[0, 0], inverse[0])
        left.pop(0)
    return values


@all_schemes
def test_equals_the_textbook(fmt: NumFormat, granularity: Granularity, symmetric: bool, clip: Clip) -> None:
    """Catches a wrong factor, order, block update, or scale of a column that was moved by the order."""
    w_NK, hessian_KK = layer()
    rounded = quantize_weight(w_NK, fmt, granularity, symmetric, clip)
    found = factor(hessian_KK)
    assert found is not None
    # Both do the same sums in another order and precision; the fixed seed keeps them clear of ties.
    assert torch.equal(feed_back(w_NK, rounded, found).dequantize(), textbook(w_NK, rounded, hessian_KK, DAMPING))


@all_schemes
def test_uncorrelated_inputs_round_to_nearest(
    fmt: NumFormat, granularity: Granularity, symmetric: bool, clip: Clip
) -> None:
    """Catches feedback between inputs that have nothing to do with each other, and a transposed factor or code."""
    w_NK = layer()[0]
    rounded = quantize_weight(w_NK, fmt, granularity, symmetric, clip)
    for hessian_KK in (torch.eye(K), torch.diag(torch.rand(K) + 0.1)):
        found = factor(hessian_KK)
        assert found is not None
        fed = feed_back(w_NK, rounded, found)
        assert torch.equal(fed.codes.view(torch.uint8), rounded.codes.view(torch.uint8))
        assert fed.scale is rounded.scale


@all_schemes
def test_output_error_falls(fmt: NumFormat, granularity: Granularity, symmetric: bool, clip: Clip) -> None:
    """Catches feedback of the wrong sign: it would raise the error that it is there to lower."""
    w_NK, hessian_KK = layer()
    rounded = quantize_weight(w_NK, fmt, granularity, symmetric, clip)
    found = factor(hessian_KK)
    assert found is not None
    errors = []
    for q in (feed_back(w_NK, rounded, found), rounded):
        delta_NK = w_NK - q.dequantize()
        errors.append(float(((delta_NK @ hessian_KK) * delta_NK).sum()))
    assert errors[0] < 0.6 * errors[1]  # inputs of 40 strong directions in 160 leave much to gain


def test_rows_in_parts_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scales or codes that go to another row when a tall weight is worked on in parts."""
    w_NK, hessian_KK = layer()
    rounded, found = quantize_weight(w_NK, INT4, PerGroup(16), False), factor(hessian_KK)
    assert found is not None
    whole = feed_back(w_NK, rounded, found)
    monkeypatch.setattr(gptq, "ROWS", 7)
    assert torch.equal(feed_back(w_NK, rounded, found).codes, whole.codes)


def test_dead_inputs_are_rounded() -> None:
    """Catches a division by zero at an input that calibration never excited, and its weights set to zero."""
    w_NK, hessian_KK = layer()
    dead = [3, 77, 159]
    hessian_KK[dead], hessian_KK[:, dead] = 0, 0
    rounded = quantize_weight(w_NK, INT8, PerChannel())
    found = factor(hessian_KK, damping=0)
    assert found is not None
    fed = feed_back(w_NK, rounded, found)
    assert torch.equal(fed.codes[:, dead], rounded.codes[:, dead])
    assert not torch.equal(fed.codes, rounded.codes)
    nothing = factor(torch.zeros(K, K))
    assert nothing is not None
    assert torch.equal(feed_back(w_NK, rounded, nothing).codes, rounded.codes)


def test_damping_mends_itself() -> None:
    """Catches a job that ends at a matrix that rounding has made indefinite, and damping that nobody hears of."""
    w_NK, hessian_KK = layer()
    lowest = torch.linalg.eigvalsh(hessian_KK.double())[0]
    shift = 0.05 * hessian_KK.diagonal().mean() + lowest  # the lowest eigenvalue becomes -5 % of the mean diagonal
    indefinite_KK = hessian_KK - shift * torch.eye(K)
    found = factor(indefinite_KK, damping=0.001)
    assert found is not None
    assert found.damping == pytest.approx(0.1)  # 0.001 and 0.01 are too little, and the mean diagonal fell by 5 %
    rounded = quantize_weight(w_NK, INT8, PerChannel())
    assert feed_back(w_NK, rounded, found).scale is rounded.scale


@pytest.mark.parametrize("spoil", ["negative", "nan", "inf"])
def test_hopeless_matrices_have_no_factor(spoil: str) -> None:
    """Catches an exception, endless damping, or NaN that reaches the codes."""
    _, hessian_KK = layer()
    if spoil == "negative":
        hessian_KK = -hessian_KK
    else:
        hessian_KK[5, 6] = hessian_KK[6, 5] = float(spoil)
    assert factor(hessian_KK) is None
