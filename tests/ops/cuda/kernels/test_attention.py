"""RoPE with the write to the cache, and attention over it, against their eager twins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.ops import cuda, reference_cuda as twins
from qspec.ops.cuda import KVLayer

pytest.importorskip("triton")
BF16, F32, FP8, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8


def cache_of(shape: tuple[int, ...], dtype: torch.dtype, by_token: bool, device: torch.device) -> KVLayer:
    """Memory never written is NaN where the format has one."""
    filling = torch.nan if dtype.is_floating_point else 99
    keys, values = (torch.full((shape[0] + 1, *shape[1:]), filling, device=device).to(dtype)[1:] for _ in range(2))
    if not by_token:
        return KVLayer(keys, values, *((0.03, 0.05) if keys.element_size() == 1 else (1.0, 1.0)))
    return KVLayer(keys, values, *(torch.full(shape[:3], torch.nan, device=device) for _ in range(2)))


def written(cache: KVLayer, end: int) -> KVLayer:
    """Positions up to `end` of every sequence filled."""
    b, groups, _, d = cache.k_BGLD.shape
    device = cache.k_BGLD.device
    keys, values = (torch.randn(b, end, groups, d, device=device) for _ in range(2))
    slots_BL = torch.arange(end, device=device).expand(b, -1)
    for codes, scale, x in ((cache.k_BGLD, cache.k_scale, keys), (cache.v_BGLD, cache.v_scale, values)):
        twins._write(codes, scale, x, slots_BL)
    return cache


def chain(rows: int) -> list[int]:
    return [(2 << i) - 1 for i in range(rows)]


def check(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of sums and, in bfloat16, probabilities and outputs rounded to 8 bits."""
    step = 2.0**-7 if got.dtype == BF16 else 1e-5
    torch.testing.assert_close(got, want, rtol=step, atol=step)


@pytest.mark.parametrize(
    ("dtype", "stored", "by_token", "rows", "groups", "share", "d"),
    [
        (F32, F32, False, 1, 1, 1, 64),
        (BF16, BF16, False, 9, 1, 8, 16),
        (F32, FP8, False, 5, 2, 4, 80),
        (BF16, FP8, True, 2, 1, 5, 128),
        (F32, INT8, True, 3, 8, 1, 16),
        (F32, FP8, True, 6, 1, 3, 24),
    ],
)
def test_attention(
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype,
    by_token: bool,
    rows: int,
    groups: int,
    share: int,
    d: int,
) -> None:
    """Catches heads of another group, scales of another position, unwritten memory that is read, lost parts."""
    from qspec.ops.cuda import attention

    lengths = torch.tensor([0, 37], device=device)
    cache = written(cache_of((2, groups, 64, d), stored, by_token, device), 37 + rows)
    bits = torch.tensor([chain(rows)] * 2, device=device)
    q = torch.randn(2, rows, groups * share, d, device=device).to(dtype)
    want = twins.attend(q, cache, lengths, bits, d**-0.5)
    for splits in (1, 2):
        got = attention.attend(q, cache, lengths, bits, d**-0.5, splits)
        check(got, want)
    assert torch.equal(got, attention.attend(q, cache, lengths, bits, d**-0.5, splits)), "the same bits again"


def test_trees_and_rows_that_see_nothing(device: torch.device) -> None:
    """Catches a sibling that is seen, bit 63 taken for a sign, nodes behind the end, NaN of an empty softmax."""
    bits = torch.tensor([[0b1, 0b11, 0b101, 0b1010], [-(1 << 63), 1 << 40 | 1, 0, -1]], device=device)
    for length, end in ((100, 128), (0, 64)):
        cache = written(cache_of((2, 2, 128, 16), F32, False, device), end)
        lengths = torch.tensor([length, length // 2], device=device)
        q = torch.randn(2, 4, 4, 16, device=device)
        check(cuda.attend(q, cache, lengths, bits, 0.25), twins.attend(q, cache, lengths, bits, 0.25))
    nothing = cuda.attend(q, cache_of((2, 2, 128, 16), F32, False, device), lengths * 0, bits * 0, 0.25)
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_huge_scores(device: torch.device) -> None:
    """Catches an exponential that overflows, within a part and where parts are merged."""
    from qspec.ops.cuda import attention

    cache = written(cache_of((1, 1, 64, 16), F32, False, device), 50)
    q, lengths, bits = torch.randn(1, 2, 1, 16, device=device) * 1e4, torch.tensor([48], device=device), chain(2)
    args = q, cache, lengths, torch.tensor([bits], device=device), 1.0
    check(attention.attend(*args, splits=4), twins.attend(*args))


def test_long_rows_and_parts_as_chosen(device: torch.device) -> None:
    """Catches rows of a second tile, and parts without positions."""
    from qspec.ops.cuda import attention

    cache = written(cache_of((1, 1, 300, 16), INT8, True, device), 230)
    q = torch.randn(1, 24, 4, 16, device=device)
    args = q, cache, torch.tensor([206], device=device), torch.tensor([chain(24)], device=device), 0.25
    check(cuda.attend(*args), twins.attend(*args))
    assert attention.best_splits(1, 300, 132) == 3
    assert attention.best_splits(8, 131072, 132) == 33


def test_a_short_context_has_few_parts_in_a_long_cache(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches parts by what a cache could hold, and memory of parts that nobody wrote in what is merged."""
    from qspec.ops.cuda import attention

    scratch, empty = list[Tensor](), torch.empty

    def unwritten(*size: int, **options: Any) -> Tensor:
        scratch.append(empty(*size, **options).fill_(torch.nan))
        return scratch[-1]

    lengths = torch.tensor([0, 100, 129, 400], device=device)
    cache = written(cache_of((4, 1, 512, 16), F32, False, device), 401)
    args = torch.randn(4, 1, 1, 16, device=device), cache, lengths, torch.tensor([chain(1)] * 4, device=device), 0.25
    want = twins.attend(*args)
    monkeypatch.setattr(torch, "empty", unwritten)
    got = attention.attend(*args, splits=8)
    check(got, want)
    _, _, mass = scratch
    assert (~mass.isnan()).sum(1).tolist() == [1, 1, 2, 4]


@pytest.mark.parametrize(
    ("stored", "by_token", "rows", "groups", "heads", "d", "turned"),
    [
        (F32, False, 1, 1, 1, 64, 64),
        (BF16, False, 3, 2, 6, 80, 20),
        (FP8, False, 2, 5, 5, 128, 128),
        (FP8, True, 3, 2, 6, 80, 80),
        (INT8, True, 2, 1, 8, 16, 16),
        (FP8, True, 1, 3, 3, 24, 8),
    ],
)
def test_rope_write(
    device: torch.device,
    stored: torch.dtype,
    by_token: bool,
    rows: int,
    groups: int,
    heads: int,
    d: int,
    turned: int,
) -> None:
    """Catches halves turned the wrong way, heads or slots of another row, scales' floor, the rest of a narrow table."""
    for dtype in (F32, BF16):
        mixed = torch.randn(2, rows, heads + 2 * groups, d, device=device)
        mixed[0, 0, -1] = 0.0  # a value whose scale is the floor
        mixed[1, 0, heads] *= 1e4
        q, k, v = mixed.to(dtype).split([heads, groups, groups], 2)
        angle = torch.randn(12, turned // 2, device=device).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        positions = torch.randint(12, (2, rows), device=device)
        slots = torch.stack([torch.randperm(9, device=device)[:rows] for _ in range(2)])
        got_cache, want_cache = (cache_of((2, groups, 9, d), stored, by_token, device) for _ in range(2))
        got = cuda.rope_write(q, k, v, cos, sin, positions, slots, got_cache)
        want = twins.rope_write(q, k, v, cos, sin, positions, slots, want_cache)
        exact = device.type == "cpu"  # a GPU fuses x * cos + y * sin, and may round its last bit the other way
        torch.testing.assert_close(got, want, rtol=0 if exact else 2**-7, atol=0 if exact else 1e-6)
        for a, b in ((got_cache.k_BGLD, want_cache.k_BGLD), (got_cache.v_BGLD, want_cache.v_BGLD)):
            apart = (bits_of(a) - bits_of(b)).abs()
            assert apart.max() <= (0 if exact else 1)
        scales = (got_cache.k_scale, want_cache.k_scale), (got_cache.v_scale, want_cache.v_scale)
        for scale, wanted in scales:
            if isinstance(scale, Tensor):
                torch.testing.assert_close(scale, wanted, rtol=0 if exact else 1e-6, atol=0, equal_nan=True)


def bits_of(x: Tensor) -> Tensor:
    """What memory holds, as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).long()
