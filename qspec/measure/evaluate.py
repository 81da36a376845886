"""Accuracy: what quantization changed, measured on both arms over the same text and the same questions."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from qspec.bridges import harness
from qspec.bridges.harness import Sample, TaskScores
from qspec.errors import SourceError
from qspec.measure.fidelity import measure_fidelity
from qspec.measure.items import chance_of, compare_items, compare_likelihoods, score_interval
from qspec.measure.needle import measure_needles
from qspec.nn.lm import LM
from qspec.numerics.statistics.paired import holm
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import Recipe, TaskSpec
from qspec.schema.results import Accuracy, Fidelity, Measurement, SubTask, TaskResult, TaskRow

SERVED = ("vllm", "api")
"""Backends that answer in processes of their own, once there is a pair to serve."""
INCOMPARABLE = "so their scores cannot be compared"


def evaluate(
    original: LM,
    quantized: LM,
    tokenizer: Tokenizer,
    recipe: Recipe,
    hf_folders: Mapping[str, Path | None],
    progress: Progress,
    *,
    eos_ids: Collection[int] = (),
    float_kv: Callable[[], LM] | None = None,
) -> Accuracy:
    """Fidelity, needles and tasks of the recipe on both arms.

    hf_folders: transformers folders of `original` and `quantized` for tasks that ask for backend `hf`; where one is
    missing that backend is skipped, and the result says so. eos_ids: stop tokens of the model. float_kv: makes the
    quantized target with its KV cache in floats, which tells what needles the cache alone loses.
    """
    spec, skipped = recipe.evaluation, list[str]()
    texts: list[Fidelity] = []
    if spec.fidelity is not None:
        texts = measure_fidelity(original, quantized, tokenizer, spec.fidelity, progress)
    needles = None
    if spec.needle is not None:
        opened = {"original": lambda: original, "quantized": lambda: quantized}
        opened |= {"float_kv": float_kv} if float_kv else {}
        needles = measure_needles(opened, tokenizer, spec.needle, recipe.seed, progress)
    tasks: list[TaskResult] = []
    for task in spec.tasks:
        for backend in task.backends:
            folders = [hf_folders.get(arm) for arm in ("original", "quantized")]
            if backend == "qspec":
                arms = [harness.evaluate(lm, tokenizer, task, eos_ids, progress) for lm in (original, quantized)]
            elif backend in SERVED:
                skipped.append(f"{task.name} with backend {backend}: servers are asked by `qspec evaluate PAIR`")
                continue
            elif None in folders:
                skipped.append(f"{task.name} with backend hf: an arm has no transformers folder")
                continue
            else:
                arms = [harness.evaluate_folder(folder, task) for folder in folders if folder is not None]
            tasks.append(compare(task, backend, *arms))
    return Accuracy(
        fidelity=texts[0] if texts else None,
        domains=tuple(texts[1:]),
        needles=needles,
        tasks=tuple(tasks),
        skipped=tuple(skipped),
    )


def compare(task: TaskSpec, backend: str, original: TaskScores, quantized: TaskScores) -> TaskResult:
    """Pair two arms item by item. Raises `SourceError` when they did not answer the same prompts in the same way."""
    for name in original.condition.keys() | quantized.condition.keys():
        one, other = (arm.condition.get(name) for arm in (original, quantized))
        if one != other:
            rule = f"is {other!r} in the quantized arm, {INCOMPARABLE}"
            raise SourceError(f"{name} {one!r} of task {task.name}", rule, "serve both arms alike")
    rows = _pair(original.samples, quantized.samples)
    n, comparison = len(rows), compare_items([row.original for row in rows], [row.quantized for row in rows])
    a, b = (
        Measurement(
            metric=f"{arm.metric}, {name}",
            value=mean,
            unit="",
            n=n,
            ci=score_interval([sample.score for sample in arm.samples]),
            condition=arm.condition | arm.own,
        )
        for name, arm, mean in zip(("original", "quantized"), (original, quantized), comparison.means, strict=True)
    )
    return TaskResult(
        task=task.name,
        backend=backend,
        original=a,
        quantized=b,
        difference=comparison.difference,
        recovery=comparison.recovery,
        recovery_ci=comparison.recovery_ci,
        only_original=comparison.only_a,
        only_quantized=comparison.only_b,
        p_value=comparison.p_value,
        detectable=comparison.difference.detectable or 1.0,
        likelihood=compare_likelihoods([r.original_likelihood for r in rows], [r.quantized_likelihood for r in rows]),
        verdict=comparison.verdict("quantized", chance_of(task.name, original.condition)),
        original_cut=sum(r.original_cut for r in rows) / n,
        quantized_cut=sum(r.quantized_cut for r in rows) / n,
        prompts_cut=sum(r.prompt_cut for r in rows),
        sub_tasks=_sub_tasks(rows),
        rows=tuple(rows),
    )


def _pair(original: Iterable[Sample], quantized: Iterable[Sample]) -> list[TaskRow]:
    first = {(s.task, s.doc_id): s for s in original}
    second = {(s.task, s.doc_id): s for s in quantized}
    same = first.keys() == second.keys() and all(
        (a.doc_hash, a.prompt_hash) == (second[key].doc_hash, second[key].prompt_hash) for key, a in first.items()
    )
    if not same or not first:
        rule = f"the arms were not asked the same questions, {INCOMPARABLE}"
        raise SourceError(f"{len(first)} and {len(second)} items", rule, "run both arms in one go with one tokenizer")
    return [_row(a, second[key]) for key, a in first.items()]


def _row(a: Sample, b: Sample) -> TaskRow:
    return TaskRow(
        task=a.task,
        doc_id=a.doc_id,
        doc_hash=a.doc_hash,
        prompt_hash=a.prompt_hash,
        original=a.score,
        quantized=b.score,
        original_cut=a.cut,
        quantized_cut=b.cut,
        original_answer=a.answer,
        quantized_answer=b.answer,
        original_likelihood=a.likelihood,
        quantized_likelihood=b.likelihood,
        prompt_cut=a.prompt_cut or b.prompt_cut,
    )


def _sub_tasks(rows: list[TaskRow]) -> tuple[SubTask, ...]:
    names = dict.fromkeys(row.task for row in rows)
    groups = {name: [row for row in rows if row.task == name] for name in names}
    comparisons = {name: compare_items([r.original for r in g], [r.quantized for r in g]) for name, g in groups.items()}
    tested = [name for name, items in comparisons.items() if items.p_value is not None]
    adjusted = dict(zip(tested, holm([comparisons[name].p_value or 0.0 for name in tested]), strict=True))
    return tuple(
        SubTask(
            task=name,
            n=len(groups[name]),
            original=items.means[0],
            quantized=items.means[1],
            difference=items.difference,
            p_value=adjusted.get(name),
        )
        for name, items in comparisons.items()
    )
