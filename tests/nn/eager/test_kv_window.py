"""Groups of tokens and residual windows: what is stored depends on positions, not on how tokens arrived."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.nn.eager.kv_cache import QuantizedKVCache
from qspec.nn.eager.kv_window import SLACK, window_length
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.plan import KVPart, KVScheme
from qspec.records import ArchMap

LENGTH = 200
ARCH = ArchMap("llama", "LlamaForCausalLM", 1, 64, 128, 4, 2, 8, 300, LENGTH, (1.0,) * 4)
NAME = "model.layers.0.self_attn"
KEYS = KVPart(INT4, "channel", group=8)
BASE = KVScheme(INT4, "token_head", key=KEYS, residual=4)
SCHEMES = {
    "channel": BASE,
    "no residual": replace(BASE, residual=0),
    "outliers": replace(BASE, key=replace(KEYS, outliers=2.0), value=KVPart(INT4, "token_head", outliers=2.0)),
    "fp8 channel": KVScheme(FP8_E4M3, "tensor", key=KVPart(FP8_E4M3, "channel", group=8), residual=3),
    "residual only": KVScheme(INT8, "token_head", residual=5),
    "static residual": KVScheme(FP8_E4M3, "head", residual=5),
}
X = torch.randn(2, ARCH.n_kv_heads, LENGTH, ARCH.head_dim, generator=torch.Generator().manual_seed(0))


def cache(scheme: KVScheme) -> QuantizedKVCache:
    scale = {NAME: torch.full((ARCH.n_kv_heads if scheme.granularity == "head" else 1,), 0.01)}
    return QuantizedKVCache(ARCH, LENGTH, torch.float32, scheme, scale, scale)


def fed(kv: QuantizedKVCache, start: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions from `start` on as the decoder writes them, in segments; what the last segment attends to."""
    parts = x.split(kv.segments(start, start + x.shape[2]), 2)
    for part in parts:
        keys, values = kv.update(0, start, part[0], part[1])
        start += part.shape[2]
    return keys, values


def same(a: QuantizedKVCache, b: QuantizedKVCache, start: int) -> bool:
    """Whether a token at `start` reads the same codes, scales and outliers."""
    return all(map(torch.equal, a.codes(start), b.codes(start)))


STEPS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), st.booleans()), min_size=1, max_size=8)


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, prompt=st.integers(1, 60))
def test_drafts_that_were_rejected_leave_no_trace(name: str, steps: list[tuple[int, int, bool]], prompt: int) -> None:
    """Catches codes, boundaries or floats that depend on rejected drafts: any prompt, any drafts, one by one or not."""
    drafted, plain = cache(SCHEMES[name]), cache(SCHEMES[name])
    fed(drafted, 0, X[:, :, :prompt])
    fed(plain, 0, X[:, :, :prompt])
    length, noise = prompt, torch.full_like(X, 30.0)
    for tokens, kept, alone in steps:
        kept = min(kept, tokens)
        draft = torch.cat((X[:, :, length : length + kept], noise[:, :, length + kept : length + tokens]), 2)
        for part in draft.split(1 if alone else tokens, 2):
            fed(drafted, length, part)
            length += part.shape[2]
        length += kept - tokens
        drafted.truncate(length)
    got = fed(drafted, length, X[:, :, length : length + 1])
    for position in range(prompt, length + 1):
        want = fed(plain, position, X[:, :, position : position + 1])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert same(drafted, plain, length)


@pytest.mark.parametrize("name", SCHEMES)
def test_each_row_reads_what_it_would_read_alone(name: str) -> None:
    """Catches a segment that crosses a boundary: later rows of a verification would read floats where codes are."""
    scheme = SCHEMES[name]
    together, alone = cache(scheme), cache(scheme)
    fed(together, 0, X[:, :, :100])
    for position in range(100):
        want = fed(alone, position, X[:, :, position : position + 1])
    assert same(together, alone, 99)
    sizes = together.segments(0, LENGTH)
    assert sum(sizes) == LENGTH
    edges = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [scheme.boundary(edge) for edge in edges] == sorted({scheme.boundary(i) for i in range(LENGTH)})
    boundary = scheme.boundary(99)
    assert torch.equal(want[0][:, boundary:], X[0, :, boundary:100])  # the window is the floats themselves
    assert not torch.equal(want[0][:, :boundary], X[0, :, :boundary])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("length", [0, 3, 8, 41, 96, 150])
def test_deep_truncation_goes_on_from_rounded_values(name: str, length: int) -> None:
    """Catches floats of other tokens, or zeros, where a long-gone position is needed again."""
    kv = cache(SCHEMES[name])
    fed(kv, 0, X[:, :, :LENGTH])
    kv.truncate(length)
    keys, values = fed(kv, length, X[:, :, length : length + 30])
    for got, want in ((keys, X[0]), (values, X[1])):
        # INT4 steps of a range of 7 are half a unit; a value is rounded at most twice
        assert (got[:, : length + 30] - want[:, : length + 30]).abs().max() < 1.0


def test_without_truncation_it_is_still_right() -> None:
    """Catches a cache that relies on being told: positions written again replace what was there."""
    told, untold = cache(BASE), cache(BASE)
    for kv in (told, untold):
        fed(kv, 0, X[:, :, :50])
    told.truncate(40)
    pairs = zip(fed(told, 40, X[:, :, 60:70]), fed(untold, 40, X[:, :, 60:70]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_windows_are_short() -> None:
    """Catches a float window that grows with the cache, or one too short to roll a draft back."""
    assert window_length(BASE, 10_000) == 4 + 8 + SLACK
    assert cache(BASE).window_bytes() == 2 * 2 * 8 * 4 * (4 + 8 + SLACK)
    assert cache(KVScheme(INT8, "token_head")).window_bytes() == 0
