"""The main job: recipe in, proven pair and report out. It reads top to bottom; every value is made once."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import shutil

from qspec.bridges import compressed
from qspec.errors import OutputError, RecipeError
from qspec.kept import Kept
from qspec.measure.arm import Arm
from qspec.measure.arms import Arms, Originals, load_originals, measure_accuracy, original_runs, own_arms, provenance_of
from qspec.measure.bench import bench
from qspec.measure.rehearse import rehearse
from qspec.memory import require_memory
from qspec.models.load import load, read_header, source_dtype
from qspec.models.vocab import limited
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.engines import engine_name, gpu_for
from qspec.pair.check import check, half_digests, measured, read_manifest
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package, refuse_guessed, seal, tidy
from qspec.planning.planned import PlannedPair, plan_half
from qspec.planning.preview import admit
from qspec.planning.remarks import findings, time_findings
from qspec.progress import Progress, setup_log
from qspec.provenance import (
    atomic_write,
    environment,
    is_leftover,
    require_space,
    require_writable,
    sole_writer,
    staged_dir,
)
from qspec.quantization.gptq import require_judge
from qspec.quantization.job import Calibration, quantize_model, quantized_half
from qspec.readable import duration
from qspec.records import QuantizedModel
from qspec.report.page import report
from qspec.report.verdict import blockers
from qspec.schema.drafts import DraftSpec, Eagle3Draft, MlpDraft, ModelDraft
from qspec.schema.manifest import Manifest
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec, Recipe, TaskSpec
from qspec.schema.results import Accuracy, Results, Speed
from qspec.schemes.build import validate_plan
from qspec.schemes.device_rules import raise_refused
from qspec.train.eagle3 import train_eagle3
from qspec.train.head import train_head
from qspec.train.model import distill
from qspec.train.processes import first_makes, processes

TRAINERS: dict[type[DraftSpec], Callable[..., Path]] = {
    MlpDraft: train_head,
    Eagle3Draft: train_eagle3,
    ModelDraft: distill,
}


_MORE = "give it more memory, take smaller models, or quantize alone, layer by layer: qspec quantize"

__all__ = ["check", "open_pair", "run"]


def run(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
    long: bool = False,
    despite: str = "",
) -> Path:
    """Make, prove and measure the pair of `recipe` in `out`; returns `out/pair`, with the report in `out/report`.

    Raises `QspecError` for whatever cannot be done, before compute where that can be known. `resume` continues a run
    of the same recipe after its last finished stage; without it a folder that holds a run is refused. `long`: whether
    it may take longer than `budget.minutes`, as a run may that has begun. A pair that is not ready
    (`report.verdict.obstacles`) is kept like any other; `despite`: why it is to be used all the same, which report,
    manifest and card then say.
    """
    out, progress, long = Path(out), progress or Progress(), long or resume
    planned = admit(_as_begun(recipe, out) if resume else recipe)
    recipe = planned.recipe
    _require_time(planned, long)
    if _is_complete(recipe, out, resume):
        with sole_writer(out):
            _clean(out)
            _excuse(out, despite)
        progress.say(f"{out} is complete already")
        return out / "pair"
    _require_room(planned, out)
    if gpu_for(recipe.device) is None:
        require_memory(f"run {recipe.name}", planned.run_need, _MORE)
    originals = load_originals(recipe, progress)
    items = rehearse(recipe, originals.target, planned.calibrates)
    _require_time(planned, long, items)
    progress.say(
        f"about {duration(sum(step.seconds for step in planned.steps(items)))} by estimate; qspec plan has its stages"
    )
    with sole_writer(out):
        if not _is_complete(recipe, out, resume):  # another run may have taken it while models were loaded
            atomic_write(out / "recipe.yaml", recipe.dump())
            setup_log(out / "run.log")
            warnings = tuple(str(finding) for finding in findings(planned) if finding.level == "warning")
            _make(recipe, originals, out, progress, despite, warnings)
    progress.close()
    return out / "pair"


def _excuse(out: Path, despite: str) -> None:
    """Put a reason that was given later into the report and the manifest of a finished pair that is not ready."""
    pair, results = out / "pair", measured(out / "pair", read_manifest(out / "pair"))
    if results is None or not despite or despite == results.despite or not blockers(results):
        return
    results = results.model_copy(update={"despite": despite})
    report(results, out / "report")
    seal(pair, results.model_dump(mode="json"), out / "report")
    _clean(out)


def _make(
    recipe: Recipe, originals: Originals, out: Path, progress: Progress, despite: str, warnings: Sequence[str]
) -> None:
    """Everything from the models to the report, in a folder that is this run's alone. warnings: of the plan."""
    for warning in warnings:
        progress.say(f"warning: {warning}")
    pair = out / "pair"
    if pair.exists():
        _same_source(pair, originals)
    else:
        target, draft = quantize_halves(recipe, originals, out / "work", progress)
        progress.stage("package and verify")
        package(target, draft, recipe, out, originals.head, warnings)
    arms = Arms(recipe, originals, open_pair(pair))
    kept, key = Kept(out / "work"), [recipe.as_dict(), half_digests(arms.pair.manifest)]
    fields = kept.value("accuracy", key, lambda: measure_accuracy(arms, out / "work", progress).model_dump(mode="json"))
    accuracy = Accuracy.model_validate(fields)
    speed = None
    if recipe.benchmark and (recipe.device == "cpu" or isinstance(arms.pair.target, CudaDecoder)):
        speed = Speed.model_validate(kept.value("speed", key, lambda: _bench(arms, progress).model_dump(mode="json")))
    engine = engine_name(arms.pair.target)
    progress.close()
    results = results_of(arms.pair.manifest, recipe, accuracy, speed, engine=engine)
    results = results.model_copy(update={"seconds": progress.seconds})
    if against := blockers(results):
        progress.say(f"not ready: {'; '.join(against)}")
        results = results.model_copy(update={"despite": despite})
    progress.stage("report")
    report(results, out / "report")
    seal(pair, results.model_dump(mode="json"), out / "report")
    _clean(out)


def _clean(out: Path) -> None:
    """Remove what a complete run needs no longer."""
    tidy(out / "pair")
    shutil.rmtree(out / "work", ignore_errors=True)


def _same_source(pair: Path, originals: Originals) -> None:
    """A resumed run goes on with the pair that it made, of the models that it made it from."""
    check(pair)
    made, given = read_manifest(pair).target.source.get("sha256"), originals.target.source.get("sha256")
    if made != given:
        rule = f"was made from weights with sha256 {made}, the model now has {given}"
        raise OutputError(str(pair), rule, "choose another --out")


def quantize_halves(
    recipe: Recipe, originals: Originals, work: Path, progress: Progress
) -> tuple[QuantizedModel, QuantizedModel | None]:
    """Both halves under their plans; each is kept in `work` when it is done, so that a resumed run reads it back."""
    text = Calibration(recipe.calibration, originals.target.tokenizer, recipe.seed, progress)
    target = compressed.read(quantized_half(recipe, recipe.target.quantization, originals.target, text, work, "target"))
    if originals.draft is None:
        return target, None
    spec, size = recipe.draft.quantized, recipe.draft.head_rows
    assert spec is not None, f"a draft of kind {recipe.draft.kind} is no model"
    draft = compressed.read(quantized_half(recipe, spec, originals.draft, text, work, "draft"))
    return target, limited(draft, size, text.rows) if size else draft


def train_draft(recipe: Recipe, out: str | Path, progress: Progress | None = None) -> Path:
    """Quantize the target of `recipe` and train its draft on that, a head or a model; returns the folder of the draft.

    A call that was killed goes on where it stopped. Raises `RecipeError` for a recipe without such a draft.
    """
    out, progress, draft = Path(out), progress or Progress(), recipe.draft
    if draft.trains is None:
        fix = "give it kind: eagle3, mlp_speculator or model, and a training section"
        raise RecipeError(f"draft of {recipe.name}", "is nothing that is trained", fix)
    planned = admit(recipe)
    require_writable(out)
    require_memory(f"training the draft of {recipe.name}", planned.training_need, "give it more memory")
    progress.stage("load")
    model = load(recipe.target)
    text = Calibration(recipe.calibration, model.tokenizer, recipe.seed, progress)
    with processes() as rank, nullcontext() if rank else sole_writer(out):
        half = partial(quantized_half, recipe, recipe.target.quantization, model, text, out, "target")
        return TRAINERS[type(draft)](recipe, draft, model, first_makes(half), out, progress)


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
    header = read_header(model)
    planned = plan_half(model.model, header.arch, spec, header.width(), header.width())
    validate_plan(planned.plan, planned.arch)
    if spec.engine == "qspec" and spec.method == "gptq":
        require_judge(range(calibration.samples))
    work = out.with_name(f".{out.name}.work")
    if out.exists():
        shutil.rmtree(work, ignore_errors=True)  # of a call that was killed once the checkpoint was there
        raise OutputError(str(out), "exists already", "choose another folder")
    require_writable(out)
    loaded = load(model)
    dtype = source_dtype(loaded.config)
    text = Calibration(calibration, loaded.tokenizer, 0, progress)
    quantized = quantize_model(loaded, spec, fusion or FusionSpec(), text, work, dtype)
    with staged_dir(out) as part:
        compressed.write(quantized, part, dtype)
    shutil.rmtree(work)
    return compressed.read(out)


def _bench(arms: Arms, progress: Progress) -> Speed:
    """{original, quantized} x {plain, speculative}, and prompt lookup, which every draft with weights must beat."""
    return measure_speed(arms.pair, {**original_runs(arms), **own_arms(arms.pair)}, progress)


def measure_speed(pair: LoadedPair, arms: Mapping[str, Arm], progress: Progress) -> Speed:
    """The benchmark of the pair's recipe on `arms`, and the proof that its drafts leave its output as it is."""
    progress.stage("benchmark")
    model = pair.model
    speed = bench(arms, model.tokenizer, pair.recipe, progress, eos_ids=model.arch.eos_ids, prove="quantized")
    return speed.model_copy(update={"provenance": provenance_of(pair, "pair")})


def results_of(
    manifest: Manifest, recipe: Recipe, accuracy: Accuracy | None = None, speed: Speed | None = None, **facts: str
) -> Results:
    """Results of a pair under `recipe`, measured here. facts: of the environment, beside versions and machine."""
    halves = {"target": manifest.target, "draft": manifest.draft}
    return Results(
        name=recipe.name,
        recipe=recipe.as_dict(),
        environment={**environment(), **facts},
        accuracy=accuracy or Accuracy(),
        speed=speed,
        notes={name: half.notes for name, half in halves.items() if half.notes},
        limits=tuple(f"Warned of: {warning}" for warning in manifest.warnings),
    )


def _is_complete(recipe: Recipe, out: Path, resume: bool) -> bool:
    """Whether `out` holds the finished run of this recipe; raises `OutputError` if it may not be written to."""
    saved = out / "recipe.yaml"
    if not saved.exists():
        if out.exists() and not (out.is_dir() and all(map(is_leftover, out.iterdir()))):
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


def _as_begun(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with the numbers of questions that the run in `out` began with: they follow from its machine."""
    if not (out / "recipe.yaml").exists():
        return recipe
    begun, spec = Recipe.read(out / "recipe.yaml").evaluation, recipe.evaluation
    if [task.name for task in begun.tasks] != [task.name for task in spec.tasks]:
        return recipe
    tasks = (
        task if task.limit is not None else task.model_copy(update={"limit": old.limit, "subjects": old.subjects})
        for task, old in zip(spec.tasks, begun.tasks, strict=True)
    )
    return recipe.model_copy(update={"evaluation": spec.model_copy(update={"tasks": tuple(tasks)})})


def _require_time(planned: PlannedPair, long: bool, items: Mapping[TaskSpec, int] | None = None) -> None:
    if not long:
        raise_refused(time_findings(planned, items))


def _require_room(planned: PlannedPair, out: Path) -> None:
    if planned.draft is not None:
        refuse_guessed(out / "pair")
    halves = [half for half in (planned.target.bytes, planned.drafting) if half is not None]
    # both halves lie in work/ and in pair/ until the run ends; the original once more for backend hf
    require_space(out, 2 * sum(half.resident for half in halves) + planned.target.plain.resident)


def _is_sealed(pair: Path) -> bool:
    return pair.exists() and any(entry.path.startswith("report/") for entry in read_manifest(pair).files)
