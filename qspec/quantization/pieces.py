"""A model cut into pieces that fit in memory one at a time: its decoder layers, then embedding, last norm and head."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
import json
from pathlib import Path
import shutil
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import SourceError
from qspec.plan import LayerScheme, QuantPlan, Rule
from qspec.provenance import atomic_write
from qspec.records import EMBEDDING, LoadedModel, Selection

CPU = torch.device("cpu")


class _Placed(Mapping[str, Tensor]):
    """Tensors that lie on a device once they are read."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def placed(model: LoadedModel, device: torch.device) -> LoadedModel:
    """The model for work on a device: its tensors come there as they are read.

    Hidden states of the texts (`embedded`, `calibrate.advanced`) and what is written stay with the host.
    """
    return model if device.type == "cpu" else replace(model, tensors=_Placed(model.tensors, device))


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
            tensors=Selection(model.tensors, own),
        )
    rest = [name for name in owner if owner[name] not in arch.layers]
    yield replace(model, arch=replace(arch, n_layers=0), tensors=Selection(model.tensors, rest))


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


_KEY = "key.json"


class Store:
    """A folder of finished pieces. `key` is all that their bytes depend on; pieces of another key are dropped."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        self._key = json.dumps(key, sort_keys=True, indent=1)
        if self._read(_KEY) != self._key:
            shutil.rmtree(folder, ignore_errors=True)
        self.records = self._finished()

    def keep(
        self,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        states: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Add a piece. `states`: named lists of hidden states after it."""
        number = len(self.records)
        if not number:
            atomic_write(self.folder / _KEY, self._key)
        flat = {f"{name}.{row}": x_TK for name, rows in states.items() for row, x_TK in enumerate(rows)}
        write_tensors(self._tensors(number), tensors)
        if flat:
            write_tensors(self._states(number), flat)
        atomic_write(self.folder / f"{number:05d}.json", json.dumps(record))
        self._states(number - 1).unlink(missing_ok=True)
        self.records.append(dict(record))

    def states(self, name: str, rows: int) -> list[Tensor]:
        """Hidden states after the last piece, as `keep` got them."""
        stored = read_tensors(self._states(len(self.records) - 1))
        return [stored[f"{name}.{row}"].clone() for row in range(rows)]

    def tensor_files(self) -> list[Path]:
        """The tensors of every piece."""
        return [self._tensors(number) for number in range(len(self.records))]

    def _finished(self) -> list[dict[str, Any]]:
        """Records of the pieces that are whole, up to the first that is not."""
        records: list[dict[str, Any]] = []
        while (text := self._read(f"{len(records):05d}.json")) is not None:
            try:
                read_tensors(self._tensors(len(records)))
            except SourceError:
                break
            records.append(json.loads(text))
        return records

    def _tensors(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _states(self, number: int) -> Path:
        return self.folder / f"{number:05d}.states.safetensors"

    def _read(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
