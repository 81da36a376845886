"""A model cut into pieces that fit in memory one at a time: its decoder layers, then embedding, last norm and head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.plan import LayerScheme, QuantPlan, Rule
from qspec.records import EMBEDDING, LoadedModel, Selection


def pieces(model: LoadedModel) -> Iterator[LoadedModel]:
    """One model per decoder layer, under the layer's own number, and one of all that belongs to no layer."""
    arch = model.arch
    owner = {name: _owner(name) for name in model.tensors}
    for number, layer in enumerate(arch.layers, arch.first_layer):
        own = [name for name in owner if owner[name] == layer]
        yield replace(
            model,
            arch=replace(arch, first_layer=number, n_layers=1, has_head=False),
            tensors=Selection(model.tensors, own),
        )
    rest = [name for name in owner if owner[name] not in arch.layers]
    yield replace(model, arch=replace(arch, n_layers=0), tensors=Selection(model.tensors, rest))


def piece_plan(schemes: Mapping[str, LayerScheme | None], plan: QuantPlan, piece: LoadedModel) -> QuantPlan:
    """The part of a resolved plan that names the layers of one piece."""
    return QuantPlan(None, tuple(Rule(layer, schemes[layer]) for layer in piece.arch.linears()), plan.kv)


def embedded(model: LoadedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states `[T, hidden]`, float32, of every row before the first layer."""
    embed_VK, scale = model.tensors[EMBEDDING], model.arch.embed_scale
    return [F.embedding(torch.tensor(row), embed_VK).float() * scale for row in rows]


def longest(states: Sequence[Tensor]) -> int:
    """Tokens of the longest text: the cache positions that a decoder needs to run any of them."""
    return max(x_TK.shape[0] for x_TK in states)


def _owner(name: str) -> str:
    """`model.layers.N` of a tensor that belongs to a layer; else empty."""
    parts = name.split(".", 3)
    return ".".join(parts[:3]) if name.startswith("model.layers.") else ""
