"""The main job: recipe in, proven pair and report out. It reads top to bottom; every value is made once."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
import shutil
from typing import TypeVar

import torch

from qspec.bridges import compressed, oneshot
from qspec.bridges.text import calibration_rows
from qspec.errors import OutputError, RecipeError
from qspec.nn.cuda_decoder import CudaDecoder
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.progress import Progress, setup_log
from qspec.provenance import (
    atomic_write,
    digest_of,
    environment,
    require_space,
    require_writable,
    sole_writer,
    staged_dir,
)
from qspec.records import LoadedModel, QuantizedModel, Tokenizer
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import (
    CalibrationSpec,
    FusionSpec,
    MlpDraft,
    ModelDraft,
    ModelSpec,
    Recipe,
    SelfDraft,
)
from qspec.schema.results import Accuracy, Record, Results, Speed
from qspec.stages.allocate import allocate_plan
from qspec.stages.bench import bench
from qspec.stages.bench_arm import Arm
from qspec.stages.build_plan import build_plan, validate_plan
from qspec.stages.calibrate import random_rows
from qspec.stages.check import check, check_tokenizers, read_manifest, real_vocab, weight_digests
from qspec.stages.distill import distill
from qspec.stages.draft_vocab import limited
from qspec.stages.evaluate import evaluate
from qspec.stages.fuse import fuse
from qspec.stages.kv_choice import choose_kv
from qspec.stages.load import load, resolve_arch
from qspec.stages.open_pair import LoadedPair, compute_dtype, engine_options, open_pair
from qspec.stages.package import package, refuse_guessed, seal, source_dtype, stored_dtype
from qspec.stages.pad import match_rows
from qspec.stages.pair_arms import original_arms, own_arms
from qspec.stages.planned import PlannedPair, plan_half, require_trained, resolve_model
from qspec.stages.prepare import prepare
from qspec.stages.preview import admit
from qspec.stages.processes import barrier, processes
from qspec.stages.rehearse import rehearse
from qspec.stages.report import report
from qspec.stages.sensitivity import kept_scores
from qspec.stages.sequential import require_judge
from qspec.stages.speculator_head import head_folder, train_head
from qspec.stages.store import Store
from qspec.stages.stream import Job, stream
from qspec.stages.transform import truncate_layers

R = TypeVar("R", bound=Record)

__all__ = ["check", "open_pair", "run"]


@dataclass(frozen=True)
class Originals:
    """The models as they came; `draft` is None for a draft without weights, or with a speculator's `head`."""

    target: LoadedModel
    draft: LoadedModel | None
    head: Path | None = None


def run(recipe: Recipe, out: str | Path, resume: bool = False, progress: Progress | None = None) -> Path:
    """Make, prove and measure the pair of `recipe` in `out`; returns `out/pair`, with the report in `out/report`.

    Raises `QspecError` for whatever cannot be done, before compute where that can be known. `resume` continues a run
    of the same recipe after its last finished stage; without it a folder that holds a run is refused.
    """
    out, progress = Path(out), progress or Progress()
    planned = admit(recipe)
    if _is_complete(recipe, out, resume):
        progress.say(f"{out} is complete already")
        return out / "pair"
    _require_room(planned, out)
    originals = load_originals(recipe, progress)
    rehearse(recipe, originals.target, planned.calibrates)
    with sole_writer(out):
        if not _is_complete(recipe, out, resume):  # another run may have taken it while models were loaded
            atomic_write(out / "recipe.yaml", recipe.dump())
            setup_log(out / "run.log")
            _make(recipe, originals, out, progress)
    progress.close()
    return out / "pair"


def _make(recipe: Recipe, originals: Originals, out: Path, progress: Progress) -> None:
    """Everything from the models to the report, in a folder that is this run's alone."""
    pair = out / "pair"
    if pair.exists():
        _same_source(pair, originals)
    else:
        target, draft = quantize_halves(recipe, originals, out / "work", progress)
        progress.stage("package and verify")
        package(target, draft, recipe, out, originals.head)
    arms = Arms(recipe, originals, open_pair(pair))
    accuracy = _kept(out / "work/accuracy.json", Accuracy, lambda: measure_accuracy(arms, out, progress))
    speed = None
    if recipe.device == "cpu" or isinstance(arms.pair.target, CudaDecoder):
        speed = _kept(out / "work/speed.json", Speed, lambda: _bench(arms, progress))
    results = _results(recipe, arms.pair, accuracy, speed)
    progress.stage("report")
    report(results, out / "report")
    seal(pair, results.model_dump(mode="json"), out / "report")
    shutil.rmtree(out / "work")


def _same_source(pair: Path, originals: Originals) -> None:
    """A resumed run goes on with the pair that it made, of the models that it made it from."""
    check(pair)
    made, given = read_manifest(pair).target.source.get("sha256"), originals.target.source.get("sha256")
    if made != given:
        rule = f"was made from weights with sha256 {made}, the model now has {given}"
        raise OutputError(str(pair), rule, "choose another --out")


def load_originals(recipe: Recipe, progress: Progress) -> Originals:
    """Both models. A draft that is not trained yet, or a head of other sizes, is refused before anything is loaded, and
    a draft with another tokenizer before compute.
    """
    progress.stage("load")
    require_trained(recipe.draft)
    head = head_folder(recipe.draft, resolve_arch(recipe.target)) if isinstance(recipe.draft, MlpDraft) else None
    target = load(recipe.target)
    if isinstance(recipe.draft, SelfDraft):
        layers = recipe.draft.layers
        return Originals(target, target if layers is None else truncate_layers(target, layers))
    if not isinstance(recipe.draft, ModelDraft):
        return Originals(target, None, head)
    draft = load(recipe.draft)
    check_tokenizers(target.tokenizer, draft.tokenizer)
    return Originals(target, match_rows(draft, target.arch.vocab_size))


def quantize_halves(
    recipe: Recipe, originals: Originals, work: Path, progress: Progress
) -> tuple[QuantizedModel, QuantizedModel | None]:
    """Both halves under their plans; each is kept in `work` when it is done, so that a resumed run reads it back."""
    text = Calibration(recipe.calibration, originals.target.tokenizer, recipe.seed, progress)
    target = quantized_half(recipe, recipe.target.quantization, originals.target, text, work / "target")
    if originals.draft is None:
        return target, None
    assert isinstance(recipe.draft, ModelDraft | SelfDraft)
    draft = quantized_half(recipe, recipe.draft.quantization, originals.draft, text, work / "draft")
    size = recipe.draft.draft_vocab
    return target, limited(draft, size, text.rows) if size else draft


def train_draft(recipe: Recipe, out: str | Path, progress: Progress | None = None) -> Path:
    """Quantize the target of `recipe` and train its draft on that, a head or a model; returns the folder of the draft.

    A call that was killed goes on where it stopped. Raises `RecipeError` for a recipe without such a draft.
    """
    out, progress, draft = Path(out), progress or Progress(), recipe.draft
    if not isinstance(draft, MlpDraft | ModelDraft) or draft.training is None:
        fix = "give it kind: mlp_speculator or model, and a training section"
        raise RecipeError(f"draft of {recipe.name}", "is nothing that is trained", fix)
    admit(recipe)
    require_writable(out)
    progress.stage("load")
    model = load(recipe.target)
    text = Calibration(recipe.calibration, model.tokenizer, recipe.seed, progress)
    with processes() as rank, nullcontext() if rank else sole_writer(out):
        if rank == 0:
            quantized_half(recipe, recipe.target.quantization, model, text, out / "target")
        barrier()
        target = compressed.read(out / "target")
        if isinstance(draft, MlpDraft):
            return train_head(recipe, target, out, progress)
        return distill(recipe, model, target, out, progress)


class Calibration:
    """Calibration text of a run: token rows, read once and only if something calibrates."""

    def __init__(self, spec: CalibrationSpec, tokenizer: Tokenizer, seed: int, progress: Progress) -> None:
        self.spec, self.seed, self._tokenizer, self.progress = spec, seed, tokenizer, progress

    @cached_property
    def rows(self) -> list[list[int]]:
        return calibration_rows(self.spec, self._tokenizer, self.seed)


def quantize_model(
    model: LoadedModel, spec: QuantSpec, fusion: FusionSpec, text: Calibration, work: Path, dtype: torch.dtype
) -> QuantizedModel:
    """One model under one plan: rotate, decide what needs the whole model, then piece by piece; fuse.

    `work` keeps the finished layers, for a run that is killed; `dtype` is of what is not quantized.
    """
    plan = build_plan(spec)
    if spec.engine == "llmcompressor":
        return fuse(oneshot.quantize(model, spec, plan, text.rows, work))
    model, notes = prepare(model, spec, text.seed)
    if spec.mixed is not None:
        scores = kept_scores(
            work / "sensitivity.json", model, text.rows, spec, dtype.itemsize, text.seed, text.progress
        )
        plan, said = allocate_plan(scores, spec, plan, model.arch)
        notes += said
    if plan.kv is not None and plan.kv.open:
        plan, chosen = choose_kv(model, plan, text.rows, progress=text.progress)
        notes += chosen
    job = Job(spec, fusion, plan, dtype, tuple(notes))
    store = Store(work / "pieces", job.key(model, text.spec, text.seed))

    def rows() -> list[list[int]]:
        drawn = random_rows(real_vocab(model.tokenizer), spec.random_rows, text.spec.length, text.seed)
        return [*text.rows, *drawn]

    return fuse(stream(model, job, rows, store, text.progress))


def quantized_half(
    recipe: Recipe, spec: QuantSpec, model: LoadedModel, text: Calibration, folder: Path
) -> QuantizedModel:
    """A half in `folder`: that of an earlier run, if it was made of the same model with the same settings."""
    dtype, note = stored_dtype(recipe, model), folder.with_name(f"{folder.name}.settings")
    told = [part.model_dump(mode="json") for part in (spec, recipe.fusion, recipe.calibration)]
    settings = digest_of([told, recipe.seed, str(dtype), model.arch.n_layers, dict(model.source)])
    if folder.exists() and note.exists() and note.read_text(encoding="utf-8") == settings:
        return compressed.read(folder)
    text.progress.stage(f"quantize {folder.name} ({spec.scheme}, {spec.engine})")
    work = folder.with_name(f"{folder.name}.work")
    quantized = quantize_model(model, spec, recipe.fusion, text, work, dtype)
    with staged_dir(folder) as part:
        compressed.write(quantized, part, dtype)
    atomic_write(note, settings)
    shutil.rmtree(work)
    return compressed.read(folder)


def quantize_checkpoint(
    model: ModelSpec,
    out: str | Path,
    calibration: CalibrationSpec | None = None,
    fusion: FusionSpec | None = None,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize one model alone and write it to `out` as a compressed-tensors checkpoint.

    Memory holds one layer at a time. A call that was killed goes on where it stopped when it is made again.
    """
    out, progress = Path(out), progress or Progress()
    spec, calibration = model.quantization, calibration or CalibrationSpec()
    arch, stored = resolve_model(model)
    planned = plan_half(model.model, arch, spec, stored, stored)
    validate_plan(planned.plan, planned.arch)
    if spec.engine == "qspec" and spec.method == "gptq":
        require_judge(range(calibration.samples))
    if out.exists():
        raise OutputError(str(out), "exists already", "choose another folder")
    require_writable(out)
    loaded = load(model)
    work, dtype = out.with_name(f".{out.name}.work"), source_dtype(loaded.config)
    text = Calibration(calibration, loaded.tokenizer, 0, progress)
    quantized = quantize_model(loaded, spec, fusion or FusionSpec(), text, work, dtype)
    with staged_dir(out) as part:
        compressed.write(quantized, part, dtype)
    shutil.rmtree(work)
    return compressed.read(out)


@dataclass(frozen=True)
class Arms:
    """What is compared: the models as they came, and the pair as it was packaged."""

    recipe: Recipe
    originals: Originals
    pair: LoadedPair

    @cached_property
    def original(self) -> AnyDecoder:
        """The original target, with room for as many tokens as the pair's."""
        return self.float_decoder(self.originals.target)

    def float_decoder(self, model: LoadedModel) -> AnyDecoder:
        length = min(self.pair.target.max_length, model.arch.max_positions)
        return open_decoder(model, max_length=length, **engine_options(self.recipe))

    def float_kv(self) -> AnyDecoder:
        """The pair's target with its KV cache in floats."""
        model = self.pair.model
        plain = replace(model, plan=replace(model.plan, kv=None), k_scale={}, v_scale={}, q_scale={})
        return open_decoder(plain, max_length=self.pair.target.max_length, **engine_options(self.recipe))


def measure_accuracy(arms: Arms, out: Path, progress: Progress) -> Accuracy:
    """The recipe's evaluation in this process; `out/work` is for what transformers reads."""
    progress.stage("evaluate")
    recipe, target = arms.recipe, arms.originals.target
    folders: dict[str, Path | None] = {"original": None, "quantized": arms.pair.folder / "target"}
    if any("hf" in task.backends for task in recipe.evaluation.tasks):
        folders["original"] = out / "work" / "original"
        with staged_dir(out / "work" / "original") as part:
            compressed.write_float(target, part, compute_dtype(recipe.dtype))
    eos_ids = target.arch.eos_ids
    float_kv = None if arms.pair.model.plan.kv is None else arms.float_kv
    return evaluate(
        arms.original,
        arms.pair.target,
        target.tokenizer,
        recipe,
        folders,
        progress,
        eos_ids=eos_ids,
        float_kv=float_kv,
    )


def _bench(arms: Arms, progress: Progress) -> Speed:
    """{original, quantized} x {plain, speculative}, and prompt lookup, which every draft with weights must beat."""
    progress.stage("benchmark")
    runs, model = {**original_runs(arms), **own_arms(arms.pair)}, arms.pair.model
    return bench(runs, model.tokenizer, arms.recipe, progress, eos_ids=model.arch.eos_ids, prove="quantized")


def original_runs(arms: Arms) -> dict[str, Arm]:
    """The arms of the models as they came. A draft that is a copy of the target is the pair's own for both."""
    target, draft = arms.originals.target, arms.originals.draft
    if draft is None or not isinstance(arms.recipe.draft, ModelDraft):
        return original_arms(arms.pair, (target, arms.original))
    return original_arms(arms.pair, (target, arms.original), (draft, arms.float_decoder(draft)))


def _results(recipe: Recipe, pair: LoadedPair, accuracy: Accuracy, speed: Speed | None) -> Results:
    notes = {"target": pair.model.notes}
    if pair.draft_model is not None:
        notes["draft"] = pair.draft_model.notes
    elsewhere = f"Speed was not measured: this run had no GPU, and the pair is for {recipe.device} (measure it there)."
    return Results(
        name=recipe.name,
        recipe=recipe.as_dict(),
        environment={**environment(), "engine": engine_name(pair.target)},
        digests=weight_digests(pair.manifest),
        accuracy=accuracy,
        speed=speed,
        notes=notes,
        limits=() if speed is not None else (elsewhere,),
    )


def _is_complete(recipe: Recipe, out: Path, resume: bool) -> bool:
    """Whether `out` holds the finished run of this recipe; raises `OutputError` if it may not be written to."""
    saved = out / "recipe.yaml"
    if not saved.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(str(out), "is not an empty folder", "choose another --out")
        return False
    if not resume:
        raise OutputError(str(out), "holds a run already", "continue it with --resume, or choose another --out")
    if Recipe.read(saved) != recipe:
        raise OutputError(str(out), "holds a run of another recipe", "choose another --out, or remove the folder")
    sealed = _is_sealed(out / "pair")
    if sealed:
        check(out / "pair")
    return sealed


def _require_room(planned: PlannedPair, out: Path) -> None:
    if planned.draft is not None:
        refuse_guessed(out / "pair")
    halves = [half for half in (planned.target.bytes, planned.drafting) if half is not None]
    # both halves lie in work/ and in pair/ until the run ends; the original once more for backend hf
    require_space(out, 2 * sum(half.resident for half in halves) + planned.target.plain.resident)


def _is_sealed(pair: Path) -> bool:
    return pair.exists() and any(entry.path.startswith("report/") for entry in read_manifest(pair).files)


def _kept(path: Path, kind: type[R], make: Callable[[], R]) -> R:
    """The record in `path`, or a new one, written there for a resumed run."""
    if path.exists():
        with suppress(ValueError):  # damaged: measure again
            return kind.model_validate_json(path.read_bytes())
    record = make()
    atomic_write(path, record.model_dump_json())
    return record
