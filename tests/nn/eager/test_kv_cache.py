"""KV caches: round trips, roll-back, and storage against theory."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from qspec.nn.eager.kv_cache import FloatKVCache, KVCache, QuantizedKVCache
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.numerics.quantization.kv_blocks import dequantize, quantize_static
from qspec.plan import KVPart, KVScheme
from qspec.records import ArchMap
from qspec.schemes.footprint import kv_bytes_per_token, kv_window_bytes

ARCH = ArchMap("llama", "LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 300, 64, (1.0,) * 8)
NAMES = [f"model.layers.{i}.self_attn" for i in range(2)]
FP8_TENSOR = KVScheme(FP8_E4M3, "tensor")
FP8_HEAD = KVScheme(FP8_E4M3, "head")
FP8_TOKEN = KVScheme(FP8_E4M3, "token_head")
INT8_TOKEN = KVScheme(INT8, "token_head")
SCHEMES = [FP8_TENSOR, FP8_HEAD, FP8_TOKEN, INT8_TOKEN]


def _cache(scheme: KVScheme) -> QuantizedKVCache:
    size = ARCH.n_kv_heads if scheme.granularity == "head" else 1
    scales = {name: torch.linspace(0.01, 0.02, size) for name in NAMES}
    return QuantizedKVCache(ARCH, 64, torch.float32, scheme, scales, scales)


def _kv(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, ARCH.n_kv_heads, tokens, ARCH.head_dim, generator=torch.Generator().manual_seed(seed))
    return x[0], x[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_cache_is_close_to_what_was_written(scheme: KVScheme) -> None:
    """Catches scales of the wrong head or token, and keys swapped with values."""
    k, v = _kv(9, 0)
    keys, values = _cache(scheme).update(1, 0, k, v)
    # e4m3 keeps 3 mantissa bits (relative 1/16, subnormals up to half of 2**-9 * scale); int8 1/254 of the maximum
    for got, want in ((keys, k), (values, v)):
        torch.testing.assert_close(got, want, rtol=1 / 16, atol=0.02)
        assert not torch.equal(got, want)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_keys_and_values_have_their_own_scales(granularity: Literal["tensor", "head"]) -> None:
    """Catches the scale of keys used for values: of a thousand times larger keys it leaves nothing of the values."""
    scheme = KVScheme(FP8_E4M3, granularity)
    size = ARCH.n_kv_heads if granularity == "head" else 1
    scales = [{name: factor * torch.linspace(0.01, 0.02, size) for name in NAMES} for factor in (1000.0, 1.0)]
    k, v = _kv(9, 0)
    keys, values = QuantizedKVCache(ARCH, 64, torch.float32, scheme, *scales).update(1, 0, 1000 * k, v)
    torch.testing.assert_close(keys / 1000, k, rtol=1 / 16, atol=0.02)
    torch.testing.assert_close(values, v, rtol=1 / 16, atol=0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_roll_back_leaves_the_codes_of_a_cache_that_never_drafted(scheme: KVScheme) -> None:
    """Catches scales that depend on append order: a rejected draft would change later output."""
    drafted, plain = _cache(scheme), _cache(scheme)
    (k, v), (bad_k, bad_v), (k2, v2) = _kv(5, 0), _kv(4, 1), _kv(3, 2)
    for layer in range(ARCH.n_layers):
        drafted.update(layer, 0, k, v)
        drafted.update(layer, 5, bad_k * 100, bad_v * 100)
        got = drafted.update(layer, 6, k2, v2)
        plain.update(layer, 0, k, v)
        plain.update(layer, 5, bad_k[:, :1] * 100, bad_v[:, :1] * 100)
        want = [plain.update(layer, 6 + i, k2[:, i : i + 1], v2[:, i : i + 1]) for i in range(3)][-1]
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert all(map(torch.equal, drafted.codes(9), plain.codes(9)))


@pytest.mark.parametrize(
    ("cache", "per_value", "per_head"),
    [
        (FloatKVCache(ARCH, 64, torch.float32), 4, 0),
        (FloatKVCache(ARCH, 64, torch.bfloat16), 2, 0),
        (_cache(FP8_TENSOR), 1, 0),
        (_cache(INT8_TOKEN), 1, 4),
        (_cache(KVScheme(INT4, "token_head")), 0.5, 4),
    ],
)
def test_bytes_per_token_equal_theory(cache: KVCache, per_value: float, per_head: int) -> None:
    """Catches a cache that claims to be small and is not: 2 * layers * heads * (head size * bytes + scale)."""
    assert cache.bytes_per_token() == 2 * 2 * 2 * (16 * per_value + per_head)


# Bytes of one head and token, D = 16, from the definitions: codes, scales, outliers (float16 and int16 each).
KEY_PARTS = [
    (KVPart(FP8_E4M3, "tensor"), 16),
    (KVPart(INT4, "token_head", outliers=5.0), 8 + 4 + 1 * 4),
    (KVPart(FP8_E4M3, "channel", group=16), 16 + 16 * 4 / 16),
    (KVPart(INT4, "channel", group=32), 8 + 16 * 2 * 2 / 32),
    (KVPart(INT4, "channel", group=32, outliers=1.0), 8 + 16 * 2 * 2 / 32 + 6 * 4 / 32),  # 1 % of 512: 6
]


@pytest.mark.parametrize(("key", "expected"), KEY_PARTS, ids=[part.label for part, _ in KEY_PARTS])
@pytest.mark.parametrize("skip_layers", [(), (1,)])
def test_storage_of_every_strategy(key: KVPart, expected: float, skip_layers: tuple[int, ...]) -> None:
    """Catches scales, outliers or half-empty bytes that nobody counts: storage, definition and plan must agree."""
    scheme = KVScheme(INT8, "token_head", key=key, skip_layers=skip_layers)
    cache, quantized = _cache(scheme), 2 - len(skip_layers)
    per_token = quantized * 2 * (expected + 16 + 4) + len(skip_layers) * 2 * 2 * 16 * 4
    assert cache.bytes_per_token() == per_token
    assert kv_bytes_per_token(ARCH, scheme, 4) == math.ceil(per_token)
    assert cache.window_bytes() == kv_window_bytes(ARCH, scheme, 4, 64)


def test_skipped_layers_and_apart_parts() -> None:
    """Catches keys under the strategy of values, and a skipped layer that is rounded all the same."""
    cache = _cache(KVScheme(FP8_E4M3, "tensor", value=KVPart(INT4, "token_head"), skip_layers=(0,)))
    k, v = _kv(9, 0)
    assert all(map(torch.equal, cache.update(0, 0, k, v), (k, v)))
    keys, values = cache.update(1, 0, k, v)
    assert not torch.equal(keys, k)
    error = (values - v).abs() / v.abs().amax(-1, keepdim=True)
    assert 1 / 64 < error.max() <= (1 / 14) * (1 + 1e-5)  # INT4 has half a step of 1/7


def test_queries_are_rounded_to_the_format() -> None:
    """Catches queries rounded under another head's scale, or not at all."""
    scale = torch.tensor([0.01, 0.02, 0.04, 0.08])
    scheme = KVScheme(FP8_E4M3, "tensor", query="head")
    ones = dict.fromkeys(NAMES, torch.ones(1))
    cache = QuantizedKVCache(ARCH, 64, torch.float32, scheme, ones, ones, dict.fromkeys(NAMES, scale))
    q = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    steps = scale.reshape(4, 1, 1)
    assert torch.equal(cache.round_query(1, q), (q / steps).to(torch.float8_e4m3fn).float() * steps)
    assert _cache(FP8_TENSOR).round_query(1, q) is q


def test_decoding_of_codes_equals_the_eager_twin() -> None:
    """Catches a fast decoder that differs from torch's own conversion."""
    cache = _cache(FP8_TENSOR)
    k, v = _kv(9, 0)
    keys, values = cache.update(0, 0, k, v)
    scale = torch.linspace(0.01, 0.02, 1)
    for got, x in ((keys, k), (values, v)):
        assert torch.equal(got, dequantize(quantize_static(x, scale, FP8_E4M3), scale))
