"""MLP speculators on disk, as ibm-ai-platform's accelerators lie there: `config.json` and `speculator.*` tensors.

A head of qspec's own may have INT8 layers (`.weight` and `.weight_scale`), a draft vocabulary (`speculator.ids`) and
layers that it shares with its target (nothing of those is stored): fields under `qspec` in `config.json` say so.
"""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from qspec.bridges.architectures import SIZES
from qspec.bridges.heads.files import HeadReader, stored_tensors
from qspec.bridges.tensors import SINGLE, read_tensors, rising_ids, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape
from qspec.plain_files import read_json

ARCHITECTURE, MODEL_TYPE = "MLPSpeculatorPreTrainedModel", "mlp_speculator"
_IDS = "speculator.ids"
_FIX = "give a head that `qspec train-draft` wrote, or an MLP speculator of ibm-ai-platform"
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
    reader, ids_D = HeadReader(stored, folder, _names, _FIX), None
    if shape.draft_vocab:
        ids_D = rising_ids(reader.ids(_IDS, shape.draft_vocab), shape.vocab_size, f"{folder}: {_IDS}")
    head = MLPSpeculator(shape, ids_D, embedding_VH, output_VH, device="meta")
    reader.fill(head, _shared(head))
    return head.eval().requires_grad_(False)


def write(head: MLPSpeculator, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write a head: tied layers once, under the first of their names; `facts` go into `config.json` under `qspec`."""
    shape = head.shape
    tensors = stored_tensors(head, _names, _shared(head))
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
    write_tensors(folder / SINGLE, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _names(path: str) -> list[str]:
    return [f"speculator.{path}"]


def _shared(head: MLPSpeculator) -> list[str]:
    """Paths of the target's own rows, which are not stored."""
    return [path for path, _ in head.named_modules(remove_duplicate=False) if path.endswith(".rows")]
