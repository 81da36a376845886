"""Rewrites that need no data, before calibration: a head of its own for a tied model, and rotations."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from qspec.bridges.layout import EMBEDDING, HEAD
from qspec.records import ArchMap, LoadedModel
from qspec.schema.quantization import QuantSpec
from qspec.stages.rotate import rotate, rotated_arch


def prepare(model: LoadedModel, spec: QuantSpec, seed: int) -> tuple[LoadedModel, list[str]]:
    """The model under `spec`'s data-free rewrites, as views of its tensors, and notes for the report."""
    notes: list[str] = []
    if spec.untie_head and model.arch.tied:
        size = model.arch.vocab_size * model.arch.hidden_size
        notes.append(f"The head was tied to the embedding and is a matrix of its own now: {size / 1e6:,.1f} M weights.")
        model = _untied(model)
    if spec.rotation is not None:
        model, said = rotate(model, spec.rotation, seed)
        notes += said
    return model, notes


def prepared_arch(arch: ArchMap, spec: QuantSpec) -> ArchMap:
    """The architecture after `prepare`, known without weights; raises `RecipeError` as `rotated_arch`."""
    return rotated_arch(replace(arch, tied=arch.tied and not spec.untie_head), spec.rotation)


def _untied(model: LoadedModel) -> LoadedModel:
    config = dict(model.config) | {"tie_word_embeddings": False}
    return replace(model, arch=replace(model.arch, tied=False), tensors=_WithHead(model.tensors), config=config)


class _WithHead(Mapping[str, Tensor]):
    """Tensors in which the embedding is the head too, under the head's name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[EMBEDDING if name == HEAD else name]

    def __contains__(self, name: object) -> bool:
        return name == HEAD or name in self._tensors

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield HEAD

    def __len__(self) -> int:
        return len(self._tensors) + 1
