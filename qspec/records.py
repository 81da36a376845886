"""The values that the main job passes down: each is made once, by one stage, and read by the later ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
import re
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.plan import QuantPlan, TensorScheme

V = TypeVar("V")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Linear layers of a decoder layer with one MLP; experts have the same three parts each."""
FUSED_GROUPS = (LAYER_LINEARS[0:3], LAYER_LINEARS[4:6])
"""Layers that a runtime merges into one matmul: one scheme and, per tensor, one scale for all members."""

_MATES = [[part.rpartition(".")[2] for part in group] for group in FUSED_GROUPS]
_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.|$)")


def fused_with(layer: str) -> tuple[str, ...]:
    """All members of the layer's fused group by full names, in order; empty for a layer that is in none."""
    block, _, part = layer.rpartition(".")
    return next((tuple(f"{block}.{mate}" for mate in mates) for mates in _MATES if part in mates), ())


def layer_number(name: str) -> int:
    """Number of the decoder layer that `name` belongs to; -1 for what lies outside of the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class ArchMap:
    """Shape and switches of a decoder-only transformer of the Llama / Mistral / Qwen / Gemma / Phi kind.

    Tensor names are those of transformers (`model.layers.0.self_attn.q_proj.weight`), one per linear layer even where
    a checkpoint stores several as one, and `model.layers.0.mlp.experts.0.gate_proj.weight` for all mixtures.
    `rope_inv_freq` has an entry per two rotated dimensions of a head (the first ones) and is already scaled (llama3,
    linear, …); `rope_factor` multiplies cos and sin. Layer numbers are those of the whole model.
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
    full_attention: tuple[int, ...] = ()  # layers that the window does not bind
    window_inv_freq: tuple[float, ...] = ()  # Gemma 3: rotary frequencies, unscaled, of the layers that it binds
    post_norms: bool = False  # Gemma 2 and 3 norm what attention and the MLP add, too
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap)
    logit_softcap: float | None = None
    n_experts: int = 0  # 0: no mixture of experts
    experts_per_token: int = 0
    expert_size: int = 0
    normed_routing: bool = False  # the weights of a token's experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers of a mixture that have one MLP all the same
    eos_ids: tuple[int, ...] = ()
    first_layer: int = 0  # number of the first layer, where this is a piece of a model
    has_head: bool = True  # a piece may lack it
    down_hadamard: bool = False  # the input of `down_proj` goes through `hadamard_transform` first

    @property
    def layers(self) -> list[str]:
        """Names of the decoder layers (`model.layers.0`), in order."""
        return [f"model.layers.{i}" for i in range(self.first_layer, self.first_layer + self.n_layers)]

    @property
    def mlp_norm(self) -> str:
        """Last part of the name of the norm that feeds the MLP."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    def window(self, layer: str) -> int | None:
        """Positions that a decoder layer attends to; None: all."""
        return None if layer_number(layer) in self.full_attention else self.sliding_window

    def router(self, layer: str) -> str | None:
        """Name of what chooses a decoder layer's experts, which is never quantized; None for a layer without."""
        mixture = self.n_experts and layer_number(layer) not in self.dense_layers
        return f"{layer}.mlp.gate" if mixture else None

    def routers(self) -> list[str]:
        """Routers of all layers that have one."""
        return [router for layer in self.layers if (router := self.router(layer))]

    def mlps(self, layer: str) -> list[str]:
        """Names of a decoder layer's MLPs: one, or one per expert."""
        if self.router(layer) is None:
            return [f"{layer}.mlp"]
        return [f"{layer}.mlp.experts.{i}" for i in range(self.n_experts)]

    def layer_linears(self, layer: str) -> list[str]:
        """Names of a decoder layer's linear layers, in forward order."""
        attention = [f"{layer}.{part}" for part in LAYER_LINEARS[:4]]
        return attention + [
            f"{mlp}{part.removeprefix('mlp')}" for mlp in self.mlps(layer) for part in LAYER_LINEARS[4:]
        ]

    def keep(self, layers: Sequence[int]) -> "ArchMap":
        """The model with some of its layers only, numbered anew."""
        full, dense = (
            tuple(new for new, old in enumerate(layers) if old in numbers)
            for numbers in (self.full_attention, self.dense_layers)
        )
        kept = replace(self, n_layers=len(layers), full_attention=full, dense_layers=dense)
        unbound = len(full) == len(layers)  # no layer is left that a window binds
        return replace(kept, sliding_window=None, full_attention=(), window_inv_freq=()) if unbound else kept

    def linears(self) -> list[str]:
        """Names of all linear layers that can be quantized, `lm_head` last, in forward order."""
        body = [name for layer in self.layers for name in self.layer_linears(layer)]
        return [*body, "lm_head"] if self.has_head else body

    def fused_groups(self) -> list[tuple[str, ...]]:
        """`FUSED_GROUPS` of every layer, by full names."""
        return list(dict.fromkeys(group for name in self.linears() if (group := fused_with(name))))

    def one_scheme_groups(self) -> list[tuple[str, ...]]:
        """Layers that a runtime runs in one kernel, and so under one scheme: fused groups, all experts of a layer."""
        mixtures = [self.mlps(layer) for layer in self.layers if self.router(layer)]
        parts = [part.rpartition(".")[2] for part in LAYER_LINEARS[4:]]
        experts = [tuple(f"{mlp}.{part}" for mlp in mlps for part in parts) for mlps in mixtures]
        return [*(group for group in self.fused_groups() if ".experts." not in group[0]), *experts]

    def linear_shape(self, name: str) -> tuple[int, int]:
        """`(out, in)` of a linear layer's weight."""
        h, f = self.hidden_size, self.expert_size if ".experts." in name else self.intermediate_size
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


class View(Mapping[str, V]):
    """Items by name, each read when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], V]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> V:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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

    def parts(self) -> dict[str, Any]:
        """Parts that `fingerprint` covers, by name and comparable: vocabulary, merges, chat template, …"""

    def vocabulary(self) -> dict[str, int]:
        """Id of every token, added ones included."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer files into `folder`."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory (or memory-mapped): never mutated; `transform` returns a new one.

    `tensors` holds float tensors by transformers' name (without `lm_head.weight` when tied); `config` is the
    `config.json` to write back; `source` says where it came from: {"model", "revision", "sha256"}. `files` are copied
    beside its weights, by the names of the copies; `left_out` are reasons for other files of the source.
    """

    arch: ArchMap
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    source: Mapping[str, str]
    files: Mapping[str, Path] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def lm_head(self) -> Tensor:
        return self.tensors[EMBEDDING if self.arch.tied else HEAD]


@dataclass(frozen=True)
class LayerStats:
    """Statistics of calibration, by name of a linear layer (and by layer for K/V).

    amax_K: per input channel, `[in]`; inputs_TK: a sample of inputs (rows), `[rows, in]`;
    k_amax_H / v_amax_H: per KV head `[n_kv_heads]`, keyed `model.layers.N.self_attn`; q_amax_H: per head; tokens: how
    many were seen.
    """

    amax_K: Mapping[str, Tensor]
    inputs_TK: Mapping[str, Tensor]
    k_amax_H: Mapping[str, Tensor]
    v_amax_H: Mapping[str, Tensor]
    tokens: int
    q_amax_H: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class QLinear:
    """One quantized linear layer. `input_scale` is `[1]` float32 for static activation schemes, else None.

    outliers: weights kept apart in float; `weight` is rounded from 0 in their places. They read unrounded inputs.
    """

    weight: QTensor
    activation: TensorScheme | None
    input_scale: Tensor | None
    bias: Tensor | None
    outliers: SparseMatrix | None = None

    def rounded_part(self, w_NK: Tensor) -> Tensor:
        """The part of a float weight that `weight` stands for: all but the outliers."""
        return w_NK if self.outliers is None else w_NK.float() - self.outliers.dense()


@dataclass(frozen=True)
class QuantizedModel:
    """A model whose listed linears are quantized; everything else stays in `tensors`.

    `k_scale` / `v_scale`: by `model.layers.N.self_attn`, `[1]` (tensor) or `[n_kv_heads]` (head), float32; empty
    unless `plan.kv` is static. `q_scale`: of queries that are rounded, `[1]` or `[n_heads]`. `notes` are sentences for
    the report (fall-backs, choices with their numbers). `head_ids`: of a draft, the ids that its head is run for,
    rising `[D]`; None: all. The head is stored whole, decoders take its rows (`nn.eager.linear`). `files` are
    copied beside its weights, by the names of the copies.
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
    notes: tuple[str, ...] = ()
    q_scale: Mapping[str, Tensor] = field(default_factory=dict)
    head_ids: Tensor | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
