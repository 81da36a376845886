"""The accuracy of a finished pair, measured anew: by this process, by vLLM, or by servers that run already."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from qspec.pair.check import check, examine, measured, read_manifest, recipe_of, weight_digests
from qspec.pair.drafters.registry import kind_of
from qspec.pair.open import LoadedPair, compute_dtype, open_pair
from qspec.pair.package import seal
from qspec.progress import Progress
from qspec.provenance import environment, require_writable, staged_dir
from qspec.records import LoadedModel, QuantizedModel
from qspec.report.page import report
from qspec.report.verdict import losslessness
from qspec.schema.manifest import Half
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Backend, BenchmarkSpec, Recipe
from qspec.schema.results import Accuracy, Results, TaskResult
from qspec.serving.vllm import original_serving, serving


@dataclass(frozen=True)
class Job:
    """What is measured, of which pair, with what at hand.

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

    def asked(self, backend: str, servers: Servers) -> list[TaskResult]:
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
) -> Results:
    """Run the evaluation of a pair's recipe under `overrides`; results and report go to `out`.

    backend: who answers all tasks, in place of what each names. python: interpreter of vLLM's environment; more:
    arguments of its servers, which come last. Raises `RecipeError` for overrides of anything but the evaluation.
    """
    pair, out, progress = Path(pair), Path(out), progress or Progress()
    made = recipe_of(read_manifest(pair))
    recipe = _by(asked(made, overrides, "evaluation"), backend)
    if more and not any("vllm" in task.backends for task in recipe.evaluation.tasks):
        rule = "goes to vLLM's servers, and no task is answered by vLLM"
        raise RecipeError(" ".join(more), rule, "drop it, or add --backend vllm")
    require_new(out)
    target = examine(pair)[1]["target"]
    with staged_dir(out) as part:
        job = Job(recipe, pair, target, part, python or Path(sys.executable), progress, more)
        served = [*_by_running(job), *_by_vllm(job)]
        accuracy = _own(job)
        results = Results(
            name=recipe.name,
            recipe=recipe.as_dict(),
            environment=environment(),
            digests=weight_digests(read_manifest(pair)),
            accuracy=accuracy.model_copy(update={"tasks": (*accuracy.tasks, *served)}),
            limits=("Speed was not measured in this run.",),
        )
        report(results, part)
    return results


def _by(recipe: Recipe, backend: Backend | None) -> Recipe:
    """With all tasks answered by one backend."""
    if backend is None:
        return recipe
    tasks = tuple(task.model_copy(update={"backends": (backend,)}) for task in recipe.evaluation.tasks)
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"tasks": tasks})})


def _by_running(job: Job) -> list[TaskResult]:
    if not job.names("api"):
        return []
    with running(job.recipe.evaluation.api) as servers:
        return job.asked("api", servers)


def _by_vllm(job: Job) -> list[TaskResult]:
    if not job.names("vllm"):
        return []
    recipe, arch, original = job.recipe, job.target.arch, job.work / "original"
    context = min(recipe.speculation.max_length or arch.max_positions, arch.max_positions)
    model = load_original(recipe.target, read_manifest(job.pair).target)
    compressed.write_float(model, original, compute_dtype(recipe.dtype))
    jobs = {
        "original": original_serving(original, recipe, context, job.more),
        "quantized": serving(job.pair, draft=False, more=["--max-model-len", str(context), *job.more]),
    }
    with started(job.python, jobs, context) as servers:
        found = job.asked("vllm", servers)
    shutil.rmtree(original)
    return found


def _own(job: Job) -> Accuracy:
    """Fidelity, needles and the tasks that are answered in this process."""
    spec = job.recipe.evaluation
    tasks = tuple(
        task.model_copy(update={"backends": own})
        for task in spec.tasks
        if (own := tuple(backend for backend in task.backends if backend not in SERVED))
    )
    if not (spec.fidelity or spec.needle or tasks):
        return Accuracy()
    recipe = job.recipe.model_copy(update={"evaluation": spec.model_copy(update={"tasks": tasks})})
    job.progress.stage("load")
    target = load_original(recipe.target, read_manifest(job.pair).target)
    rehearse(recipe, target, calibrates=False)
    arms = Arms(recipe, Originals(target, None), open_pair(job.pair))
    return measure_accuracy(arms, job.work, job.progress)


NO_ACCURACY = "Accuracy was not measured in this run."


EARLIER = "Accuracy was measured earlier"


NO_ORIGINAL = "The original was not run: nothing here is a speedup over it."


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
    whether speed and proof take the place of those in the pair's own report and manifest; its accuracy stays there.
    Raises `RecipeError` for overrides of more than benchmark and, without `keep`, speculation, and `PairError` on
    another kind of device than the pair's.
    """
    pair, out, progress = Path(pair), Path(out), progress or Progress()
    manifest = read_manifest(pair)
    sections = ("benchmark",) if keep else ("benchmark", "speculation")
    recipe = asked(recipe_of(manifest), overrides, *sections)
    require_new(out)
    check(pair)
    with staged_dir(out) as part:
        progress.stage("load")
        opened = open_pair(pair, recipe=recipe)
        _require_device(opened)
        arms = {**(_originals(opened) if original else {}), **own_arms(opened)}
        progress.stage("benchmark")
        model = opened.model
        speed = bench(arms, model.tokenizer, recipe, progress, eos_ids=model.arch.eos_ids, prove="quantized")
        results = Results(
            name=recipe.name,
            recipe=recipe.as_dict(),
            environment={**environment(), "engine": engine_name(opened.target)},
            digests=weight_digests(manifest),
            speed=speed,
            limits=(NO_ACCURACY, *(() if original else (NO_ORIGINAL,))),
        )
        if keep:
            results = _beside_accuracy(results, measured(pair))
        report(results, part)
    if keep:
        seal(pair, results.model_dump(mode="json"), out)
    progress.close()
    return results


def _beside_accuracy(results: Results, before: Results | None) -> Results:
    """With the accuracy that was measured of the same halves earlier, and where."""
    if before is None or before.digests != results.digests or before.accuracy == Accuracy():
        return results
    where = before.environment.get("cpu", "another machine")
    first = f"{EARLIER} ({where}, qspec {before.environment.get('qspec', 'unknown')})."
    earlier = next((limit for limit in before.limits if limit.startswith(EARLIER)), first)
    limits = (earlier, *(limit for limit in results.limits if limit != NO_ACCURACY))
    told = results.recipe | {"evaluation": before.recipe.get("evaluation")}
    return results.model_copy(
        update={"accuracy": before.accuracy, "notes": before.notes, "limits": limits, "recipe": told}
    )


def _require_device(pair: LoadedPair) -> None:
    device = pair.recipe.device
    if device != "cpu" and not isinstance(pair.target, CudaDecoder):
        rule = "is what the pair is for, and its speed on this machine's CPU would say nothing of it"
        raise PairError(f"device {device}", rule, "measure it on a machine with that device")


def _originals(pair: LoadedPair) -> dict[str, Arm]:
    """The models that the pair was made from. A draft that was trained for it comes as the pair has it."""
    recipe = pair.recipe
    draft: LoadedModel | None = None
    try:
        target = load_original(recipe.target, pair.manifest.target)
        source = recipe.draft.source
        if kind_of(recipe.draft).separate and source is not None and recipe.draft.trains is None:
            draft = match_rows(load_original(source, pair.manifest.draft), target.arch.vocab_size)
    except SourceError as error:
        raise SourceError(error.value, error.rule, f"{error.fix}, or leave it out: --no-original") from error
    return original_runs(Arms(recipe, Originals(target, draft), pair))


def asked(made: Recipe, overrides: tuple[str, ...], *sections: str) -> Recipe:
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


def prove_pair(folder: Path) -> list[str]:
    """What was found, a sentence each. Raises `PairError` if drafts change the output."""
    pair = open_pair(folder)
    quick = BenchmarkSpec(prompts=pair.recipe.benchmark.prompts, max_new_tokens=48, repeats=1)
    recipe = pair.recipe.model_copy(update={"benchmark": quick})
    arms = {"pair, plain": Arm(pair.target), "pair": Arm(pair.target, pair.drafter, pair.policy)}
    tokenizer, eos_ids = pair.model.tokenizer, pair.model.arch.eos_ids
    speed = bench(arms, tokenizer, recipe, Progress(), eos_ids=eos_ids, prove="pair, plain")
    found = losslessness(speed)
    wrong = [finding.text for finding in found if finding.tone == "bad"]
    if wrong:
        raise PairError(str(folder), "; ".join(wrong), "report it with the pair; --no-draft serves it meanwhile")
    return [finding.text for finding in found]
