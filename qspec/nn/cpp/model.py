"""A model as the C++ core needs it: whether it is served, its shape, its packed weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qspec.nn.cpp.interface import CShape
from qspec.nn.cpp.weights import Packed, linear_obstacle, member_form, pack_linears, pack_rows
from qspec.nn.eager.attention import rope_tables
from qspec.numerics.quantization.formats import FP8_E4M3, INT8
from qspec.plan import KVScheme
from qspec.records import EMBEDDING, ArchMap, LoadedModel, QLinear, QuantizedModel

_FLOAT_CACHE, _INT8_CACHE, _FP8_CACHE = range(3)
MOST_HEAD = 256
"""Head size that a thread has room for: `MOST_PANELS` of native/model.cpp."""


class WeightSource:
    """Looks a model's tensors up by name and packs them."""

    def __init__(self, model: LoadedModel | QuantizedModel) -> None:
        self.arch, self._model, self._tensors = model.arch, model, model.tensors
        self._linears: Mapping[str, QLinear] = model.linears if isinstance(model, QuantizedModel) else {}

    def layer(self, base: str) -> list[Packed]:
        """Weights of a decoder layer: q/k/v, o, the router of a mixture, then gate/up and down of each MLP."""
        attn, router = f"{base}.self_attn", self.arch.router(base)
        attention = [self.linear(*(f"{attn}.{x}_proj" for x in "qkv")), self.linear(f"{attn}.o_proj")]
        mlps = [packed for name in self.arch.mlps(base) for packed in self.mlp(name)]
        return [*attention, *([self.linear(router)] if router else []), *mlps]

    def ends(self) -> list[Packed]:
        """The head, and the embedding where it is not the head's own weight."""
        embedding_VK = self._tensors[EMBEDDING]
        if self.arch.tied and "lm_head" not in self._linears:
            return [pack_linears([embedding_VK], [None])]
        return [self.linear("lm_head"), pack_rows(embedding_VK)]

    def norms(self, base: str) -> list[Tensor | None]:
        """Norms of a decoder layer, as `CLayer` has them; None for those that the architecture lacks."""
        return [self.norm(f"{base}.{name}") if name else None for name in _norm_names(self.arch)]

    def norm(self, name: str) -> Tensor:
        """Gain in float32 with the architecture's offset added."""
        return (self._tensors[f"{name}.weight"].float() + self.arch.norm_offset).contiguous()

    def cache_scales(self, attn: str) -> tuple[Tensor | None, Tensor | None]:
        """Key and value scale of each KV head, for a cache with stored ones."""
        model = self._model
        if not isinstance(model, QuantizedModel) or model.plan.kv is None or not model.plan.kv.stored:
            return None, None
        heads, stored = self.arch.n_kv_heads, (model.k_scale, model.v_scale)
        k, v = (scales[attn].float().reshape(-1).expand(heads).contiguous() for scales in stored)
        return k, v

    def linear(self, *names: str, paired: bool = False) -> Packed:
        members = [self._linears[n] if n in self._linears else self._tensors[f"{n}.weight"] for n in names]
        biases = [
            m.bias if isinstance(m, QLinear) else self._tensors.get(f"{n}.bias")
            for n, m in zip(names, members, strict=True)
        ]
        return pack_linears(members, biases, paired)

    def mlp(self, name: str) -> tuple[Packed, Packed]:
        """gate and up as one, and down."""
        return self.linear(f"{name}.gate_proj", f"{name}.up_proj", paired=True), self.linear(f"{name}.down_proj")


def arch_obstacle(arch: ArchMap) -> str | None:
    """A part of an architecture that the C++ core has no code for; None if there is none."""
    reasons = {
        "a rotation in front of down_proj": arch.down_hadamard,
        f"head size {arch.head_dim}, no multiple of 8": arch.head_dim % 8 != 0,
        f"head size {arch.head_dim}, above {MOST_HEAD}": arch.head_dim > MOST_HEAD,
        "norms after a mixture of experts": arch.n_experts > 0 and arch.post_norms,
        "a piece of a model": not arch.has_head or arch.first_layer != 0,
    }
    return next((reason for reason, lacking in reasons.items() if lacking), None)


def _norm_names(arch: ArchMap) -> list[str | None]:
    """Norms of a decoder layer, as `CLayer` has them; None for those that the architecture lacks."""
    attention = ["self_attn.q_norm", "self_attn.k_norm"] if arch.qk_norm else [None, None]
    post = ["post_attention_layernorm", "post_feedforward_layernorm"] if arch.post_norms else [None, None]
    return ["input_layernorm", arch.mlp_norm, *attention, *post]


def quantized_obstacle(model: QuantizedModel) -> str | None:
    kv = model.plan.kv
    if kv is not None and (obstacle := _cache_obstacle(kv, bool(model.q_scale))):
        return obstacle
    for name, linear in model.linears.items():
        if obstacle := linear_obstacle(linear):
            return f"{name}: {obstacle}"
    for group in model.arch.fused_groups():
        members = [model.linears.get(name, model.tensors.get(f"{name}.weight")) for name in group]
        if len({member_form(m) for m in members if m is not None}) > 1:
            return f"{group[0]}: formats or input scales of merged layers differ"
    return None


def _cache_obstacle(kv: KVScheme, rounds_queries: bool) -> str | None:
    key, value = kv.parts
    simple = key == value and not key.outliers
    served = (key.fmt == INT8 and key.granularity == "token_head") or (key.fmt == FP8_E4M3 and key.stored)
    if simple and served and not kv.residual and not kv.skip_layers and not (kv.query and rounds_queries):
        return None
    return f"KV cache {kv.label}" + (", rounded queries" if kv.query else "")


def cache_kind(kv: KVScheme | None) -> int:
    if kv is None:
        return _FLOAT_CACHE
    return _FP8_CACHE if kv.stored else _INT8_CACHE


def ropes_of(arch: ArchMap, length: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin `[length, R / 2]`; the second table is for layers with a window of its own frequencies."""
    half = len(arch.rope_inv_freq)
    tables = [rope_tables(arch.rope_inv_freq, arch.rope_factor, length, torch.float32)]
    if arch.window_inv_freq:
        tables.append(rope_tables(arch.window_inv_freq, 1.0, length, torch.float32))
    return [(cos_LR[:, :half].contiguous(), sin_LR[:, :half].contiguous()) for cos_LR, sin_LR in tables]


def shape_of(arch: ArchMap, max_length: int, cache: int) -> CShape:
    return CShape(
        arch.n_layers,
        arch.hidden_size,
        arch.intermediate_size,
        arch.n_heads,
        arch.n_kv_heads,
        arch.head_dim,
        arch.vocab_size,
        max_length,
        2 * len(arch.rope_inv_freq),
        int(arch.activation == "gelu_tanh"),
        cache,
        2 if arch.window_inv_freq else 1,
        arch.n_experts,
        arch.experts_per_token,
        arch.expert_size,
        int(arch.normed_routing),
        0,
        arch.norm_eps,
        arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale,
        arch.embed_scale,
        arch.attention_softcap or 0.0,
        arch.logit_softcap or 0.0,
    )
