"""Codes of KV blocks against plain scalar arithmetic, and what outliers and pieces are for."""

import math

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.quantization.kv_blocks import CUTS, BlockCode, largest, outlier_count, put_back, without
from qspec.numerics.quantization.packing import pack_nibbles, unpack_nibbles

CODES = [
    BlockCode(fmt, piecewise, offset)
    for fmt in (INT4, INT8, FP8_E4M3)
    for piecewise in (False, True)
    for offset in (False, True)
    if not (fmt.is_float and piecewise)
]


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
    # half a step of 7 up to the largest; piecewise: the coarsest tails, from 1/16 on, have 4 (INT8: 64) levels
    steps = {4: 14, 8: 254}[code.fmt.bits] if not code.fmt.is_float else 16
    bound = reach * (1 / (2 ** (code.fmt.bits - 1)) if code.piecewise else 1 / steps)
    assert ((code.decode(codes, scales) - x).abs() <= bound * 1.01 + 1e-6).all()  # 1 %: scales are rounded to float16


def scalar(c: int, s: float, t: float, bits: int) -> float:
    """The documented layout, one code at a time."""
    n = 2 ** (bits - 2)
    if c >= 0:
        return (c - n + 0.5) * s
    j = c + 2 * n
    return (1 if j >= n else -1) * (n * s + (j % n + 0.5) * t)


@pytest.mark.parametrize("fmt", [INT4, INT8])
def test_piecewise_codes_mean_what_the_layout_says(fmt: NumFormat) -> None:
    """Catches a piece, sign or level read from other bits than it was written to: every code, in scalar arithmetic."""
    every = torch.arange(int(fmt.qmin), int(fmt.qmax) + 1, dtype=torch.int8)
    steps = torch.tensor([0.25, 0.5], dtype=torch.float16)
    values = BlockCode(fmt, True).decode(every, steps)
    assert values.tolist() == [scalar(int(c), 0.25, 0.5, fmt.bits) for c in every]
    assert len(set(values.tolist())) == 2**fmt.bits  # no code is wasted


def test_the_cut_is_the_best_of_the_grid() -> None:
    """Catches a cut that is not the one of least squared error, or a level that is not the nearest: all by hand."""
    x = torch.cat((blocks(1, 30) * 0.1, torch.tensor([[1.0, -0.9]])), 1)
    codes, steps = BlockCode(INT4, True).encode(x)
    got = (BlockCode(INT4, True).decode(codes, steps) - x).square().sum()
    errors = []
    for cut in CUTS:
        s, t = (float(torch.tensor(v).half()) for v in (cut / 4, (1 - cut) / 4))
        levels = torch.tensor([scalar(c, s, t, 4) for c in range(-8, 8)])
        errors.append(float((x[..., None] - levels).abs().amin(-1).square().sum()))
    assert float(got) == pytest.approx(min(errors), rel=1e-5)  # float32 sums in another order
    plain = BlockCode(INT4)
    assert got < (plain.decode(*plain.encode(x)) - x).square().sum()


def test_an_offset_costs_nothing() -> None:
    """Catches channels far from zero that lose their bits: the reason for affine codes of keys."""
    x = blocks(4, 32)
    for code in (BlockCode(INT4, False, True), BlockCode(INT4, True, True)):
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
    # piecewise codes have no zero: half of the least step
    assert code.decode(codes, scales).abs().max() <= 2.0**-20
    assert code.encode(torch.zeros(0, 8))[0].shape == (0, 8)
