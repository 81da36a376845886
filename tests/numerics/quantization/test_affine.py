"""Codes and values are those of compressed-tensors at the same scale; errors stay within half a step."""

from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from hypothesis import given, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import (
    quantize_activation_dynamic,
    quantize_matrix,
    quantize_weight,
    tensor_amax,
)
from qspec.numerics.quantization.blocks import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    scale_shape,
)
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.codes import affine_scale, dequantize_blocks, quantize_blocks
from qspec.numerics.quantization.formats import FORMATS, FP8_E4M3, INT4, INT8, SCALE_FLOOR, NumFormat
from tests.numerics.oracle import quantization_args

GRANULARITIES = (PerTensor(), PerChannel(), PerGroup(8), PerBlock(8, 16), PerBlock(5, 7))


def matrix(seed: int = 0, n: int = 24, k: int = 32) -> Tensor:
    """A weight with a few outliers and an all-zero row."""
    w_NK = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    w_NK[:, 3] *= 20
    w_NK[5] = 0
    return w_NK


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_symmetric_codes_equal_compressed_tensors(fmt: NumFormat, granularity: Granularity) -> None:
    """Catches another rounding, another clamp, or a scale applied to the wrong block (ragged tiles included)."""
    w_NK, args = matrix(), quantization_args(fmt, granularity)
    q = quantize_weight(w_NK, fmt, granularity)
    theirs = quantize(w_NK, q.scale, torch.zeros_like(q.scale), args, dtype=fmt.storage)
    assert torch.equal(q.codes.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(q.dequantize(), dequantize(theirs, q.scale, None, args))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", [INT4, INT8], ids=lambda f: f.name)
def test_asymmetric_codes_equal_compressed_tensors(fmt: NumFormat, granularity: Granularity) -> None:
    """Catches a zero point of the wrong sign, or added after rounding."""
    w_NK, args = matrix() + 0.7, quantization_args(fmt, granularity, symmetric=False)
    q = quantize_weight(w_NK, fmt, granularity, symmetric=False)
    assert q.zero_point is not None
    theirs = quantize(w_NK, q.scale, q.zero_point, args, dtype=fmt.storage)
    assert torch.equal(q.codes, theirs)
    assert torch.equal(q.dequantize(), dequantize(theirs, q.scale, q.zero_point, args))


def test_ties_round_to_even_after_the_zero_point() -> None:
    """Catches round(x / s) + z, which differs from compressed-tensors at ties when z is odd."""
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5]])
    assert quantize_blocks(x, torch.ones(1, 1), None, INT8).tolist() == [[0, 2, 2, 0]]
    assert quantize_blocks(x, torch.ones(1, 1), torch.ones(1, 1), INT8).tolist() == [[2, 2, 4, 0]]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_shapes_and_dtypes(fmt: NumFormat, granularity: Granularity) -> None:
    """Catches codes or scales that a codec would have to reshape."""
    q = quantize_weight(matrix().bfloat16(), fmt, granularity)
    assert q.codes.shape == q.shape == (24, 32)
    assert q.codes.dtype == fmt.storage
    assert q.codes.is_contiguous()
    assert q.scale.shape == scale_shape((24, 32), granularity)
    assert q.scale.dtype == q.dequantize().dtype == torch.float32


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_requantizing_changes_nothing(fmt: NumFormat) -> None:
    """Catches a drift between `dequantize` and `quantize_matrix`, which a re-read and re-write would accumulate."""
    q = quantize_weight(matrix(), fmt, PerBlock(5, 7))
    again = quantize_matrix(q.dequantize(), q.scale, q.zero_point, fmt, q.granularity)
    assert torch.equal(again.codes.view(torch.uint8), q.codes.view(torch.uint8))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), st.sampled_from((INT4, INT8)), st.booleans())
def test_integer_error_is_within_half_a_step(row: list[float], fmt: NumFormat, symmetric: bool) -> None:
    """Catches a range that does not reach its own extremes."""
    w_NK = torch.tensor([row])
    q = quantize_weight(w_NK, fmt, PerChannel(), symmetric)
    # An affine range ends up to half a step off, as its zero point is rounded: then the extreme is a whole step off.
    steps = 0.5 if symmetric else 1.0
    error = (q.dequantize() - w_NK).abs().max()
    # 1e-5: float32 rounding of x / s and q * s, relative to a range of at most 255 steps.
    assert error <= steps * q.scale.max() + 1e-5 * w_NK.abs().max()


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20))
def test_float_error_is_within_half_a_step(row: list[float]) -> None:
    """Catches a float format that is rounded to integers first."""
    w_NK = torch.tensor([row])
    q = quantize_weight(w_NK, FP8_E4M3, PerChannel())
    bound = torch.maximum(w_NK.abs() * 2**-4, q.scale * 2**-10)  # half of a step, and of a subnormal one
    # 1 + 1e-5: float32 rounding of x / s may cross a tie.
    assert ((q.dequantize() - w_NK).abs() <= bound * (1 + 1e-5)).all()


@given(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32), st.sampled_from((INT4, INT8)))
def test_zero_is_exact_under_affine_scales(a: float, b: float, fmt: NumFormat) -> None:
    """Catches a zero point outside the code range when the data lie on one side of zero."""
    scale, zero = affine_scale(torch.tensor([[min(a, b)]]), torch.tensor([[max(a, b)]]), fmt)
    assert zero.item() == round(zero.item())
    assert fmt.qmin <= zero.item() <= fmt.qmax
    codes = quantize_blocks(torch.zeros(1, 1), scale, zero, fmt)
    assert dequantize_blocks(codes, scale, zero).item() == 0


def test_float_formats_refuse_a_zero_point() -> None:
    """Catches an asymmetric FP8 scheme that would quietly become something else."""
    with pytest.raises(ValueError, match="fp8_e4m3 is symmetric only"):
        quantize_weight(matrix(), FP8_E4M3, PerChannel(), symmetric=False)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_zero_and_tiny_blocks_keep_a_usable_scale(fmt: NumFormat) -> None:
    """Catches a zero or denormal scale, which serving kernels divide by."""
    for value in (0.0, 1e-30):
        q = quantize_weight(torch.full((2, 8), value), fmt, PerChannel())
        assert (q.scale >= SCALE_FLOOR).all()
        assert (q.dequantize() == 0).all()


def test_scales_of_groups_are_float16_numbers() -> None:
    """Catches a group's scale that rounds below the floor, or to infinity, or in float32 alone."""
    w_NK = torch.randn(4, 64) * torch.tensor([[0.0], [1e-9], [1.0], [1e9]])
    q = quantize_weight(w_NK, INT8, PerGroup(32))
    assert torch.equal(q.scale[:3], q.scale[:3].half().float())
    assert (q.scale >= SCALE_FLOOR).all()
    torch.testing.assert_close(q.dequantize()[2:], w_NK[2:], rtol=0, atol=float(q.scale[3].max()))


def test_clip_reaches_the_codes() -> None:
    """Catches a clip that is computed and then not used."""
    w_NK = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([100.0])])[None]
    q = quantize_weight(w_NK, INT8, PerTensor(), clip=Clip("percentile", 99))
    assert q.scale.item() == pytest.approx(1 / 127)  # the outlier is the one value in a hundred above 1
    assert q.codes[0, -1] == 127


@pytest.mark.parametrize("fmt", [INT8, FP8_E4M3], ids=lambda f: f.name)
def test_dynamic_activations(fmt: NumFormat) -> None:
    """Catches a scale shared between tokens: each row must be as if it were alone, and use the whole range."""
    x_TK = matrix() * torch.logspace(-2, 2, 24)[:, None]
    codes_TK, scale_T1 = quantize_activation_dynamic(x_TK, fmt)
    theirs = quantize(x_TK, scale_T1, torch.zeros_like(scale_T1), quantization_args(fmt, PerToken()), fmt.storage)
    assert torch.equal(codes_TK.view(torch.uint8), theirs.view(torch.uint8))
    for t in range(24):
        alone, scale = quantize_activation_dynamic(x_TK[t : t + 1], fmt)
        assert torch.equal(alone.float(), codes_TK[t : t + 1].float())
        assert scale == scale_T1[t]
    live = x_TK.abs().amax(1) > 0
    assert (codes_TK.float().abs().amax(1)[live] == fmt.qmax).all()


def test_dynamic_activations_in_bfloat16() -> None:
    """Catches a scale or quotient computed in the compute dtype: 8 bits of mantissa cannot hold 127 steps."""
    x_TK = matrix().bfloat16()
    codes, scale = quantize_activation_dynamic(x_TK, INT8)
    expected, expected_scale = quantize_activation_dynamic(x_TK.float(), INT8)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)


def test_tensor_amax() -> None:
    """Catches a signed maximum, and a crash on a layer that saw no token."""
    assert tensor_amax(torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)).tolist() == [3]
    assert tensor_amax(torch.zeros(0, 4)).tolist() == [0]
