"""A head of its own for a model whose head is its embedding."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from qspec.records import EMBEDDING, HEAD, LoadedModel


def untied(model: LoadedModel) -> LoadedModel:
    """A view of a tied model in which the head is a tensor too; a piece without a head gets none."""
    tensors = _WithHead(model.tensors) if model.arch.has_head else model.tensors
    config = dict(model.config) | {"tie_word_embeddings": False}
    return replace(model, arch=replace(model.arch, tied=False), tensors=tensors, config=config)


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
