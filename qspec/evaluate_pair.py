"""The accuracy of a finished pair, measured anew: by this process, by vLLM, or by servers that run already."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import shutil
import sys

from qspec.bridges import compressed
from qspec.errors import RecipeError
from qspec.pipeline import Arms, Originals, measure_accuracy
from qspec.progress import Progress
from qspec.provenance import environment, staged_dir
from qspec.records import QuantizedModel
from qspec.schema.recipe import Backend, Recipe
from qspec.schema.results import Accuracy, Results, TaskResult
from qspec.stages.check import check, read_manifest, weight_digests
from qspec.stages.evaluate import SERVED
from qspec.stages.evaluate_served import Servers, evaluate_served, running, started
from qspec.stages.finished import asked, load_original, require_new
from qspec.stages.open_pair import compute_dtype, open_pair
from qspec.stages.rehearse import rehearse
from qspec.stages.report import report
from qspec.stages.serve import original_serving, serving


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
    made = Recipe.model_validate(read_manifest(pair).recipe)
    recipe = _by(asked(made, overrides, "evaluation"), backend)
    if more and not any("vllm" in task.backends for task in recipe.evaluation.tasks):
        rule = "goes to vLLM's servers, and no task is answered by vLLM"
        raise RecipeError(" ".join(more), rule, "drop it, or add --backend vllm")
    require_new(out)
    check(pair)
    with staged_dir(out) as part:
        job = Job(recipe, pair, compressed.read(pair / "target"), part, python or Path(sys.executable), progress, more)
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
