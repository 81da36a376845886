"""MLP speculators on disk, as ibm-ai-platform's accelerators lie there: `config.json` and `speculator.*` tensors.

A head of qspec's own may have INT8 layers (`.weight` and `.weight_scale`), a draft vocabulary (`speculator.ids`) and
layers that it shares with its target (nothing of those is stored): fields under `qspec` in `config.json` say so.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qspec.bridges.tensors import SINGLE, read_tensors, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, swap_linears
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import INT8

ARCHITECTURE, MODEL_TYPE = "MLPSpeculatorPreTrainedModel", "mlp_speculator"
_PREFIX = "speculator."
_IDS = "ids"
_FIX = "give a head that `qspec train-draft` wrote, or an MLP speculator of ibm-ai-platform"
_FIELDS = ("emb_dim", "vocab_size", "n_predict", "inner_dim", "tie_weights", "scale_input")


def read_shape(folder: Path) -> SpeculatorShape:
    """Sizes and switches of a stored head. Raises `SourceError`."""
    config = read_config(folder)
    try:
        own = config.get("qspec", {})
        fields = {name: config[name] for name in _FIELDS if name in config}
        return SpeculatorShape(**fields, draft_vocab=own.get("draft_vocab", 0), shared=own.get("shared", False))
    except (AttributeError, TypeError) as error:
        raise SourceError(f"{folder}/config.json", f"does not describe an MLP speculator ({error})", _FIX) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The head's `config.json`."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(str(path), f"cannot be read ({error})", _FIX) from error
    if config.get("model_type") != MODEL_TYPE:
        raise SourceError(str(path), f"has model_type {config.get('model_type')!r}, not {MODEL_TYPE!r}", _FIX)
    return config


def read(folder: Path, embedding_VH: Tensor, output_VH: Tensor) -> MLPSpeculator:
    """A head for a target of these embedding and output rows; its stored INT8 layers stay INT8.

    Raises `SourceError` for what is missing or of another shape, `PairError` for a head of another target.
    """
    shape, stored = read_shape(folder), read_tensors(folder)
    if (shape.vocab_size, shape.emb_dim) != tuple(embedding_VH.shape):
        sizes = f"{folder.name}: vocabulary {shape.vocab_size}, hidden size {shape.emb_dim}"
        v, h = embedding_VH.shape
        raise PairError(sizes, f"the target has {v} and {h}", "use a head that was trained for this target")
    ids_D = stored[_PREFIX + _IDS].long() if shape.draft_vocab else None
    head = MLPSpeculator(shape, ids_D, embedding_VH, output_VH)
    reader = _Reader(stored, folder)
    with torch.no_grad():
        for names, module in _modules(head):
            if isinstance(module, nn.Linear) and (codes := reader.codes(names)) is not None:
                swap_linears(head, lambda linear: Int8Map(codes) if linear is module else linear)  # noqa: B023
                continue
            for part, parameter in module.named_parameters(recurse=False):
                parameter.copy_(reader.tensor(names, part, parameter.shape))
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
    """What is stored, with all names that it goes by (several where it is tied)."""
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

    def codes(self, names: list[str]) -> QTensor | None:
        found = next((name for name in names if f"{_PREFIX}{name}.weight_scale" in self._stored), None)
        if found is None:
            return None
        weight, scale = (self._stored[f"{_PREFIX}{found}.{part}"] for part in ("weight", "weight_scale"))
        return QTensor(weight, scale, None, INT8, PerChannel())

    def tensor(self, names: list[str], part: str, shape: torch.Size) -> Tensor:
        for name in names:
            found = self._stored.get(f"{_PREFIX}{name}.{part}")
            if found is not None:
                if found.shape != shape:
                    rule = f"has shape {tuple(found.shape)}, config.json says {tuple(shape)}"
                    raise SourceError(f"{self._folder}: {_PREFIX}{name}.{part}", rule, _FIX)
                return found
        raise SourceError(f"{self._folder}: {_PREFIX}{names[0]}.{part}", "is missing", _FIX)
