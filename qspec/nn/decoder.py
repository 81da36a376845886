"""The decoder that runs here: Llama, Mistral, Qwen2, Qwen3 and Gemma, float or quantized, one sequence.

T tokens of a call, L positions in the cache, H heads, D head size, V vocabulary. Layers that read the same input
(q/k/v, gate/up) are merged into one matmul at load; names on disk stay apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.kv_cache import FloatKVCache, KVCache, QuantizedKVCache
from qspec.nn.linear import merged_linear
from qspec.ops.select import Kernels, Linear
from qspec.records import ArchMap, LoadedModel, QLinear, QuantizedModel

Observer = Callable[[str, Tensor], None]
"""Called with a linear layer's name and its input `[T, K]`, and `….self_attn.k` / `.v` with `[H, T, D]`."""

EXACT_ROWS = 65
"""Rows per pass up to which a quantized model computes each row as if alone (64 drafts and one).

Rounding to codes is a step function: a last-bit difference in attention can move an activation by a whole INT8 step,
and the next layers make that visible. Integer matmuls, norms and element-wise steps do not depend on the number of
rows; attention does, so its rows are kept apart.
"""


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A causal LM with its own KV cache; implements `nn.lm.LM`."""

    def __init__(
        self,
        arch: ArchMap,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, QLinear],
        cache: KVCache,
        dtype: torch.dtype,
        kernels: Kernels = "auto",
    ) -> None:
        self.arch, self._dtype, self._cache, self._length = arch, dtype, cache, 0
        self.observer: Observer | None = None
        weights = _Weights(arch, tensors, linears, dtype, kernels)
        self._embed_VK = tensors["model.embed_tokens.weight"].to(dtype)
        self._layers = [_layer(weights, i) for i in range(arch.n_layers)]
        self._norm = weights.norm("model.norm")
        tied = arch.tied and "lm_head" not in linears
        self._head = merged_linear([self._embed_VK], [None], dtype) if tied else weights.linear("lm_head")
        self._cos, self._sin = _rope_tables(arch, cache.max_length, dtype)

    @classmethod
    def from_float(
        cls, model: LoadedModel, dtype: torch.dtype = torch.float32, max_length: int | None = None
    ) -> "Decoder":
        """The original model, weights converted to `dtype`."""
        cache = FloatKVCache(model.arch, max_length or model.arch.max_positions, dtype)
        return cls(model.arch, model.tensors, {}, cache, dtype)

    @classmethod
    def from_quantized(
        cls,
        model: QuantizedModel,
        dtype: torch.dtype = torch.float32,
        max_length: int | None = None,
        kernels: Kernels = "auto",
    ) -> "Decoder":
        """A quantized model on this machine's kernels, or on their eager twins (`kernels="reference"`)."""
        length, scheme = max_length or model.arch.max_positions, model.plan.kv
        cache: KVCache = FloatKVCache(model.arch, length, dtype)
        if scheme is not None:
            cache = QuantizedKVCache(model.arch, length, dtype, scheme, model.k_scale, model.v_scale)
        return cls(model.arch, model.tensors, model.linears, cache, dtype, kernels)

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def max_length(self) -> int:
        return self._cache.max_length

    @property
    def length(self) -> int:
        return self._length

    @property
    def cache(self) -> KVCache:
        return self._cache

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length}"
        self._length = length

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        x_TK = self.run_layers(F.embedding(tokens_T, self._embed_VK) * self.arch.embed_scale)
        if self.observer is None and last is not None:
            x_TK = x_TK[-last:]
        x_TK = self._normed(x_TK, self._norm)
        self._observe("lm_head", x_TK)
        return self._head(x_TK if last is None else x_TK[-last:]).float()

    @torch.inference_mode()
    def run_layers(self, x_TK: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` of the next T positions, from before the first layer to after the last one."""
        start, end = self._length, self._length + x_TK.shape[0]
        assert end <= self.max_length, f"{end} positions, cache holds {self.max_length}"
        rope = (self._cos[start:end], self._sin[start:end])
        mask_TL = _causal_mask(start, end, self.arch.sliding_window)
        for i, layer in enumerate(self._layers):
            x_TK = x_TK + self._attention(i, layer, self._normed(x_TK, layer.input_norm), start, rope, mask_TL)
            x_TK = x_TK + self._mlp(i, layer, self._normed(x_TK, layer.post_norm))
        self._length = end
        return x_TK

    def _attention(
        self, i: int, layer: _Layer, x_TK: Tensor, start: int, rope: tuple[Tensor, Tensor], mask_TL: Tensor | None
    ) -> Tensor:
        a, name, t = self.arch, f"model.layers.{i}.self_attn", x_TK.shape[0]
        self._observe(f"{name}.q_proj", x_TK)
        heads_HTD = layer.qkv(x_TK).view(t, -1, a.head_dim).transpose(0, 1)
        q, k, v = torch.split(heads_HTD, [a.n_heads, a.n_kv_heads, a.n_kv_heads])
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        self._observe(f"{name}.k", k)
        self._observe(f"{name}.v", v)
        k_HLD, v_HLD = self._cache.update(i, start, k, v)
        y_TK = _attend(q, k_HLD, v_HLD, start, mask_TL)
        self._observe(f"{name}.o_proj", y_TK)
        return layer.o(y_TK)

    def _mlp(self, i: int, layer: _Layer, x_TK: Tensor) -> Tensor:
        self._observe(f"model.layers.{i}.mlp.gate_proj", x_TK)
        gate, up = layer.gate_up(x_TK).chunk(2, -1)
        gate = F.silu(gate) if self.arch.activation == "silu" else F.gelu(gate, approximate="tanh")
        x_TF = gate * up
        self._observe(f"model.layers.{i}.mlp.down_proj", x_TF)
        return layer.down(x_TF)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return (x32 * scale * gain).to(self._dtype)

    def _observe(self, name: str, x: Tensor) -> None:
        if self.observer is not None:
            self.observer(name, x)


class _Weights:
    """Looks tensors up by name and turns them into callables."""

    def __init__(
        self,
        arch: ArchMap,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, QLinear],
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self.arch, self._tensors, self._linears, self._dtype, self._kernels = arch, tensors, linears, dtype, kernels

    def norm(self, name: str) -> Tensor:
        """RMSNorm gain in float32 with the architecture's offset added."""
        return self._tensors[f"{name}.weight"].float() + self.arch.norm_offset

    def linear(self, *names: str) -> Linear:
        members = [self._linears[n] if n in self._linears else self._tensors[f"{n}.weight"] for n in names]
        biases = [
            m.bias if isinstance(m, QLinear) else self._tensors.get(f"{n}.bias")
            for n, m in zip(names, members, strict=True)
        ]
        return merged_linear(members, biases, self._dtype, self._kernels)


def _layer(w: _Weights, i: int) -> _Layer:
    base = f"model.layers.{i}"
    attn, mlp, qk = f"{base}.self_attn", f"{base}.mlp", w.arch.qk_norm
    return _Layer(
        input_norm=w.norm(f"{base}.input_layernorm"),
        qkv=w.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        q_norm=w.norm(f"{attn}.q_norm") if qk else None,
        k_norm=w.norm(f"{attn}.k_norm") if qk else None,
        o=w.linear(f"{attn}.o_proj"),
        post_norm=w.norm(f"{base}.post_attention_layernorm"),
        gate_up=w.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=w.linear(f"{mlp}.down_proj"),
    )


def _attend(q_HTD: Tensor, k_HLD: Tensor, v_HLD: Tensor, start: int, mask_TL: Tensor | None) -> Tensor:
    """Causal attention of the last T positions over L = start + T, heads side by side `[T, H * D]`.

    A few rows on top of a cache are taken one by one, each over its own prefix: exactly what plain decoding computes,
    bit for bit, so that verifying K + 1 tokens decides as decoding them would (see `EXACT_ROWS`).
    """
    t, gqa = q_HTD.shape[1], q_HTD.shape[0] != k_HLD.shape[0]

    def sdpa(q: Tensor, end: int, mask: Tensor | None, is_causal: bool = False) -> Tensor:
        k, v = k_HLD[None, :, :end], v_HLD[None, :, :end]
        return F.scaled_dot_product_attention(q[None], k, v, mask, is_causal=is_causal, enable_gqa=gqa)[0]

    if start and t <= EXACT_ROWS:
        rows = [(start + i + 1, q_HTD[:, i : i + 1], None if mask_TL is None else mask_TL[i]) for i in range(t)]
        parts = [sdpa(q, end, None if mask is None else mask[None, :end]) for end, q, mask in rows]
        out_HTD = torch.cat(parts, 1) if t > 1 else parts[0]
    else:
        out_HTD = sdpa(q_HTD, start + t, mask_TL, is_causal=mask_TL is None and t > 1)
    return out_HTD.transpose(0, 1).reshape(t, -1)


def _rope_tables(arch: ArchMap, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, D]`, the half dimensions repeated as transformers lays them out."""
    angles = torch.outer(torch.arange(length).float(), torch.tensor(arch.rope_inv_freq, dtype=torch.float32))
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * arch.rope_factor).to(dtype), (angles.sin() * arch.rope_factor).to(dtype)


def _rotate(x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    left, right = x_HTD.chunk(2, -1)
    return x_HTD * cos_TD + torch.cat((-right, left), -1) * sin_TD


def _causal_mask(start: int, end: int, window: int | None) -> Tensor | None:
    """Boolean `[T, L]` mask, or None where each row sees its whole prefix and `_attend` needs none."""
    windowed = window is not None and end > window
    if not windowed and (start == 0 or end - start <= EXACT_ROWS):
        return None
    query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
    mask_TL = key <= query
    return mask_TL & (key > query - window) if windowed and window is not None else mask_TL
