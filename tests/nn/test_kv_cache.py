"""KV caches: round trips, roll-back, and storage against theory."""

import pytest
import torch
from torch import Tensor

from qspec.nn.kv_cache import FloatKVCache, KVCache, QuantizedKVCache
from qspec.numerics.formats import FP8_E4M3, INT8
from qspec.plan import KVScheme
from qspec.records import ArchMap

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
    assert torch.equal(drafted.codes(9), plain.codes(9))


@pytest.mark.parametrize(
    ("cache", "per_value", "per_head"),
    [
        (FloatKVCache(ARCH, 64, torch.float32), 4, 0),
        (FloatKVCache(ARCH, 64, torch.bfloat16), 2, 0),
        (_cache(FP8_TENSOR), 1, 0),
        (_cache(INT8_TOKEN), 1, 4),
    ],
)
def test_bytes_per_token_equal_theory(cache: KVCache, per_value: int, per_head: int) -> None:
    """Catches a cache that claims to be small and is not: 2 * layers * heads * (head size * bytes + scale)."""
    assert cache.bytes_per_token() == 2 * 2 * 2 * (16 * per_value + per_head)
