"""The values that the main job passes down: each is made once, by one stage, and read by the later ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from qspec.numerics.affine import QTensor
from qspec.plan import QuantPlan, TensorScheme

LAYER_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
FUSED_GROUPS = (LAYER_LINEARS[0:3], LAYER_LINEARS[4:6])
"""Layers that a runtime merges into one matmul: one scheme and, per tensor, one scale for all members."""


@dataclass(frozen=True)
class ArchMap:
    """Shape and switches of a decoder-only transformer of the Llama / Mistral / Qwen2 / Qwen3 / Gemma kind.

    Tensor names are those of transformers (`model.layers.0.self_attn.q_proj.weight`). `rope_inv_freq` has
    `head_dim / 2` entries and is already scaled (llama3, linear, …); `rope_factor` multiplies cos and sin.
    """

    model_type: str
    architecture: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_inv_freq: tuple[float, ...]
    rope_factor: float = 1.0
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # Gemma multiplies by (1 + weight)
    embed_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()

    def linears(self) -> list[str]:
        """Names of all linear layers, `lm_head` last, in forward order."""
        body = [f"model.layers.{i}.{part}" for i in range(self.n_layers) for part in LAYER_LINEARS]
        return [*body, "lm_head"]

    def fused_groups(self) -> list[tuple[str, ...]]:
        """`FUSED_GROUPS` of every layer, by full names."""
        layers = [f"model.layers.{i}" for i in range(self.n_layers)]
        return [tuple(f"{layer}.{part}" for part in group) for layer in layers for group in FUSED_GROUPS]

    def linear_shape(self, name: str) -> tuple[int, int]:
        """`(out, in)` of a linear layer's weight."""
        h, f = self.hidden_size, self.intermediate_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, q),
            "gate_proj": (f, h),
            "up_proj": (f, h),
            "down_proj": (h, f),
            "lm_head": (self.vocab_size, h),
        }[name.rpartition(".")[2]]


class Tokenizer(Protocol):
    """The part of a tokenizer that qspec uses; `bridges.hf` provides it."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds BOS as the model is served."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens dropped."""

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation through the chat template, with the generation prompt."""

    def fingerprint(self) -> str:
        """sha256 over ids, merges, special and added tokens and the chat template."""

    def vocabulary(self) -> dict[str, int]:
        """Id of every token, added ones included."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer files into `folder`."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory (or memory-mapped): never mutated; `transform` returns a new one.

    `tensors` holds float tensors by transformers' name (without `lm_head.weight` when tied); `config` is the
    `config.json` to write back; `source` says where it came from: {"model", "revision", "sha256"}.
    """

    arch: ArchMap
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    source: Mapping[str, str]

    def lm_head(self) -> Tensor:
        return self.tensors["model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"]


@dataclass(frozen=True)
class LayerStats:
    """What calibration saw, by linear layer name (and by layer for K/V).

    amax_K: per input channel, `[in]`; inputs_TK: a sample of inputs (rows), `[rows, in]`;
    k_amax_H / v_amax_H: per KV head `[n_kv_heads]`, keyed `model.layers.N.self_attn`; tokens: how many were seen.
    """

    amax_K: Mapping[str, Tensor]
    inputs_TK: Mapping[str, Tensor]
    k_amax_H: Mapping[str, Tensor]
    v_amax_H: Mapping[str, Tensor]
    tokens: int


@dataclass(frozen=True)
class QLinear:
    """One quantized linear layer. `input_scale` is `[1]` float32 for static activation schemes, else None."""

    weight: QTensor
    activation: TensorScheme | None
    input_scale: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class FusionPlan:
    """What the runtime merges into one matmul, and which norm gains were folded; exported names stay as they are."""

    merged: tuple[tuple[str, ...], ...] = ()
    folded_norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizedModel:
    """A model whose listed linears are quantized; everything else stays in `tensors`.

    `k_scale` / `v_scale`: by `model.layers.N.self_attn`, `[1]` (tensor) or `[n_kv_heads]` (head), float32; empty
    unless `plan.kv` is static. `notes` are sentences for the report (fall-backs, choices with their numbers).
    """

    arch: ArchMap
    tensors: Mapping[str, Tensor]
    linears: Mapping[str, QLinear]
    plan: QuantPlan
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    source: Mapping[str, str]
    k_scale: Mapping[str, Tensor] = field(default_factory=dict)
    v_scale: Mapping[str, Tensor] = field(default_factory=dict)
    fusion: FusionPlan = field(default_factory=FusionPlan)
    notes: tuple[str, ...] = ()
