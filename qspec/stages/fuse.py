"""Decide what the runtime merges: layers that read the same input, and norms whose gain is the identity."""

from dataclasses import replace

from qspec.nn.linear import merge_obstacle
from qspec.records import FusionPlan, QuantizedModel


def fuse(quant: QuantizedModel) -> QuantizedModel:
    """The same model with its `FusionPlan`. Tensors keep their names: merging is an act of the runtime.

    A group that cannot be merged (`nn.linear.merge_obstacle`) gets a note. Groups wholly in float are merged too.
    """
    groups = quant.arch.fused_groups()
    reasons = {group: merge_obstacle([quant.linears.get(name) for name in group]) for group in groups}
    notes = [f"{', '.join(group)} stay separate: {reason}." for group, reason in reasons.items() if reason]
    plan = FusionPlan(tuple(group for group, reason in reasons.items() if not reason), tuple(_identity_norms(quant)))
    return replace(quant, fusion=plan, notes=(*quant.notes, *notes))


def _identity_norms(quant: QuantizedModel) -> list[str]:
    """Norms that multiply by one, because their gain went into the next layer: a runtime may skip the product."""
    norms = ("input_layernorm", quant.arch.mlp_norm)
    blocks = [f"{layer}.{norm}.weight" for layer in quant.arch.layers for norm in norms]
    names = [*blocks, "model.norm.weight"] if quant.arch.has_head else blocks
    return [name for name in names if bool((quant.tensors[name].float() + quant.arch.norm_offset == 1).all())]
