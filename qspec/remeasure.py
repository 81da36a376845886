"""The accuracy of a finished pair, measured anew: by this process, by vLLM, or by servers that run already."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
import shutil
import sys

from qspec.bridges import compressed
from qspec.errors import OutputError, PairError, RecipeError, SourceError
from qspec.measure.arm import Arm
from qspec.measure.arms import Arms, Originals, measure_accuracy, original_runs, own_arms
from qspec.measure.bench import bench
from qspec.measure.evaluate import SERVED
from qspec.measure.rehearse import rehearse
from qspec.measure.served import Servers, evaluate_served, running, started
from qspec.models.load import load, locate
from qspec.models.vocab import match_rows
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.engines import engine_name
from qspec.pair.check import check, examine, measured, overridden, provenance, read_manifest, recipe_of, stale
from qspec.pair.drafters.registry import kind_of
from qspec.pair.open import LoadedPair, compute_dtype, open_pair
from qspec.pair.package import seal
from qspec.pipeline import measure_speed, results_of
from qspec.planning.duration import settled
from qspec.planning.planned import plain_cost
from qspec.progress import Progress
from qspec.provenance import require_writable, sole_writer, staged_dir
from qspec.records import LoadedModel, QuantizedModel
from qspec.report.page import report
from qspec.report.quality import lost_acceptance
from qspec.report.verdict import losslessness
from qspec.schema.manifest import Half, Manifest
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Backend, BenchmarkSpec, Recipe
from qspec.schema.results import Accuracy, Results, TaskResult
from qspec.serving.vllm import original_serving, serving


@dataclass(frozen=True)
class Remeasurement:
    """A pair that is measured again, and the means for it.

    python: of an environment with vLLM; more: arguments of its servers.
    """

    recipe: Recipe
    pair: Path
    target: QuantizedModel
    work: Path
    python: Path
    progress: Progress
    more: Sequence[str] = ()

    def names(self, backend: Backend) -> bool:
        """Whether a task wants it."""
        return any(backend in task.backends for task in self.recipe.evaluation.tasks)

    def evaluated(self, backend: str, servers: Servers) -> list[TaskResult]:
        target = self.target
        return evaluate_served(self.recipe, backend, servers, target.tokenizer, target.arch.eos_ids, self.progress)


def evaluate_pair(
    pair: str | Path,
    out: str | Path,
    overrides: tuple[str, ...] = (),
    backend: Backend | None = None,
    python: Path | None = None,
    progress: Progress | None = None,
    more: Sequence[str] = (),
    keep: bool = False,
    whole: bool = False,
) -> Results:
    """Run the evaluation of a pair's recipe under `overrides`; results and report go to `out`.

    backend: who answers all tasks, in place of what each names. python: interpreter of vLLM's environment; more:
    arguments of its servers, which come last. whole: every question of the tasks, however long that takes. keep:
    whether it takes the place of the same measurements in the pair's own report and manifest; the others stay. Raises
    `RecipeError` for overrides of anything but the evaluation, and, to be kept, for answers of what may be another
    model.
    """
    pair, out, progress = Path(pair), Path(out), progress or Progress()
    made = recipe_of(read_manifest(pair))
    recipe = _by(recipe_under(made, overrides, "evaluation"), backend)
    if more and not any("vllm" in task.backends for task in recipe.evaluation.tasks):
        rule = "goes to vLLM's servers, and no task is answered by vLLM"
        raise RecipeError(" ".join(more), rule, "drop it, or add --backend vllm")
    if keep:
        _require_own(recipe, more)
    require_new(out)
    with sole_writer(pair) if keep else nullcontext(), staged_dir(out) as part:
        target, manifest, work = examine(pair)[1]["target"], read_manifest(pair), part / "work"
        recipe = recipe.whole() if whole else settled(recipe, plain_cost(recipe, target.arch))
        job = Remeasurement(recipe, pair, target, work, python or Path(sys.executable), progress, more)
        served = Accuracy(tasks=(*_by_running(job), *_by_vllm(job)))
        accuracy = served.measured_on(provenance(manifest, recipe, "target")).updated(_own(job))
        shutil.rmtree(work, ignore_errors=True)
        return write_results(results_of(manifest, recipe, accuracy), part, pair if keep else None, progress)


def _require_own(recipe: Recipe, more: Sequence[str]) -> None:
    """Refuse to keep what may be of another model than the pair's target."""
    fix = "leave out --keep"
    if any("api" in task.backends for task in recipe.evaluation.tasks):
        raise RecipeError("backend api", "does not show that the server runs this pair's files", fix)
    for reason in overridden(more):
        raise RecipeError(" ".join(more), reason, fix)


def _by(recipe: Recipe, backend: Backend | None) -> Recipe:
    """With all tasks answered by one backend."""
    if backend is None:
        return recipe
    tasks = tuple(task.model_copy(update={"backends": (backend,)}) for task in recipe.evaluation.tasks)
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"tasks": tasks})})


def _by_running(job: Remeasurement) -> list[TaskResult]:
    if not job.names("api"):
        return []
    with running(job.recipe.evaluation.api) as servers:
        return job.evaluated("api", servers)


def _by_vllm(job: Remeasurement) -> list[TaskResult]:
    if not job.names("vllm"):
        return []
    recipe, arch, original = job.recipe, job.target.arch, job.work / "original"
    context = min(recipe.speculation.max_length or arch.max_positions, arch.max_positions)
    model = load_original(recipe.target, read_manifest(job.pair).target)
    compressed.write_float(model, original, compute_dtype(recipe.dtype))
    jobs = {
        "original": original_serving(original, recipe, arch, context, job.more),
        "quantized": serving(job.pair, draft=False, more=["--max-model-len", str(context), *job.more]),
    }
    with started(job.python, jobs, context) as servers:
        tasks = job.evaluated("vllm", servers)
    shutil.rmtree(original)
    return tasks


def _own(job: Remeasurement) -> Accuracy:
    """Fidelity, needles and the tasks that are answered in this process."""
    spec = job.recipe.evaluation
    tasks = tuple(
        task.model_copy(update={"backends": here})
        for task in spec.tasks
        if (here := tuple(backend for backend in task.backends if backend not in SERVED))
    )
    own = {"evaluation": spec.model_copy(update={"tasks": tasks}), "benchmark": None}
    recipe = job.recipe.model_copy(update=own)
    if recipe.evaluation.off:
        return Accuracy()
    job.progress.stage("load")
    manifest = read_manifest(job.pair)
    target = load_original(recipe.target, manifest.target)
    rehearse(recipe, target, calibrates=False)
    originals = Originals(target, None)
    with suppress(SourceError):  # a draft that is not here any more: the target is what is evaluated
        head = None if recipe.draft.trains is not None else kind_of(recipe.draft).require_files(target.arch)
        originals = Originals(target, _draft_before(recipe, manifest, target), head)
    return measure_accuracy(Arms(recipe, originals, open_pair(job.pair)), job.work, job.progress)


def bench_pair(
    pair: str | Path,
    out: str | Path,
    overrides: tuple[str, ...] = (),
    original: bool = True,
    keep: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Run the benchmark of a pair's recipe under `overrides`; results and report go to `out`.

    original: whether the model that the pair was made from, read where its recipe has it, is measured beside it. keep:
    whether speed and proof take the place of those in the pair's own report and manifest; its accuracy stays there, and
    goes on to say which files it was measured on.
    Raises `RecipeError` for overrides of more than benchmark and, without `keep`, speculation, and `PairError` on
    another kind of device than the pair's.
    """
    pair, out, progress = Path(pair), Path(out), progress or Progress()
    sections = ("benchmark",) if keep else ("benchmark", "speculation")
    recipe = recipe_under(recipe_of(read_manifest(pair)), overrides, *sections)
    recipe = recipe.model_copy(update={"benchmark": recipe.timing})
    require_new(out)
    with sole_writer(pair) if keep else nullcontext(), staged_dir(out) as part:
        check(pair)
        progress.stage("load")
        opened = open_pair(pair, recipe=recipe)
        _require_device(opened)
        arms = {**(_original_arms(opened) if original else {}), **own_arms(opened)}
        speed = measure_speed(opened, arms, progress)
        measured = results_of(opened.manifest, recipe, speed=speed, engine=engine_name(opened.target))
        results = write_results(measured, part, pair if keep else None, progress)
    progress.close()
    return results


def _require_device(pair: LoadedPair) -> None:
    device = pair.recipe.device
    if device != "cpu" and not isinstance(pair.target, CudaDecoder):
        rule = "is what the pair is for, and its speed on this machine's CPU would say nothing of it"
        raise PairError(f"device {device}", rule, "measure it on a machine with that device")


def _original_arms(pair: LoadedPair) -> dict[str, Arm]:
    """The models that the pair was made from. A draft that was trained for it comes as the pair has it."""
    recipe, manifest = pair.recipe, pair.manifest
    try:
        target = load_original(recipe.target, manifest.target)
        draft = _draft_before(recipe, manifest, target) if kind_of(recipe.draft).separate else None
    except SourceError as error:
        raise SourceError(error.value, error.rule, f"{error.fix}, or leave it out: --no-original") from error
    return original_runs(Arms(recipe, Originals(target, draft), pair))


def _draft_before(recipe: Recipe, manifest: Manifest, target: LoadedModel) -> LoadedModel | None:
    """The draft model before it was quantized; None for one that was trained, which the pair alone may have."""
    kind, source = kind_of(recipe.draft), recipe.draft.source
    if recipe.draft.trains is not None:
        return None
    if not kind.separate or source is None:
        return kind.original(target)
    return match_rows(load_original(source, manifest.draft), target.arch.vocab_size)


def recipe_under(made: Recipe, overrides: tuple[str, ...], *sections: str) -> Recipe:
    """A pair's recipe under `overrides`; raises `RecipeError` where they change more than these sections of it."""
    recipe = Recipe.of(made.as_dict(), overrides, made.name)
    if recipe != made.model_copy(update={section: getattr(recipe, section) for section in sections}):
        rule = f"changes more than the {' and the '.join(sections)}"
        raise RecipeError(", ".join(overrides), rule, "make another pair with qspec run --set")
    return recipe


def require_new(out: Path) -> None:
    """Refuse an output folder that is there, or cannot be made: results of an earlier measurement are kept."""
    if out.exists():
        raise OutputError(str(out), "exists already", "choose another --out")
    require_writable(out)


def load_original(spec: ModelSpec, half: Half) -> LoadedModel:
    """The model that a half was made from, of the Hub in that revision; raises `SourceError` for other weights."""
    made_from = half.source
    if locate(spec).path is None:
        spec = spec.model_copy(update={"revision": made_from.get("revision") or spec.revision})
    model = load(spec)
    if made_from.get("sha256") != model.source["sha256"]:
        rule = f"has weights with sha256 {model.source['sha256']}, the pair was made from {made_from.get('sha256')}"
        raise SourceError(spec.model, rule, "bring back the weights that its pair.json names")
    return model


def write_results(new: Results, folder: Path, pair: Path | None, progress: Progress) -> Results:
    """Report on what was measured in `folder`; returns that.

    pair: the one to put it into, in place of the same measurements and beside all others; None leaves the pair alone.
    """
    if pair is None:
        report(new, folder)
        return new
    manifest = read_manifest(pair)
    before = measured(pair, manifest)
    results = before.updated(new) if before is not None else new
    report(results, folder)
    seal(pair, results.model_dump(mode="json"), folder)
    for reason in stale(manifest, results):
        progress.say(f"still to be measured again: {reason}")
    return results


def prove_pair(folder: Path) -> list[str]:
    """A sentence for each finding. Raises `PairError` if drafts change the output, or none of them is of use."""
    pair = open_pair(folder)
    quick = BenchmarkSpec(prompts=pair.recipe.timing.prompts, max_new_tokens=48, repeats=1)
    recipe = pair.recipe.model_copy(update={"benchmark": quick})
    plain, drafted = list(own_arms(pair).values())[:2]
    arms = {"pair, plain": plain, "pair": replace(drafted, new_drafter=None)}
    tokenizer, eos_ids = pair.model.tokenizer, pair.model.arch.eos_ids
    speed = bench(arms, tokenizer, recipe, Progress(), eos_ids=eos_ids, prove="pair, plain")
    findings = [*losslessness(speed), *lost_acceptance(speed)]
    wrong = [finding.text for finding in findings if finding.tone in ("bad", "danger")]
    if wrong:
        raise PairError(str(folder), "; ".join(wrong), "report it with the pair; --no-draft serves it meanwhile")
    pooled = [a for a in speed.acceptance if a.category == "all"]
    kept = [f"{a.accepted} of {a.drafted} drafted tokens stand" for a in pooled] or ["no token was drafted"]
    return [*(finding.text for finding in findings), *kept]
