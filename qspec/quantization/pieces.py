"""A model cut into pieces that fit in memory one at a time: its decoder layers, then embedding, last norm and head."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.plan import LayerScheme, QuantPlan, Rule
from qspec.records import EMBEDDING, LoadedModel, View

CPU = torch.device("cpu")


def placed(model: LoadedModel, device: torch.device) -> LoadedModel:
    """The model for work on a device: its tensors come there as they are read.

    Hidden states of the texts (`embedded`, `calibrate.advanced`) and what is written stay with the host.
    """
    if device.type == "cpu":
        return model
    return replace(model, tensors=View(model.tensors, lambda name: model.tensors[name].to(device)))


def at_work(device: torch.device) -> AbstractContextManager[object]:
    """Surrounds work on a device: tensors are made there."""
    return nullcontext() if device.type == "cpu" else device


def pieces(model: LoadedModel) -> Iterator[LoadedModel]:
    """One model per decoder layer, under the layer's own number, and one of all that belongs to no layer."""
    arch = model.arch
    owner = {name: _owner(name) for name in model.tensors}
    for number, layer in enumerate(arch.layers, arch.first_layer):
        own = [name for name in owner if owner[name] == layer]
        yield replace(
            model,
            arch=replace(arch, first_layer=number, n_layers=1, has_head=False),
            tensors=View(own, model.tensors.__getitem__),
        )
    rest = [name for name in owner if owner[name] not in arch.layers]
    yield replace(model, arch=replace(arch, n_layers=0), tensors=View(rest, model.tensors.__getitem__))


def piece_plan(schemes: Mapping[str, LayerScheme | None], plan: QuantPlan, piece: LoadedModel) -> QuantPlan:
    """The part of a resolved plan that names the layers of one piece."""
    return QuantPlan(None, tuple(Rule(layer, schemes[layer]) for layer in piece.arch.linears()), plan.kv)


def embedded(model: LoadedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states `[T, hidden]`, float32, of every row before the first layer, in the host's memory."""
    embed_VK, scale = model.tensors[EMBEDDING], model.arch.embed_scale
    return [(F.embedding(torch.tensor(row), embed_VK).float() * scale).cpu() for row in rows]


def longest(states: Sequence[Tensor]) -> int:
    """Tokens of the longest text: the cache positions that a decoder needs to run any of them."""
    return max(x_TK.shape[0] for x_TK in states)


def _owner(name: str) -> str:
    """`model.layers.N` of a tensor that belongs to a layer; else empty."""
    parts = name.split(".", 3)
    return ".".join(parts[:3]) if name.startswith("model.layers.") else ""
