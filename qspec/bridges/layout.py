"""Tensor names and shapes that an architecture promises, the check that a checkpoint keeps them, and its own names.

In memory every linear layer has its own weight, and mixtures have one spelling. On disk Phi-3 stores q/k/v and gate/up
as one layer each, and Mixtral says `block_sparse_moe.experts.0.w1`: what transformers and vLLM load.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import re
from typing import TypeVar

import torch

from qspec.bridges.architectures import ARCHITECTURES, USE_SUPPORTED
from qspec.bridges.tensors import LazyTensors, StoredPart
from qspec.errors import SourceError
from qspec.records import EMBEDDING, HEAD, ArchMap, fused_with

V = TypeVar("V")

_FLOATS = ("F32", "F16", "BF16", "F64")
_STORED_AS_ONE = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_EXPERT = re.compile(r"(.+\.)mlp\.(experts\.\d+\.)(\w+)")
_GIVE_ALL = "give the complete weights that belong to this config.json"


def tensor_shapes(arch: ArchMap) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a float model by name (no `lm_head.weight` when tied), in forward order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for layer in arch.layers:
        shapes |= _layer_shapes(arch, layer)
    shapes["model.norm.weight"] = (arch.hidden_size,)
    if not arch.tied:
        shapes[HEAD] = (arch.vocab_size, arch.hidden_size)
    return shapes


def check_shapes(source: str, arch: ArchMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that lack a tensor, hold one too many, or one of another shape than `arch` says."""
    expected = require_tensors(source, arch, shapes)
    for name in shapes:
        if name not in expected:
            raise SourceError(f"{source}: {name}", f"is no part of a {arch.model_type} model", USE_SUPPORTED)


def require_tensors(source: str, arch: ArchMap, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Refuse weights that lack a tensor, or hold one of another shape than `arch` says; returns all those shapes."""
    expected = tensor_shapes(arch)
    for name, shape in expected.items():
        if name not in shapes:
            raise SourceError(f"{source}: {name}", f"a {arch.model_type} model needs this tensor", _GIVE_ALL)
        if shapes[name] != shape:
            rule = f"has shape {list(shapes[name])}, the config says {list(shape)}"
            raise SourceError(f"{source}: {name}", rule, _GIVE_ALL)
    return expected


def refuse_strange_parts(source: str, arch: ArchMap, tensors: LazyTensors) -> None:
    """Refuse tensors that would change what a known layer computes, or that are not its type: raises `SourceError`.

    What belongs to no layer is kept and never used.
    """
    expected = tensor_shapes(arch)
    layers = {name.rpartition(".")[0] for name in expected}
    for name in tensors:
        if name not in expected and name.rpartition(".")[0] in layers:
            raise SourceError(f"{source}: {name}", f"is no part of a {arch.model_type} model", USE_SUPPORTED)
        if name in expected and tensors.dtype(name) not in _FLOATS:
            raise SourceError(f"{source}: {name}", f"is stored as {tensors.dtype(name)}, and is no float", _GIVE_ALL)


def select_tensors(source: str, tensors: LazyTensors, arch: ArchMap) -> LazyTensors:
    """A float checkpoint's tensors without what old files repeat (rotary buffers, a tied head); checked."""
    tensors = split_stored(arch, tensors)
    drop = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if arch.tied and HEAD in tensors and EMBEDDING in tensors:
        if not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            rule = "differs from the embedding, but tie_word_embeddings is true"
            raise SourceError(f"{source}: {HEAD}", rule, "set tie_word_embeddings to false in config.json")
        drop.add(HEAD)
    kept = tensors.without(drop)
    check_shapes(source, arch, {name: kept.shape(name) for name in kept})
    for name in kept:
        if kept.dtype(name) not in _FLOATS:
            rule = f"is stored as {kept.dtype(name)}: the model is already quantized"
            raise SourceError(f"{source}: {name}", rule, "give the float model that it was made from")
    return kept


def stored_as(arch: ArchMap, layer: str) -> str:
    """Name on disk of what holds a linear layer or router."""
    block, _, part = layer.rpartition(".")
    stored = ARCHITECTURES[arch.model_type].stored
    if stored == "joined" and part in _STORED_AS_ONE:
        return f"{block}.{_STORED_AS_ONE[part]}"
    if stored == "mixtral":
        expert = _EXPERT.fullmatch(layer)
        if expert:
            return f"{expert[1]}block_sparse_moe.{expert[2]}{_MIXTRAL[expert[3]]}"
        return layer.replace(".mlp.gate", ".block_sparse_moe.gate")
    return layer


def stored_rows(arch: ArchMap, layer: str) -> tuple[int, int] | None:
    """Which rows of what is on disk are this layer, `(start, stop)`; None: all, it is stored alone."""
    if stored_as(arch, layer) == layer or ARCHITECTURES[arch.model_type].stored != "joined":
        return None
    group = fused_with(layer)
    sizes = [arch.linear_shape(mate)[0] for mate in group]
    i = group.index(layer)
    return sum(sizes[:i]), sum(sizes[: i + 1])


def stored_schemes(arch: ArchMap, resolved: Mapping[str, V]) -> dict[str, V | None]:
    """Schemes of linear layers by their names on disk; None for routers, which are never quantized."""
    routers = {stored_as(arch, router): None for router in arch.routers()}
    return {stored_as(arch, layer): scheme for layer, scheme in resolved.items()} | routers


def stored_items(
    arch: ArchMap, items: Iterable[tuple[str, V]], join: Callable[[str, Sequence[V]], V], suffix: str = ""
) -> Iterator[tuple[str, V]]:
    """`items` by their names on disk, those that are stored as one joined in order; all of these must be there.

    `suffix`: what follows a layer's name in the names given, and in those made.
    """
    waiting: dict[str, V] = {}
    for name, item in items:
        layer = name.removesuffix(suffix)
        stored = stored_as(arch, layer) + name[len(layer) :]
        if stored_rows(arch, layer) is None:
            yield stored, item
            continue
        waiting[layer] = item
        group = fused_with(layer)
        if all(mate in waiting for mate in group):
            yield stored, join(stored, [waiting.pop(mate) for mate in group])
    assert not waiting, f"{list(waiting)} are stored with layers that are missing"


def split_stored(arch: ArchMap, tensors: LazyTensors) -> LazyTensors:
    """A checkpoint's float weights by their names in memory; experts may also be stacked, as transformers has them."""
    parts: dict[str, StoredPart] = {}
    for layer in [*arch.linears(), *arch.routers()]:
        part = _stored_part(arch, layer)
        if part.stored in tensors and part != StoredPart(f"{layer}.weight"):
            parts[f"{layer}.weight"] = part
        elif (stacked := _stacked_part(arch, layer)) and stacked.stored in tensors:
            parts[f"{layer}.weight"] = stacked
    return tensors.divided(parts) if parts else tensors


def _stored_part(arch: ArchMap, layer: str) -> StoredPart:
    """Where a layer's weight is; the last one of several has all that is left, so that a row too many shows."""
    start, stop = stored_rows(arch, layer) or (0, None)
    group = fused_with(layer)
    return StoredPart(f"{stored_as(arch, layer)}.weight", None, start, None if group and layer == group[-1] else stop)


def _stacked_part(arch: ArchMap, layer: str) -> StoredPart | None:
    expert = _EXPERT.fullmatch(layer)
    if not expert:
        return None
    block, number, size = f"{expert[1]}mlp.experts", int(expert[2].split(".")[1]), arch.expert_size
    match expert[3]:
        case "gate_proj":
            return StoredPart(f"{block}.gate_up_proj", number, 0, size)
        case "up_proj":
            return StoredPart(f"{block}.gate_up_proj", number, size)
        case _:
            return StoredPart(f"{block}.down_proj", number)


def _layer_shapes(arch: ArchMap, layer: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in arch.layer_linears(layer):
        out, into = arch.linear_shape(name)
        shapes[f"{name}.weight"] = (out, into)
        if _has_bias(arch, name):
            shapes[f"{name}.bias"] = (out,)
    if router := arch.router(layer):
        shapes[f"{router}.weight"] = (arch.n_experts, arch.hidden_size)
    post = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if arch.post_norms else ()
    for norm in ("input_layernorm", "post_attention_layernorm", *post):
        shapes[f"{layer}.{norm}.weight"] = (arch.hidden_size,)
    if arch.qk_norm:
        shapes |= {f"{layer}.self_attn.{x}_norm.weight": (arch.head_dim,) for x in "qk"}
    return shapes


def _has_bias(arch: ArchMap, name: str) -> bool:
    if ".mlp." in name:
        return arch.mlp_bias
    return arch.o_bias if name.endswith("o_proj") else arch.qkv_bias
