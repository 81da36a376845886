"""Decide what the runtime merges: layers that read the same input, and norms whose gain is the identity."""

from dataclasses import replace

import torch
from torch import Tensor

from qspec.numerics.blocks import PerTensor
from qspec.records import FusionPlan, QLinear, QuantizedModel

_NORMS = ("input_layernorm", "post_attention_layernorm")


def fuse(quant: QuantizedModel) -> QuantizedModel:
    """The same model with its `FusionPlan`. Tensors keep their names: merging is an act of the runtime.

    A group is merged when all members are quantized alike and, per tensor, under equal scales; one that is not gets a
    note. Groups that are wholly in float are merged too.
    """
    reasons = {group: _obstacle(quant, group) for group in quant.arch.fused_groups()}
    notes = [f"{', '.join(group)} stay separate: {reason}." for group, reason in reasons.items() if reason]
    plan = FusionPlan(tuple(group for group, reason in reasons.items() if not reason), tuple(_identity_norms(quant)))
    return replace(quant, fusion=plan, notes=(*quant.notes, *notes))


def _obstacle(quant: QuantizedModel, group: tuple[str, ...]) -> str | None:
    """Why the group cannot be one matmul; None when it can."""
    members = [quant.linears.get(name) for name in group]
    first = members[0]
    if first is None:
        return None if not any(members) else "only some are quantized"
    for other in members[1:]:
        if other is None:
            return "only some are quantized"
        if _form(other) != _form(first):
            return "their formats differ"
        if isinstance(first.weight.granularity, PerTensor) and not torch.equal(first.weight.scale, other.weight.scale):
            return "their weight scales differ"
        if not _equal(first.input_scale, other.input_scale):
            return "their input scales differ"
    return None


def _form(linear: QLinear) -> tuple[object, ...]:
    weight = linear.weight
    return weight.fmt, weight.granularity, weight.zero_point is None, linear.activation, linear.bias is None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _identity_norms(quant: QuantizedModel) -> list[str]:
    """Norms that multiply by one, because their gain went into the next layer: a runtime may skip the product."""
    blocks = [f"model.layers.{i}.{norm}.weight" for i in range(quant.arch.n_layers) for norm in _NORMS]
    names = [*blocks, "model.norm.weight"]
    return [name for name in names if bool((quant.tensors[name].float() + quant.arch.norm_offset == 1).all())]
