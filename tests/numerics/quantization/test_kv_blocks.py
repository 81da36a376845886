"""Codes of KV blocks, and what outliers are for."""

import math

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.numerics.quantization.kv_blocks import BlockCode, largest, outlier_count, put_back, without
from qspec.numerics.quantization.packing import pack_nibbles, unpack_nibbles

CODES = [BlockCode(fmt, offset) for fmt in (INT4, INT8, FP8_E4M3) for offset in (False, True)]


def blocks(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_nibbles_are_where_the_layout_says() -> None:
    """Catches swapped halves of a byte, and signs lost: channel 2i low, 2i + 1 high, two's complement."""
    assert pack_nibbles(torch.tensor([[-8, 7, 1, -1]], dtype=torch.int8)).tolist() == [[0x78, 0xF1]]
    every = torch.tensor([[a, b] for a in range(-8, 8) for b in range(-8, 8)], dtype=torch.int8).reshape(2, 8, 32)
    packed = pack_nibbles(every)
    assert packed.shape == (2, 8, 16)
    assert torch.equal(unpack_nibbles(packed), every)
    bits = packed.int()
    twin = torch.stack((((bits & 15) ^ 8) - 8, ((bits >> 4) ^ 8) - 8), -1).flatten(-2)
    assert torch.equal(twin, every.int())


@pytest.mark.parametrize("code", CODES)
def test_codes_are_storage_and_near(code: BlockCode) -> None:
    """Catches codes past their bits, scales of another block, and a value more than half a step off."""
    x = blocks(3, 5, 16) + (4.0 if code.offset else 0.0)
    codes, scales = code.encode(x)
    count, dtype = code.scales
    assert (codes.dtype, codes.shape) == (code.fmt.storage, x.shape)
    assert (scales.dtype, scales.shape) == (dtype, (3, 5, count))
    assert codes.float().min() >= code.fmt.qmin
    assert codes.float().max() <= code.fmt.qmax
    reach = x.abs().amax(-1, keepdim=True)
    steps = {4: 14, 8: 254}[code.fmt.bits] if not code.fmt.is_float else 16  # half a step of 7 up to the largest
    assert (
        (code.decode(codes, scales) - x).abs() <= reach / steps * 1.01 + 1e-6
    ).all()  # 1 %: scales are rounded to float16


def test_an_offset_costs_nothing() -> None:
    """Catches channels far from zero that lose their bits: the reason for affine codes of keys."""
    x = blocks(4, 32)
    code = BlockCode(INT4, offset=True)
    errors = [(code.decode(*code.encode(y)) - y).abs().max() for y in (x, x + 64)]
    assert errors[1] < errors[0] + 0.05  # float16 holds 64 + x to 1/32


def test_outliers_come_back_and_stretch_no_range() -> None:
    """Catches an outlier that still sets the scale, comes back elsewhere, or overflows float16 to infinity."""
    x = blocks(2, 64)
    x[0, 7], x[1, 9] = 50.0, -1e6
    values, index = largest(x, outlier_count(1.0, 64))
    assert (index.dtype, values.dtype, index.tolist()) == (torch.int16, torch.float16, [[7], [9]])
    mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, index.long(), True)
    code = BlockCode(INT4)
    back = put_back(code.decode(*code.encode(without(x, mask))), values, index)
    assert back[0, 7] == 50
    assert back[1, 9] == -65504  # float16's largest
    kept = ~mask
    assert (back - x)[kept].abs().max() < 0.5 * x[kept].abs().max() / 7 + 1e-6


@pytest.mark.parametrize(("percent", "size", "count"), [(0.0, 64, 0), (1.0, 64, 1), (1.0, 100, 1), (5.0, 2048, 103)])
def test_at_least_the_percentage_is_kept(percent: float, size: int, count: int) -> None:
    """Catches 1 % of 64 that is none, and 1 % of 100 that is two."""
    assert outlier_count(percent, size) == count
    assert count >= math.floor(size * percent / 100)


@pytest.mark.parametrize("code", CODES)
def test_zero_and_empty_blocks(code: BlockCode) -> None:
    """Catches a step of zero, and a maximum over no blocks."""
    codes, scales = code.encode(torch.zeros(2, 8))
    assert code.decode(codes, scales).abs().max() <= 2.0**-20
    assert code.encode(torch.zeros(0, 8))[0].shape == (0, 8)
