"""MLP speculators on disk, as ibm-ai-platform's accelerators lie there: `config.json` and `speculator.*` tensors.

A head of qspec's own may have INT8 layers (`.weight` and `.weight_scale`), a draft vocabulary (`speculator.ids`) and
layers that it shares with its target (nothing of those is stored): fields under `qspec` in `config.json` say so.
"""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qspec.bridges.architectures import SIZES
from qspec.bridges.tensors import SINGLE, read_tensors, rising_ids, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, swap_linears
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import INT8
from qspec.plain_files import read_json

ARCHITECTURE, MODEL_TYPE = "MLPSpeculatorPreTrainedModel", "mlp_speculator"
_PREFIX = "speculator."
_IDS = "ids"
_FIX = "give a head that `qspec train-draft` wrote, or an MLP speculator of ibm-ai-platform"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_RANGES = {
    "emb_dim": (1, SIZES["hidden_size"]),
    "vocab_size": (1, SIZES["vocab_size"]),
    "n_predict": (1, 64),
    "inner_dim": (0, SIZES["intermediate_size"]),
    "draft_vocab": (0, SIZES["vocab_size"]),
}
"""Least and most of the sizes in `SpeculatorShape`; its other fields are switches."""
_FIELDS = ("emb_dim", "vocab_size", "n_predict", "inner_dim", "tie_weights", "scale_input")


def read_shape(folder: Path) -> SpeculatorShape:
    """Sizes and switches of a stored head. Raises `SourceError`."""
    config = read_config(folder)
    own, where = config.get("qspec", {}), f"{folder}/config.json"
    fields = {name: config[name] for name in _FIELDS if name in config}
    try:
        shape = SpeculatorShape(**fields, draft_vocab=own.get("draft_vocab", 0), shared=own.get("shared", False))
    except (AttributeError, TypeError) as error:
        raise SourceError(where, f"does not describe an MLP speculator ({error})", _FIX) from error
    for field in dataclasses.fields(shape):
        value, (least, most) = getattr(shape, field.name), _RANGES.get(field.name, (0, 1))
        if type(value) is not (int if field.name in _RANGES else bool) or not least <= value <= most:
            rule = f"must be {least} to {most}" if field.name in _RANGES else "must be true or false"
            raise SourceError(f"{where}: {field.name} {value!r:.60}", rule, _FIX)
    return shape


def read_config(folder: Path) -> dict[str, Any]:
    """The head's `config.json`."""
    path = folder / "config.json"
    config = read_json(path, SourceError, _FIX)
    if config.get("model_type") != MODEL_TYPE:
        raise SourceError(str(path), f"has model_type {config.get('model_type')!r}, not {MODEL_TYPE!r}", _FIX)
    return config


def read(folder: Path, embedding_VH: Tensor, output_VH: Tensor) -> MLPSpeculator:
    """A head for a target of these embedding and output rows; its stored INT8 layers stay INT8.

    Nothing is made as large as `config.json` says before tensors of that size are there. Raises `SourceError` for what
    is missing or of another shape, and for ids that lead out of the vocabulary; `PairError` for a head of another
    target.
    """
    shape, stored = read_shape(folder), read_tensors(folder)
    if (shape.vocab_size, shape.emb_dim) != tuple(embedding_VH.shape):
        sizes = f"{folder.name}: vocabulary {shape.vocab_size}, hidden size {shape.emb_dim}"
        v, h = embedding_VH.shape
        raise PairError(sizes, f"the target has {v} and {h}", "use a head that was trained for this target")
    reader = _Reader(stored, folder)
    ids_D = reader.ids(shape) if shape.draft_vocab else None
    head = MLPSpeculator(shape, ids_D, embedding_VH, output_VH, device="meta")
    for names, module in _modules(head):
        if isinstance(module, nn.Linear) and (codes := reader.codes(names, module.weight.shape)) is not None:
            swap_linears(head, lambda linear: Int8Map(codes) if linear is module else linear)  # noqa: B023
            continue
        for part, parameter in module.named_parameters(recurse=False):
            value = reader.tensor([f"{name}.{part}" for name in names], parameter.shape).float()
            setattr(module, part, nn.Parameter(value, requires_grad=False))
    return head.eval().requires_grad_(False)


def write(head: MLPSpeculator, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write a head: tied layers once, under the first of their names; `facts` go into `config.json` under `qspec`."""
    shape = head.shape
    tensors: dict[str, Tensor] = {}
    for names, module in _modules(head):
        if isinstance(module, Int8Map):
            tensors[f"{names[0]}.weight"] = module.weight.codes
            tensors[f"{names[0]}.weight_scale"] = module.weight.scale
        else:
            tensors |= {f"{names[0]}.{part}": value for part, value in module.named_parameters(recurse=False)}
    if head.ids_D is not None:
        tensors[_IDS] = head.ids_D.int()
    own = {"draft_vocab": shape.draft_vocab, "shared": shape.shared, **(facts or {})}
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{name: getattr(shape, name) for name in _FIELDS},
        "inner_dim": shape.inner,
        "n_candidates": 5,
        "top_k_tokens_per_head": [max(1, 5 - i) for i in range(shape.n_predict)],
        "torch_dtype": "float32",
        "qspec": own,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / SINGLE, {_PREFIX + name: value for name, value in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _modules(head: MLPSpeculator) -> list[tuple[list[str], nn.Module]]:
    """Modules that are stored, with all their names (several where they are tied)."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in head.named_modules(remove_duplicate=False):
        own = list(module.named_parameters(recurse=False))
        if isinstance(module, Int8Map) or own:
            names.setdefault(module, []).append(name)
    return [(known, module) for module, known in names.items() if not known[0].endswith(".rows")]


class _Reader:
    """Finds a layer's tensors under any of its names."""

    def __init__(self, stored: Mapping[str, Tensor], folder: Path) -> None:
        self._stored, self._folder = stored, folder

    def ids(self, shape: SpeculatorShape) -> Tensor:
        """Ids that the head can draft, `[D]`."""
        ids_D = self.tensor([_IDS], torch.Size([shape.draft_vocab]), (torch.int32, torch.int64))
        return rising_ids(ids_D, shape.vocab_size, f"{self._folder}: {_PREFIX}{_IDS}")

    def codes(self, names: list[str], shape: torch.Size) -> QTensor | None:
        """INT8 codes and scales of a linear layer; None where it is stored in float."""
        scales = [f"{name}.weight_scale" for name in names]
        if not any(_PREFIX + name in self._stored for name in scales):
            return None
        weight = self.tensor([f"{name}.weight" for name in names], shape, (torch.int8,))
        return QTensor(weight, self.tensor(scales, torch.Size([shape[0], 1])).float(), None, INT8, PerChannel())

    def tensor(self, names: list[str], shape: torch.Size, types: tuple[torch.dtype, ...] = _FLOATS) -> Tensor:
        """The first of `names` that is stored."""
        for name in names:
            tensor = self._stored.get(_PREFIX + name)
            if tensor is None:
                continue
            if tensor.shape != shape or tensor.dtype not in types:
                rule = f"has shape {tuple(tensor.shape)}, config.json says {tuple(shape)}"
                if tensor.shape == shape:
                    rule = f"is {tensor.dtype} in place of {' or '.join(map(str, types))}"
                raise SourceError(f"{self._folder}: {_PREFIX}{name}", rule, _FIX)
            return tensor
        raise SourceError(f"{self._folder}: {_PREFIX}{names[0]}", "is missing", _FIX)
