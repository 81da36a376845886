"""Draft heads on disk, as all formats have them: tensors by name, INT8 layers as `.weight` and `.weight_scale`."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from qspec.errors import SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import swap_linears
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import INT8

Names = Callable[[str], list[str]]
"""Names on disk that a module's tensors may have, of its path in the head; the first is the one to write."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WHOLE = (torch.int32, torch.int64)


class HeadReader:
    """Fills a head from stored tensors, whose shapes and types must be those of the head."""

    def __init__(self, stored: Mapping[str, Tensor], folder: Path, names: Names, fix: str) -> None:
        self._stored, self._folder, self._names, self._fix = stored, folder, names, fix
        self._read: set[str] = set()

    def fill(self, head: nn.Module, without: Iterable[str] = ()) -> None:
        """Give every module its tensors, but those below the paths `without`; stored INT8 layers stay INT8.

        The head may lie on `meta`: nothing is made as large as its shape says before tensors of that size are there.
        Raises `SourceError` for what is missing, of another shape or another type.
        """
        for paths, module in stored_modules(head, without):
            names = [name for path in paths for name in self._names(path)]
            if isinstance(module, nn.Linear) and (codes := self._codes(names, module.weight.shape)) is not None:
                swap_linears(head, lambda linear: Int8Map(codes) if linear is module else linear)  # noqa: B023
                continue
            for part, parameter in module.named_parameters(recurse=False):
                value = self.tensor([f"{name}.{part}" for name in names], parameter.shape).float()
                setattr(module, part, nn.Parameter(value, requires_grad=False))

    def ids(self, name: str, size: int) -> Tensor:
        """Whole numbers `[size]`, int64."""
        return self.tensor([name], torch.Size([size]), _WHOLE).long()

    def tensor(self, names: list[str], shape: torch.Size, types: tuple[torch.dtype, ...] = _FLOATS) -> Tensor:
        """The first of `names` that is stored."""
        name = next((name for name in names if name in self._stored), None)
        if name is None:
            raise SourceError(f"{self._folder}: {names[0]}", "is missing", self._fix)
        tensor = self._stored[name]
        if tensor.shape != shape or tensor.dtype not in types:
            rule = f"has shape {tuple(tensor.shape)}, config.json says {tuple(shape)}"
            if tensor.shape == shape:
                rule = f"is {tensor.dtype} in place of {' or '.join(map(str, types))}"
            raise SourceError(f"{self._folder}: {name}", rule, self._fix)
        self._read.add(name)
        return tensor

    def unread(self) -> list[str]:
        """Stored tensors that nobody has asked for."""
        return sorted(set(self._stored) - self._read)

    def _codes(self, names: list[str], shape: torch.Size) -> QTensor | None:
        """INT8 codes and scales of a linear layer; None where it is stored in float."""
        scales = [f"{name}.weight_scale" for name in names]
        if not any(name in self._stored for name in scales):
            return None
        weight = self.tensor([f"{name}.weight" for name in names], shape, (torch.int8,))
        return QTensor(weight, self.tensor(scales, torch.Size([shape[0], 1])).float(), None, INT8, PerChannel())


def stored_modules(head: nn.Module, without: Iterable[str] = ()) -> list[tuple[list[str], nn.Module]]:
    """Modules that have tensors of their own, with all their paths (several where they are tied)."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in head.named_modules(remove_duplicate=False):
        if isinstance(module, Int8Map) or list(module.named_parameters(recurse=False)):
            paths.setdefault(module, []).append(path)
    return [(known, module) for module, known in paths.items() if known[0] not in without]


def stored_tensors(head: nn.Module, names: Names, without: Iterable[str] = ()) -> dict[str, Tensor]:
    """The tensors that `HeadReader.fill` reads: tied modules once, under the first of their names."""
    tensors: dict[str, Tensor] = {}
    for paths, module in stored_modules(head, without):
        name = names(paths[0])[0]
        if isinstance(module, Int8Map):
            tensors |= {f"{name}.weight": module.weight.codes, f"{name}.weight_scale": module.weight.scale}
        else:
            tensors |= {f"{name}.{part}": value for part, value in module.named_parameters(recurse=False)}
    return tensors
