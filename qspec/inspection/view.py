"""`qspec inspect`: look into a float model before it is quantized, or into a pair after. Nothing is changed."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
import math
import os
from pathlib import Path
from typing import Any

from qspec.bridges.architectures import quantization_method
from qspec.bridges.hf import read_config
from qspec.bridges.text import calibration_rows, load_rows
from qspec.errors import RecipeError
from qspec.inspection import model_page, pair_page
from qspec.inspection.model import CalibrationText, ModelView, view_model
from qspec.inspection.pair import PairView, read_half, view_half
from qspec.models.load import load
from qspec.pair.check import PairContent, read_pair
from qspec.progress import Progress
from qspec.quantization.calibrate import calibrate
from qspec.readable import size
from qspec.records import Tokenizer
from qspec.report.document import Document, Heading
from qspec.schema.drafts import DRAFTS
from qspec.schema.manifest import NAME
from qspec.schema.problems import validate
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import CalibrationSpec, DataSpec

TEXTS, LENGTH = 16, 256
"""Calibration texts and their tokens: enough to see outliers, few enough to wait for."""


def inspect(
    reference: str, revision: str | None = None, data: str | None = None, progress: Progress | None = None
) -> ModelView | PairView:
    """The view of a reference: a pair's folder, a quantized checkpoint's, or a model as a recipe names it.

    `data` names text to measure activations (model) or the KV cache (pair) on. Raises `QspecError`.
    """
    progress, folder = progress or Progress(), Path(os.path.expanduser(reference))
    if data is not None:
        load_rows(data, limit=1)
    pair = (folder / NAME).is_file()
    if not pair and not _is_quantized(folder):
        spec = validate(ModelSpec, {"model": reference, "revision": revision}, "inspect")
        return _model(spec, data, progress)
    if revision is not None:
        fix = "remove --revision, or give a Hub id"
        raise RecipeError(f"{reference} at revision {revision!r}", "only Hub models have revisions", fix)
    return _pair(read_pair(folder), data, progress) if pair else _alone(folder, data, progress)


def as_data(view: ModelView | PairView) -> dict[str, Any]:
    """The view as JSON holds it; what is not defined (NaN) or without bound (SQNR without error) is null."""
    kind = "model" if isinstance(view, ModelView) else "pair"
    body = _plain(view)
    assert isinstance(body, dict)
    return {"kind": kind, **body}


def _model(spec: ModelSpec, data: str | None, progress: Progress) -> ModelView:
    model = load(spec)
    if data is None:
        return view_model(model, spec.model, progress)
    rows, calibration = _rows(data, model.tokenizer, model.arch.max_positions)
    stats = calibrate(model, rows, progress=progress)
    return view_model(model, spec.model, progress, stats, calibration)


def _pair(content: PairContent, data: str | None, progress: Progress) -> PairView:
    manifest, models = content.manifest, content.halves
    target = models["target"]
    longest = min(model.arch.max_positions for model in models.values())
    rows, calibration = _rows(data, target.tokenizer, longest) if data is not None else ([], None)
    halves = tuple(view_half(model, name, progress, rows) for name, model in models.items())
    return PairView(manifest.name, manifest.draft.kind, halves, calibration)


def _alone(folder: Path, data: str | None, progress: Progress) -> PairView:
    """One quantized checkpoint, qspec's or llm-compressor's."""
    model = read_half(folder)
    rows, calibration = ([], None) if data is None else _rows(data, model.tokenizer, model.arch.max_positions)
    return PairView(folder.name, None, (view_half(model, "checkpoint", progress, rows),), calibration)


def _is_quantized(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in the compressed-tensors layout."""
    if not (folder / "config.json").is_file():
        return False
    return quantization_method(read_config(folder)) == "compressed-tensors"


def _rows(data: str, tokenizer: Tokenizer, max_positions: int) -> tuple[list[list[int]], CalibrationText]:
    length = min(LENGTH, max_positions)
    spec = CalibrationSpec(data=(DataSpec(name=data),), samples=TEXTS, length=length)
    rows = calibration_rows(spec, tokenizer, seed=0)
    return rows, CalibrationText(data, len(rows), sum(map(len, rows)))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def document(view: ModelView | PairView, layers: bool = False) -> Document:
    """A line per kind of layer; `layers`: one for every layer too."""
    if isinstance(view, ModelView):
        title, blocks, every = view.model, model_page.summary(view), model_page.every_layer(view)
    else:
        title, blocks, every = view.name, pair_page.summary(view), pair_page.every_layer(view)
    if layers:
        blocks += [Heading("Every layer"), *every]
    return Document(title, _about(view), tuple(blocks))


def _about(view: ModelView | PairView) -> str:
    if isinstance(view, PairView):
        parts = [f"{half.name} {size(half.bytes)}" for half in view.halves]
        if view.draft is not None and len(view.halves) == 1:
            none = "" if DRAFTS[view.draft].drafts_from != "text" else ": no weights"
            parts.append(f"draft {view.draft}{none}")
    else:
        parts = [
            f"{view.model_type}, {view.decoder_layers} decoder layers",
            f"hidden size {view.hidden_size:,}",
            f"{view.heads} heads and {view.kv_heads} KV heads of {view.head_dim}",
            f"vocabulary {view.vocabulary:,}{', head tied to the embedding' if view.tied else ''}",
        ]
    if view.calibration is not None:
        seen = view.calibration
        parts.append(f"measured on {seen.tokens:,} tokens of {seen.data} ({seen.texts} texts)")
    return " · ".join(parts)
