"""A half from its original: text, rewrites, choices of the whole model, then piece by piece; kept while it is made."""

from dataclasses import replace
from functools import cached_property
import math
from pathlib import Path
import shutil
from typing import Any

import torch

from qspec.bridges import compressed, oneshot
from qspec.bridges.companions import left_out_notes
from qspec.bridges.text import calibration_rows
from qspec.kept import Kept
from qspec.memory import Need, require_memory
from qspec.models.load import source_dtype, stored_dtype
from qspec.models.vocab import real_vocab
from qspec.nn.eager.linear import merge_obstacle
from qspec.nn.engines import gpu_for
from qspec.progress import Progress
from qspec.provenance import sha256_file
from qspec.quantization.allocate import allocate_plan
from qspec.quantization.calibrate import random_rows
from qspec.quantization.kv_choice import choose_kv
from qspec.quantization.pieces import CPU, at_work, placed
from qspec.quantization.rotate import prepare
from qspec.quantization.sensitivity import basis, sensitivity
from qspec.quantization.stream import StreamJob, stream
from qspec.records import LoadedModel, QuantizedModel, Tokenizer
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec, Recipe
from qspec.schema.scores import Scores
from qspec.schemes.build import build_plan, needs_statistics

_MORE = "give it more memory, fewer or shorter calibration.samples, or take a smaller model"

SHARE = 0.7
"""The share of a GPU's free memory that a whole model may take."""


def kept_apart(quant: QuantizedModel) -> list[str]:
    """Notes on groups that no runtime can merge into one matmul (`nn.eager.linear.merge_obstacle`)."""
    groups = quant.arch.fused_groups()
    reasons = {group: merge_obstacle([quant.linears.get(name) for name in group]) for group in groups}
    return [f"{', '.join(group)} stay separate: {reason}." for group, reason in reasons.items() if reason]


class Calibration:
    """Calibration text of a run: token rows, read once and only if something calibrates."""

    def __init__(self, spec: CalibrationSpec, tokenizer: Tokenizer, seed: int, progress: Progress) -> None:
        self.spec, self.seed, self._tokenizer, self.progress = spec, seed, tokenizer, progress

    @cached_property
    def rows(self) -> list[list[int]]:
        return calibration_rows(self.spec, self._tokenizer, self.seed)


def quantize_model(
    model: LoadedModel,
    spec: QuantSpec,
    fusion: FusionSpec,
    text: Calibration,
    work: Path,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> QuantizedModel:
    """One model under one plan: rotate, decide what needs the whole model, then piece by piece.

    `work` keeps the finished layers, for a run that is killed; `dtype` is of what is not quantized. device: where
    calibration and rounding compute. What needs the whole model in memory goes there where it fits.
    """
    require_memory(f"quantizing {model.source.get('model', 'the model')}", _need(model, spec, text.spec), _MORE)
    made = _quantized(model, spec, fusion, text, work, dtype, device)
    return replace(made, notes=(*made.notes, *kept_apart(made), *left_out_notes(model.left_out)))


def _need(model: LoadedModel, spec: QuantSpec, text: CalibrationSpec) -> Need:
    """The embedding and one layer in float32 beside the hidden states of the text, before and behind that layer.

    llm-compressor holds the whole model instead.
    """
    arch, plan = model.arch, build_plan(spec)
    layer = max(sum(math.prod(arch.linear_shape(x)) for x in arch.layer_linears(name)) for name in arch.layers)
    embedding = arch.vocab_size * arch.hidden_size
    if spec.engine == "llmcompressor":
        return Need(4 * (arch.n_layers * layer + embedding))
    calibrates = needs_statistics(plan.resolve(arch.linears()), plan, spec) and not text.chat_template
    states = 2 * text.samples * text.length * arch.hidden_size if calibrates else 0
    return Need(source_dtype(model.config).itemsize * embedding + 4 * (layer + states))


def _quantized(
    model: LoadedModel,
    spec: QuantSpec,
    fusion: FusionSpec,
    text: Calibration,
    work: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedModel:
    plan = build_plan(spec)
    if spec.engine == "llmcompressor":
        return oneshot.quantize(model, spec, plan, text.rows, work)
    model, notes = prepare(model, spec, text.seed)
    if spec.mixed is not None:
        here = device if spec.mixed.metric == "output" or _holds(device, model) else CPU
        measured = placed(model, here), text.rows, spec, dtype.itemsize, text.seed

        def score() -> Any:
            with at_work(here):
                return sensitivity(*measured, text.progress).model_dump(mode="json")

        scores = Scores.model_validate(Kept(work).value("sensitivity", basis(*measured).model_dump(), score))
        plan, decided = allocate_plan(scores, spec, plan, model.arch)
        notes += decided
    if plan.kv is not None and plan.kv.open:
        here = device if _holds(device, model) else CPU
        with at_work(here):
            plan, chosen = choose_kv(placed(model, here), plan, text.rows, progress=text.progress)
        notes += chosen
    job = StreamJob(spec, fusion, plan, dtype, tuple(notes), device)

    def rows() -> list[list[int]]:
        drawn = random_rows(real_vocab(model.tokenizer), spec.random_rows, text.spec.length, text.seed)
        return [*text.rows, *drawn]

    return stream(model, job, rows, job.key(model, text.spec, text.seed), work, text.progress)


def _holds(device: torch.device, model: LoadedModel) -> bool:
    """Whether a GPU has memory for all of a model in float32, and for what its passes take."""
    if device.type != "cuda":
        return True
    weights = sum(math.prod(model.arch.linear_shape(name)) for name in model.arch.linears())
    weights += 2 * model.arch.vocab_size * model.arch.hidden_size
    return 4 * weights < SHARE * torch.cuda.mem_get_info(device)[0]


def quantized_half(
    recipe: Recipe, spec: QuantSpec, model: LoadedModel, text: Calibration, folder: Path, name: str
) -> Path:
    """The folder of a half: made below `folder`, unless it was made there of the same model with the same settings."""
    dtype, work = stored_dtype(recipe, model), folder / f"{name}.work"
    sections = [part.model_dump(mode="json") for part in (spec, recipe.fusion, recipe.calibration)]
    beside = {name: sha256_file(path) for name, path in model.files.items()}

    def make(part: Path) -> None:
        text.progress.stage(f"quantize {name} ({spec.scheme}, {spec.engine})")
        device = gpu_for(recipe.device) or CPU
        compressed.write(quantize_model(model, spec, recipe.fusion, text, work, dtype, device), part, dtype)

    settings = [sections, recipe.seed, str(dtype), model.arch.n_layers, dict(model.source), beside]
    entry = Kept(folder).entry(name, settings, make)
    shutil.rmtree(work, ignore_errors=True)
    return entry.folder
