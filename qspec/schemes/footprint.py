"""Bytes of one half of a pair: weights by scheme, embeddings, KV cache, and what a decoding step reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
import math

import torch

from qspec.bridges.layout import tensor_shapes
from qspec.memory import Need
from qspec.models.load import source_dtype
from qspec.nn.eager.kv_window import window_length
from qspec.nn.eagle3 import Eagle3Shape
from qspec.numerics.quantization.blocks import scale_shape
from qspec.numerics.quantization.kv_blocks import BlockCode, outlier_count
from qspec.numerics.quantization.outliers import stored_bytes
from qspec.numerics.roofline import PassCost
from qspec.plan import KVPart, KVScheme, LayerScheme
from qspec.records import EMBEDDING, ArchMap, LoadedModel, QuantizedModel, layer_number
from qspec.schema.drafts import MlpDraft
from qspec.schemes.build import scheme_label

SCALE_BYTES = 4
"""Scales are stored as float32."""
OUTLIER_BYTES = 4
"""A KV outlier: float16 and an int16 index."""


@dataclass(frozen=True)
class Group:
    """Linear layers of one scheme: names, weights, and bytes (codes, scales, outliers)."""

    layers: tuple[str, ...]
    parameters: int
    bytes: int

    @property
    def bits(self) -> float:
        """Mean bits of a weight."""
        return 8 * self.bytes / self.parameters


@dataclass(frozen=True)
class Footprint:
    """Bytes of one half. `resident`: all weights; `cost`: of a decoding pass, where an embedding row is free.

    A token reads `experts_per_token` of its layer's experts.
    """

    groups: Mapping[str, Group]
    embedding_bytes: int
    other_bytes: int
    parameters: int
    cost: PassCost

    @property
    def resident(self) -> int:
        return sum(group.bytes for group in self.groups.values()) + self.embedding_bytes + self.other_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return int(self.cost.kv_bytes)

    @property
    def head_share(self) -> float:
        """Share of `lm_head` in the bytes that a step reads, 0 if it is quantized."""
        group = self.groups.get("none")
        return group.bytes / self.cost.weight_bytes if group and group.layers == ("lm_head",) else 0.0


def footprint(
    arch: ArchMap, schemes: Mapping[str, LayerScheme | None], kv: KVScheme | None, width: int, head_rows: int = 0
) -> Footprint:
    """Footprint of a decoder under resolved schemes; what is not quantized takes `width` bytes a value.

    head_rows: ids that its head is run for, in memory and in a step; 0: all.
    """
    members: dict[str, list[str]] = {}
    for layer, scheme in schemes.items():
        members.setdefault(scheme_label(scheme), []).append(layer)
    groups = {label: _group(arch, schemes, layers, width, head_rows) for label, layers in members.items()}
    embedding = arch.vocab_size * arch.hidden_size
    shared_head = arch.tied and schemes["lm_head"] is None and not head_rows
    linear_bytes = sum(group.bytes for group in groups.values())
    linear_parameters = sum(group.parameters for group in groups.values())
    experts = _group(arch, schemes, [layer for layer in schemes if ".experts." in layer], width)
    share = arch.experts_per_token / arch.n_experts if arch.n_experts else 0.0
    other = _small_tensors(arch)
    return Footprint(
        groups=groups,
        embedding_bytes=0 if shared_head else embedding * width,
        other_bytes=other * width,
        parameters=linear_parameters + other + (0 if arch.tied and not head_rows else embedding),
        cost=PassCost(
            weight_bytes=linear_bytes + other * width - round((1 - share) * experts.bytes),
            kv_bytes=kv_bytes_per_token(arch, kv, width),
            ops=2 * (linear_parameters - round((1 - share) * experts.parameters)),
            attention_ops=4 * arch.n_layers * arch.n_heads * arch.head_dim,
            expert_bytes=experts.bytes,
            expert_share=share,
        ),
    )


def decoder_need(model: LoadedModel | QuantizedModel, length: int | None, dtype: torch.dtype | None = None) -> Need:
    """Memory that a decoder on a CPU takes at least: weights, rotations, room for KV of `length` tokens (None: all).

    dtype: of what is computed, None for float32, in which the C++ core keeps floats as they are stored.
    """
    arch, names, kv = model.arch, model.arch.linears(), None
    schemes: Mapping[str, LayerScheme | None] = dict.fromkeys(names)
    if isinstance(model, QuantizedModel):
        kv, schemes = model.plan.kv, model.plan.resolve(names)
    stored = source_dtype(model.config) if dtype in (None, torch.float32) else dtype
    positions, single = length or arch.max_positions, torch.float32.itemsize
    weights = footprint(arch, schemes, kv, stored.itemsize).resident
    rotations = 2 * single * (len(arch.rope_inv_freq) + len(arch.window_inv_freq)) * positions
    return Need(weights + rotations, kv_bytes_per_token(arch, kv, single) * positions)


def kv_bytes_per_token(arch: ArchMap, kv: KVScheme | None, width: int) -> int:
    """Bytes of K and V of all layers for one token, with what is stored beside codes; rounded up to a whole byte."""
    plain = 2 * arch.n_kv_heads * arch.head_dim * width
    if kv is None:
        return arch.n_layers * plain
    kept = sum(kv.skips(layer_number(layer)) for layer in arch.layers)
    codes = arch.n_kv_heads * sum(_part_bytes(part, arch.head_dim) for part in kv.parts)
    return math.ceil(kept * plain + (arch.n_layers - kept) * codes)


def kv_window_bytes(arch: ArchMap, kv: KVScheme | None, width: int, max_length: int) -> int:
    """Bytes of the newest tokens that a sequence holds in float, whatever its length; 0 without a window."""
    if kv is None:
        return 0
    layers = sum(not kv.skips(layer_number(layer)) for layer in arch.layers)
    return layers * 2 * arch.n_kv_heads * arch.head_dim * width * window_length(kv, max_length)


def _part_bytes(part: KVPart, dim: int) -> Fraction:
    """Bytes of keys, or values, of one head and token."""
    by_channel = part.granularity == "channel"
    tokens = part.group if by_channel else 1
    size = tokens * dim
    count, dtype = BlockCode(part.fmt, by_channel).scales
    scales = 0 if part.stored else count * dtype.itemsize * (dim if by_channel else 1)
    outliers = outlier_count(part.outliers, size) * OUTLIER_BYTES
    return Fraction(size * part.fmt.bits, 8 * tokens) + Fraction(scales + outliers, tokens)


def mlp_footprint(draft: MlpDraft, arch: ArchMap, width: int) -> Footprint:
    """Footprint of an MLP speculator in INT8, embeddings in float; `cost` is that of one drafted token (one head).

    Layout: fms-extras. What a head shares with its target are INT8 rows of its own, and rows that are there anyway.
    """
    inner, hidden = draft.inner_dim or arch.hidden_size, arch.hidden_size
    heads = 1 if draft.tie_weights else draft.n_predict
    later = min(1, draft.n_predict - 1) if draft.tie_weights else draft.n_predict - 1
    projection = hidden * inner + later * inner * inner
    drafted = draft.draft_vocab or arch.vocab_size
    rows = drafted * hidden if draft.shared else 0
    table, out = (hidden * inner,) * 2 if draft.shared else (arch.vocab_size * inner, drafted * inner)
    layers = (*(f"head.{i}" for i in range(heads)), *(f"proj.{i}" for i in range(draft.n_predict)))
    linear = projection + heads * (out + table if draft.shared else out) + rows
    norms = heads * 2 * inner
    step = projection / draft.n_predict + out + (table + rows if draft.shared else 0)
    return Footprint(
        {"W8A8": Group(layers, linear, linear)},
        embedding_bytes=0 if draft.shared else heads * table * width,
        other_bytes=norms * width,
        parameters=heads * (table + out) + projection + norms,
        cost=PassCost(step, 0, 2 * step, 0),
    )


def eagle3_footprint(shape: Eagle3Shape, width: int) -> Footprint:
    """Footprint of an EAGLE-3 head in INT8, an embedding of its own in float; `cost` is that of one drafted token.

    The fusion of the target's states is read once a proposal, and not counted there. KV is kept in float32.
    """
    queries, keys, size = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim, shape.hidden_size
    layer = (queries + 2 * keys) * size + queries * size + 3 * size * shape.intermediate_size
    step = shape.n_layers * layer + (queries + 2 * keys) * size + shape.drafted * size
    fusion, norms = shape.states * size, (2 + 2 * shape.n_layers) * size
    table = shape.vocab_size * size if shape.own_embedding else 0
    layers = ("fc", *(f"layers.{i}" for i in range(shape.n_layers)), "lm_head")
    kv = 2 * shape.n_layers * keys * torch.float32.itemsize
    return Footprint(
        {"W8A8": Group(layers, step + fusion, step + fusion)},
        embedding_bytes=table * width,
        other_bytes=norms * width,
        parameters=step + fusion + norms + table,
        cost=PassCost(step, kv, 2 * step, 4 * shape.n_layers * queries),
    )


def weight_bytes(shape: tuple[int, int], scheme: LayerScheme | None, width: int) -> int:
    """Bytes of one weight matrix: codes, float32 scales, and what is kept apart with its indices."""
    if scheme is None:
        return shape[0] * shape[1] * width
    codes = shape[0] * -(-shape[1] * scheme.weight.fmt.bits // 8)
    scales = math.prod(scale_shape(shape, scheme.weight.granularity)) * SCALE_BYTES
    return codes + scales + stored_bytes(shape, scheme.outliers)


def _group(
    arch: ArchMap, schemes: Mapping[str, LayerScheme | None], layers: list[str], width: int, head_rows: int = 0
) -> Group:
    shapes = {layer: arch.linear_shape(layer) for layer in layers}
    if head_rows and "lm_head" in shapes:
        shapes["lm_head"] = head_rows, arch.hidden_size
    return Group(
        tuple(layers),
        sum(n * k for n, k in shapes.values()),
        sum(weight_bytes(shape, schemes[layer], width) for layer, shape in shapes.items()),
    )


def _small_tensors(arch: ArchMap) -> int:
    """Elements of norms and biases."""
    large = {EMBEDDING, *(f"{layer}.weight" for layer in arch.linears())}
    return sum(math.prod(shape) for name, shape in tensor_shapes(arch).items() if name not in large)
