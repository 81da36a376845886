"""Rewrites that need no data, before calibration: a head of its own for a tied model, and rotations."""

from dataclasses import replace

from qspec.records import ArchMap, LoadedModel
from qspec.schema.quantization import QuantSpec
from qspec.stages.rotate import rotate, rotated_arch
from qspec.stages.untie import untied


def prepare(model: LoadedModel, spec: QuantSpec, seed: int) -> tuple[LoadedModel, list[str]]:
    """The model under `spec`'s data-free rewrites, as views of its tensors, and notes for the report."""
    notes: list[str] = []
    if spec.untie_head and model.arch.tied:
        size = model.arch.vocab_size * model.arch.hidden_size
        notes.append(f"The head was tied to the embedding and is a matrix of its own now: {size / 1e6:,.1f} M weights.")
        model = untied(model)
    if spec.rotation is not None:
        model, said = rotate(model, spec.rotation, seed)
        notes += said
    return model, notes


def prepared_arch(arch: ArchMap, spec: QuantSpec) -> ArchMap:
    """The architecture after `prepare`, known without weights; raises `RecipeError` as `rotated_arch`."""
    return rotated_arch(replace(arch, tied=arch.tied and not spec.untie_head), spec.rotation)
