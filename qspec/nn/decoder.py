"""The decoder that runs here: Llama, Mistral, Mixtral, Qwen, Gemma and Phi, float or quantized, one sequence.

T tokens of a call, L positions in the cache, H heads, D head size, V vocabulary. Layers that read the same input
(q/k/v, gate/up) are merged into one matmul at load; names on disk stay apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.experts import Experts, Mlp
from qspec.nn.kv_cache import FloatKVCache, KVCache, QuantizedKVCache
from qspec.nn.linear import merged_linear
from qspec.numerics.rotation import hadamard_transform
from qspec.ops.select import Kernels, Linear
from qspec.records import ArchMap, LoadedModel, QLinear, QuantizedModel

Observer = Callable[[str, Tensor], None]
"""Called with a linear layer's name and its input `[T, K]`, and `….self_attn.q` / `.k` / `.v` with `[H, T, D]`."""

EMBEDDING = "model.embed_tokens.weight"
EXACT_ROWS = 65
"""Rows per pass up to which a quantized model computes each row as if alone (64 drafts and one).

Rounding to codes is a step function: a last-bit difference in attention can move an activation by a whole INT8 step,
and the next layers make that visible. Integer matmuls, norms and element-wise steps do not depend on the number of
rows; attention and the choice of experts do, so their rows are kept apart.
"""


@dataclass(frozen=True)
class _Layer:
    name: str
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp | Experts
    mlp_post_norm: Tensor | None
    window: int | None


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
        self._embed_VK = tensors[EMBEDDING].to(dtype) if EMBEDDING in tensors else None
        self._layers = [_layer(weights, layer) for layer in arch.layers]
        self._norm = weights.norm("model.norm") if arch.has_head else None
        self._head = self._own_head(weights, linears) if arch.has_head else None
        self._rope = _rope_tables(arch.rope_inv_freq, arch.rope_factor, cache.max_length, dtype)
        self._window_rope = self._rope
        if arch.window_inv_freq:
            self._window_rope = _rope_tables(arch.window_inv_freq, 1.0, cache.max_length, dtype)

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
            cache = QuantizedKVCache(model.arch, length, dtype, scheme, model.k_scale, model.v_scale, model.q_scale)
        return cls(model.arch, model.tensors, model.linears, cache, dtype, kernels)

    def _own_head(self, weights: "_Weights", linears: Mapping[str, QLinear]) -> Linear:
        if self.arch.tied and "lm_head" not in linears:
            assert self._embed_VK is not None, "a tied head is the embedding"
            return merged_linear([self._embed_VK], [None], self._dtype)
        return weights.linear("lm_head")

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
        self._cache.truncate(length)
        self._length = length

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        x_TK = self.run_layers(self.embed(tokens_T))
        return self.run_head(x_TK, last)

    @torch.inference_mode()
    def embed(self, tokens_T: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` before the first layer."""
        assert self._embed_VK is not None, "this piece of a model holds no embedding"
        return F.embedding(tokens_T, self._embed_VK) * self.arch.embed_scale

    @torch.inference_mode()
    def run_head(self, x_TK: Tensor, last: int | None = None) -> Tensor:
        """Float32 logits `[last or T, V]` of hidden states after the last layer."""
        assert self._head is not None, "this piece of a model holds no head"
        assert self._norm is not None
        if self.observer is None and last is not None:
            x_TK = x_TK[-last:]
        x_TK = self._normed(x_TK, self._norm)
        self._observe("lm_head", x_TK)
        logits_TV = self._head(x_TK if last is None else x_TK[-last:]).float()
        cap = self.arch.logit_softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    @torch.inference_mode()
    def run_layers(self, x_TK: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` of the next T positions, from before the first layer to after the last one."""
        end = self._length + x_TK.shape[0]
        assert end <= self.max_length, f"{end} positions, cache holds {self.max_length}"
        segments = self._cache.segments(self._length, end)
        if len(segments) < 2:
            return self._run_segment(x_TK)
        return torch.cat([self._run_segment(part) for part in x_TK.split(segments)])

    def _run_segment(self, x_TK: Tensor) -> Tensor:
        start, end = self._length, self._length + x_TK.shape[0]
        masks = {window: _causal_mask(start, end, window) for window in {layer.window for layer in self._layers}}
        for i, layer in enumerate(self._layers):
            cos_LD, sin_LD = self._rope if layer.window is None else self._window_rope
            rope, mask_TL = (cos_LD[start:end], sin_LD[start:end]), masks[layer.window]
            y_TK = self._attention(i, layer, self._normed(x_TK, layer.input_norm), start, rope, mask_TL)
            x_TK = x_TK + self._post_normed(y_TK, layer.attention_post_norm)
            y_TK = self._feed_forward(layer.mlp, self._normed(x_TK, layer.mlp_norm))
            x_TK = x_TK + self._post_normed(y_TK, layer.mlp_post_norm)
        self._length = end
        return x_TK

    def _attention(
        self, i: int, layer: _Layer, x_TK: Tensor, start: int, rope: tuple[Tensor, Tensor], mask_TL: Tensor | None
    ) -> Tensor:
        a, name, t = self.arch, f"{layer.name}.self_attn", x_TK.shape[0]
        self._observe(f"{name}.q_proj", x_TK)
        heads_HTD = layer.qkv(x_TK).view(t, -1, a.head_dim).transpose(0, 1)
        q, k, v = torch.split(heads_HTD, [a.n_heads, a.n_kv_heads, a.n_kv_heads])
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        self._observe(f"{name}.q", q)
        self._observe(f"{name}.k", k)
        self._observe(f"{name}.v", v)
        q = self._cache.round_query(i, q)
        k_HLD, v_HLD = self._cache.update(i, start, k, v)
        scores = partial(_scores, scale=a.attention_scale, softcap=a.attention_softcap)
        y_TK = _attend(scores, q, k_HLD, v_HLD, start, mask_TL, layer.window)
        self._observe(f"{name}.o_proj", y_TK)
        return layer.o(y_TK)

    def _feed_forward(self, mlp: Mlp | Experts, x_TK: Tensor) -> Tensor:
        if isinstance(mlp, Mlp):
            return self._mlp(mlp, x_TK)
        self._observe(mlp.router, x_TK)
        if self.observer is not None or x_TK.shape[0] > EXACT_ROWS:
            return mlp.mix(x_TK, self._mlp)
        return torch.cat([mlp.mix(row_1K, self._mlp) for row_1K in x_TK.split(1)])

    def _mlp(self, mlp: Mlp, x_TK: Tensor) -> Tensor:
        self._observe(f"{mlp.name}.gate_proj", x_TK)
        gate, up = mlp.gate_up(x_TK).chunk(2, -1)
        gate = F.silu(gate) if self.arch.activation == "silu" else F.gelu(gate, approximate="tanh")
        x_TF = gate * up
        if self.arch.down_hadamard:
            x_TF = hadamard_transform(x_TF)
        self._observe(f"{mlp.name}.down_proj", x_TF)
        return mlp.down(x_TF)

    def _post_normed(self, x_TK: Tensor, gain: Tensor | None) -> Tensor:
        return x_TK if gain is None else self._normed(x_TK, gain)

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

    def kept(self, name: str) -> Tensor:
        """A weight that is never quantized, in the compute dtype."""
        return self._tensors[f"{name}.weight"].to(self._dtype)

    def linear(self, *names: str) -> Linear:
        members = [self._linears[n] if n in self._linears else self._tensors[f"{n}.weight"] for n in names]
        biases = [
            m.bias if isinstance(m, QLinear) else self._tensors.get(f"{n}.bias")
            for n, m in zip(names, members, strict=True)
        ]
        return merged_linear(members, biases, self._dtype, self._kernels)


def _layer(w: _Weights, base: str) -> _Layer:
    a, attn = w.arch, f"{base}.self_attn"
    return _Layer(
        name=base,
        input_norm=w.norm(f"{base}.input_layernorm"),
        qkv=w.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        q_norm=w.norm(f"{attn}.q_norm") if a.qk_norm else None,
        k_norm=w.norm(f"{attn}.k_norm") if a.qk_norm else None,
        o=w.linear(f"{attn}.o_proj"),
        attention_post_norm=w.norm(f"{base}.post_attention_layernorm") if a.post_norms else None,
        mlp_norm=w.norm(f"{base}.{a.mlp_norm}"),
        mlp=_feed_forward(w, base),
        mlp_post_norm=w.norm(f"{base}.post_feedforward_layernorm") if a.post_norms else None,
        window=a.window(base),
    )


def _feed_forward(w: _Weights, layer: str) -> Mlp | Experts:
    members = [
        Mlp(name, w.linear(f"{name}.gate_proj", f"{name}.up_proj"), w.linear(f"{name}.down_proj"))
        for name in w.arch.mlps(layer)
    ]
    router = w.arch.router(layer)
    if router is None:
        return members[0]
    return Experts(router, w.kept(router), tuple(members), w.arch.experts_per_token, w.arch.normed_routing)


Scores = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def _attend(
    scores: Scores,
    q_HTD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    start: int,
    mask_TL: Tensor | None,
    window: int | None,
) -> Tensor:
    """Causal attention of the last T positions over L = start + T, heads side by side `[T, H * D]`.

    A few rows on top of a cache are taken one by one, each over what it sees: exactly what plain decoding computes,
    bit for bit, so that verifying K + 1 tokens decides as decoding them would (see `EXACT_ROWS`).
    """
    t = q_HTD.shape[1]
    if start and t <= EXACT_ROWS:
        spans = [(max(0, end - window) if window else 0, end) for end in range(start + 1, start + t + 1)]
        rows = zip(q_HTD.split(1, 1), spans, strict=True)
        parts = [scores(q, k_HLD[:, begin:end], v_HLD[:, begin:end], None, False) for q, (begin, end) in rows]
        out_HTD = torch.cat(parts, 1) if t > 1 else parts[0]
    else:
        out_HTD = scores(q_HTD, k_HLD, v_HLD, mask_TL, mask_TL is None and t > 1)
    return out_HTD.transpose(0, 1).reshape(t, -1)


def _scores(
    q_HTD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    mask_TL: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Softmax attention `[H, T, D]`; torch's kernel knows no soft-capping, so that is written out."""
    gqa = q_HTD.shape[0] != k_HLD.shape[0]
    if softcap is None:
        q, k, v = q_HTD[None], k_HLD[None], v_HLD[None]
        return F.scaled_dot_product_attention(q, k, v, mask_TL, is_causal=is_causal, scale=scale, enable_gqa=gqa)[0]
    repeats = q_HTD.shape[0] // k_HLD.shape[0]
    k_HLD, v_HLD = k_HLD.repeat_interleave(repeats, 0), v_HLD.repeat_interleave(repeats, 0)
    s_HTL = q_HTD @ k_HLD.transpose(1, 2) * (q_HTD.shape[2] ** -0.5 if scale is None else scale)
    s_HTL = softcap * torch.tanh(s_HTL / softcap)
    if is_causal:
        mask_TL = torch.ones(s_HTL.shape[1:], dtype=torch.bool).tril()
    if mask_TL is not None:
        s_HTL = s_HTL.masked_fill(~mask_TL, float("-inf"))
    return s_HTL.float().softmax(-1).to(q_HTD.dtype) @ v_HLD


def _rope_tables(inv_freq: tuple[float, ...], factor: float, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, R]` of the R rotated dimensions, the halves repeated as transformers lays them out."""
    angles = torch.outer(torch.arange(length).float(), torch.tensor(inv_freq, dtype=torch.float32))
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _rotate(x_HTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head; the others pass."""
    width = cos_TR.shape[-1]
    left, right = x_HTD[..., :width].chunk(2, -1)
    rotated = x_HTD[..., :width] * cos_TR + torch.cat((-right, left), -1) * sin_TR
    return rotated if width == x_HTD.shape[-1] else torch.cat((rotated, x_HTD[..., width:]), -1)


def _causal_mask(start: int, end: int, window: int | None) -> Tensor | None:
    """Boolean `[T, L]` mask, or None where `_attend` needs none: rows on their own, or each over its whole prefix."""
    windowed = window is not None and end > window
    if (start and end - start <= EXACT_ROWS) or (start == 0 and not windowed):
        return None
    query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
    mask_TL = key <= query
    return mask_TL & (key > query - window) if windowed and window is not None else mask_TL
