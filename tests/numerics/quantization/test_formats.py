"""The bounds of every format are the bounds of its storage, and every code of it survives."""

import math

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks
from qspec.numerics.quantization.formats import FORMATS, FP8_E4M3, INT4, SCALE_FLOOR, NumFormat

ONE = torch.ones(1, 1)


def fp8_value(code: int) -> float:
    """Value of an E4M3 code by the definition (arXiv 2209.05433), NaN for the two that are no number."""
    exponent, mantissa = (code & 0x7F) >> 3, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if code & 0x80 else magnitude


def finite_codes() -> tuple[Tensor, Tensor]:
    """Codes (uint8) and values of all finite E4M3 numbers, in code order."""
    finite = [(code, value) for code in range(256) if not math.isnan(value := fp8_value(code))]
    codes, values = zip(*finite, strict=True)
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(values, dtype=torch.float32)


def test_every_fp8_code() -> None:
    """Catches flushed subnormals, a lost sign of zero, or a bound short of the largest finite number."""
    codes, values = finite_codes()
    assert len(codes) == 254
    assert (values.min().item(), values.max().item()) == (FP8_E4M3.qmin, FP8_E4M3.qmax)
    assert torch.equal(quantize_blocks(values[None], ONE, None, FP8_E4M3).view(torch.uint8)[0], codes)


def test_all_256_fp8_codes_decode() -> None:
    """Catches a decoder of the other float8 format, which agrees on zero alone."""
    codes = torch.arange(256, dtype=torch.uint8)[None].view(FP8_E4M3.storage)
    values, expected = dequantize_blocks(codes, 2 * ONE, None)[0], torch.tensor([2 * fp8_value(i) for i in range(256)])
    finite = expected.isfinite()
    assert torch.equal(values[finite], expected[finite])
    assert not values[~finite].isfinite().any()


def test_fp8_ties_go_to_even() -> None:
    """Catches truncation, or ties away from zero: half-way between neighbours the even code wins."""
    codes, values = finite_codes()
    positive = values[codes < 128]
    half_way = (positive[1:] + positive[:-1]) / 2  # exact: FP8 neighbours have few bits
    expected = torch.arange(len(half_way), dtype=torch.uint8)
    expected = expected + expected % 2
    assert torch.equal(quantize_blocks(half_way[None], ONE, None, FP8_E4M3).view(torch.uint8)[0], expected)


def test_every_int4_code() -> None:
    """Catches a clamp to [-7, 7], which would waste a code, and one to int8, which would not pack."""
    codes = torch.arange(-8, 8)
    assert torch.equal(quantize_blocks(codes[None].float(), ONE, None, INT4)[0].long(), codes)
    assert quantize_blocks(torch.tensor([[-9.0, 8.0]]), ONE, None, INT4).tolist() == [[-8, 7]]


@pytest.mark.parametrize("zero", [None, -3.0, 5.0])
def test_all_16_int4_codes_decode(zero: float | None) -> None:
    """Catches unsigned codes, and a zero point that is added instead of subtracted."""
    codes, zeros = torch.arange(-8, 8, dtype=torch.int8)[None], None if zero is None else torch.full((1, 1), zero)
    values = dequantize_blocks(codes, ONE / 4, zeros)
    assert values[0].tolist() == [(code - (zero or 0)) / 4 for code in range(-8, 8)]
    assert torch.equal(quantize_blocks(values, ONE / 4, zeros, INT4), codes)


def test_int4_takes_the_nearest_code() -> None:
    """Catches truncation, and ties that do not go to the even code."""
    steps = torch.arange(-32, 29) / 4  # -8 … 7 in quarters
    expected = [round(step) for step in steps.tolist()]  # Python rounds half to even, too
    assert quantize_blocks(steps[None], ONE, None, INT4)[0].tolist() == expected


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_saturation(fmt: NumFormat) -> None:
    """Catches overflow that wraps (integers) or turns into NaN or infinity (floats)."""
    far = torch.tensor([[-math.inf, -1e30, 1e30, math.inf]])
    codes = quantize_blocks(far, ONE, None, fmt).float()
    assert codes.tolist() == [[fmt.qmin, fmt.qmin, fmt.qmax, fmt.qmax]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_names_widths_and_storage_agree(fmt: NumFormat) -> None:
    """Catches a format stored in a type that cannot hold its codes."""
    assert FORMATS[fmt.name] is fmt
    assert fmt.storage.itemsize == 1
    assert fmt.storage.is_floating_point == fmt.is_float
    if not fmt.is_float:
        assert (fmt.qmin, fmt.qmax) == (-(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1) - 1)


def test_scale_floor_is_a_normal_number_of_every_scale_dtype() -> None:
    """Catches a floor that a bfloat16 or float16 scale would flush to zero."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.tensor(SCALE_FLOOR, dtype=dtype) > 0
