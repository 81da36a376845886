"""Tensor names and shapes that an architecture promises, and the check that a checkpoint keeps them."""

from collections.abc import Mapping

import torch

from qspec.bridges.support import USE_SUPPORTED
from qspec.bridges.tensors import LazyTensors
from qspec.errors import SourceError
from qspec.records import LAYER_LINEARS, ArchMap

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F32", "F16", "BF16", "F64")
_GIVE_ALL = "give the complete weights that belong to this config.json"


def tensor_shapes(arch: ArchMap) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a float model by name (no `lm_head.weight` when tied), in forward order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for i in range(arch.n_layers):
        shapes |= _layer_shapes(arch, f"model.layers.{i}")
    shapes["model.norm.weight"] = (arch.hidden_size,)
    if not arch.tied:
        shapes[HEAD] = (arch.vocab_size, arch.hidden_size)
    return shapes


def check_shapes(source: str, arch: ArchMap, found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that lack a tensor, hold one too many, or one of another shape than `arch` says."""
    expected = require_tensors(source, arch, found)
    for name in found:
        if name not in expected:
            raise SourceError(f"{source}: {name}", f"is no part of a {arch.model_type} model", USE_SUPPORTED)


def require_tensors(source: str, arch: ArchMap, found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Refuse weights that lack a tensor, or hold one of another shape than `arch` says; returns all those shapes."""
    expected = tensor_shapes(arch)
    for name, shape in expected.items():
        if name not in found:
            raise SourceError(f"{source}: {name}", f"a {arch.model_type} model needs this tensor", _GIVE_ALL)
        if found[name] != shape:
            rule = f"has shape {list(found[name])}, the config says {list(shape)}"
            raise SourceError(f"{source}: {name}", rule, _GIVE_ALL)
    return expected


def select_tensors(source: str, tensors: LazyTensors, arch: ArchMap) -> LazyTensors:
    """A float checkpoint's tensors without what old files repeat (rotary buffers, a tied head); checked."""
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


def _layer_shapes(arch: ArchMap, layer: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in LAYER_LINEARS:
        out, into = arch.linear_shape(f"{layer}.{part}")
        shapes[f"{layer}.{part}.weight"] = (out, into)
        if _has_bias(arch, part):
            shapes[f"{layer}.{part}.bias"] = (out,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{norm}.weight"] = (arch.hidden_size,)
    if arch.qk_norm:
        shapes |= {f"{layer}.self_attn.{x}_norm.weight": (arch.head_dim,) for x in "qk"}
    return shapes


def _has_bias(arch: ArchMap, part: str) -> bool:
    if part.startswith("mlp."):
        return arch.mlp_bias
    return arch.o_bias if part.endswith("o_proj") else arch.qkv_bias
