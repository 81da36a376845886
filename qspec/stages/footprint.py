"""Bytes of one half of a pair: weights by scheme, embeddings, KV cache, and what a decoding step reads."""

from collections.abc import Mapping
from dataclasses import dataclass
import math

from qspec.bridges.layout import EMBEDDING, tensor_shapes
from qspec.numerics.blocks import scale_shape
from qspec.numerics.roofline import PassCost
from qspec.plan import KVScheme, LayerScheme
from qspec.records import ArchMap
from qspec.schema.recipe import MlpDraft
from qspec.stages.build_plan import scheme_label

SCALE_BYTES = 4
"""Scales are stored as float32."""


@dataclass(frozen=True)
class Group:
    """Linear layers of one scheme: names, weights, and bytes (codes and scales)."""

    layers: tuple[str, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of one half. `resident`: all weights; `cost`: of a decoding pass, where an embedding row is free."""

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


def footprint(arch: ArchMap, schemes: Mapping[str, LayerScheme | None], kv: KVScheme | None, width: int) -> Footprint:
    """Footprint of a decoder under resolved schemes; what is not quantized takes `width` bytes a value."""
    members: dict[str, list[str]] = {}
    for layer, scheme in schemes.items():
        members.setdefault(scheme_label(scheme), []).append(layer)
    groups = {label: _group(arch, schemes, layers, width) for label, layers in members.items()}
    embedding = arch.vocab_size * arch.hidden_size
    shared_head = arch.tied and schemes["lm_head"] is None
    linear_bytes = sum(group.bytes for group in groups.values())
    linear_parameters = sum(group.parameters for group in groups.values())
    other = _small_tensors(arch)
    return Footprint(
        groups=groups,
        embedding_bytes=0 if shared_head else embedding * width,
        other_bytes=other * width,
        parameters=linear_parameters + other + (0 if arch.tied else embedding),
        cost=PassCost(
            weight_bytes=linear_bytes + other * width,
            kv_bytes=kv_bytes_per_token(arch, kv, width),
            ops=2 * linear_parameters,
            attention_ops=4 * arch.n_layers * arch.n_heads * arch.head_dim,
        ),
    )


def kv_bytes_per_token(arch: ArchMap, kv: KVScheme | None, width: int) -> int:
    """Bytes of K and V of all layers for one token; per-token-head scales are stored beside them."""
    heads = 2 * arch.n_layers * arch.n_kv_heads
    scales = heads * SCALE_BYTES if kv is not None and not kv.stored else 0
    return heads * arch.head_dim * (kv.fmt.bits // 8 if kv is not None else width) + scales


def mlp_footprint(draft: MlpDraft, arch: ArchMap, width: int) -> Footprint:
    """Footprint of an MLP speculator; `cost` is that of one drafted token (one head). Layout: fms-extras."""
    inner = draft.inner_dim or arch.hidden_size
    heads = 1 if draft.tie_weights else draft.n_predict
    later = min(1, draft.n_predict - 1) if draft.tie_weights else draft.n_predict - 1
    projection = arch.hidden_size * inner + later * inner * inner
    table = arch.vocab_size * inner
    layers = (*(f"head.{i}" for i in range(heads)), *(f"proj.{i}" for i in range(draft.n_predict)))
    group = Group(layers, heads * table + projection, (heads * table + projection) * width)
    norms = heads * 2 * inner
    step = projection / draft.n_predict + table
    return Footprint(
        {"none": group},
        embedding_bytes=heads * table * width,
        other_bytes=norms * width,
        parameters=2 * heads * table + projection + norms,
        cost=PassCost(step * width, 0, 2 * step, 0),
    )


def weight_bytes(shape: tuple[int, int], scheme: LayerScheme | None, width: int) -> int:
    """Bytes of one weight matrix: codes, and float32 scales."""
    if scheme is None:
        return shape[0] * shape[1] * width
    codes = shape[0] * -(-shape[1] * scheme.weight.fmt.bits // 8)
    return codes + math.prod(scale_shape(shape, scheme.weight.granularity)) * SCALE_BYTES


def _group(arch: ArchMap, schemes: Mapping[str, LayerScheme | None], layers: list[str], width: int) -> Group:
    shapes = {layer: arch.linear_shape(layer) for layer in layers}
    return Group(
        tuple(layers),
        sum(n * k for n, k in shapes.values()),
        sum(weight_bytes(shape, schemes[layer], width) for layer, shape in shapes.items()),
    )


def _small_tensors(arch: ArchMap) -> int:
    """Elements of norms and biases."""
    large = {EMBEDDING, *(f"{layer}.weight" for layer in arch.linears())}
    return sum(math.prod(shape) for name, shape in tensor_shapes(arch).items() if name not in large)
