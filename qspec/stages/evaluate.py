"""Accuracy: what quantization changed, measured on both arms over the same text and the same questions."""

from collections.abc import Collection, Iterable, Mapping
import math
from pathlib import Path

import torch
from torch import Tensor

from qspec.bridges import harness
from qspec.bridges.harness import Sample, Scores
from qspec.bridges.text import origin, windows
from qspec.errors import SourceError
from qspec.nn.lm import LM
from qspec.numerics.fidelity import kl_divergence, nll, top1_agreement
from qspec.numerics.paired import detectable_ratio, holm
from qspec.numerics.student import mean_interval
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import FidelitySpec, Recipe, TaskSpec
from qspec.schema.results import Accuracy, Fidelity, Measurement, Scalar, SubTask, TaskResult, TaskRow, Window
from qspec.stages.items import compare_items, score_interval

CHUNK = 128
"""Positions whose logits are held at once: bounds memory over large vocabularies."""


def evaluate(
    original: LM,
    quantized: LM,
    tokenizer: Tokenizer,
    recipe: Recipe,
    hf_folders: Mapping[str, Path | None],
    progress: Progress,
    *,
    eos_ids: Collection[int] = (),
) -> Accuracy:
    """Fidelity and tasks of the recipe on both arms.

    hf_folders: transformers folders of `original` and `quantized` for tasks that ask for backend `hf`; where one is
    missing that backend is skipped, and the result says so. eos_ids: stop tokens of the model.
    """
    spec, skipped = recipe.evaluation, list[str]()
    fidelity = None
    if spec.fidelity is not None:
        fidelity = measure_fidelity(original, quantized, tokenizer, spec.fidelity, progress)
    tasks: list[TaskResult] = []
    for task in spec.tasks:
        for backend in task.backends:
            folders = [hf_folders.get(arm) for arm in ("original", "quantized")]
            if backend == "qspec":
                arms = [harness.evaluate(lm, tokenizer, task, eos_ids, progress) for lm in (original, quantized)]
            elif None in folders:
                skipped.append(f"{task.name} with backend hf: an arm has no transformers folder")
                continue
            else:
                arms = [harness.evaluate_folder(folder, task) for folder in folders if folder is not None]
            tasks.append(compare(task, backend, *arms))
    return Accuracy(fidelity=fidelity, tasks=tuple(tasks), skipped=tuple(skipped))


def measure_fidelity(
    original: LM, quantized: LM, tokenizer: Tokenizer, spec: FidelitySpec, progress: Progress
) -> Fidelity:
    """Perplexity of both arms, KL and top-1 agreement on the same windows, each with an interval over windows."""
    length = min(spec.length, original.max_length, quantized.max_length)
    rows = windows(spec.data, spec.windows, length, tokenizer)
    means_W4 = torch.stack([_window(original, quantized, row) for row in progress.track(rows, "fidelity", len(rows))])
    a_W, b_W, kl_W, same_W = means_W4.unbind(1)
    condition: dict[str, Scalar] = {
        "data": Path(spec.data).name,
        "source": origin(spec.data),
        "windows": len(rows),
        "window_tokens": length,
        "tokens": len(rows) * (length - 1),
    }

    def mean(metric: str, unit: str, values_W: Tensor, low: float = -math.inf, high: float = math.inf) -> Measurement:
        ci = mean_interval(values_W.tolist(), low=low, high=high)
        value = float(values_W.mean())
        return Measurement(metric=metric, value=value, unit=unit, n=len(rows), ci=ci, condition=condition)

    def exponential(metric: str, values_W: Tensor, ratio: bool = False) -> Measurement:
        found = mean(metric, "", values_W)
        ci = found.ci and (_exp(found.ci[0]), _exp(found.ci[1]))
        detectable = detectable_ratio(values_W.exp().tolist()) if ratio else None
        return found.model_copy(update={"value": _exp(found.value), "ci": ci, "detectable": detectable})

    return Fidelity(
        original_perplexity=exponential("perplexity, original", a_W),
        quantized_perplexity=exponential("perplexity, quantized", b_W),
        perplexity_ratio=exponential("perplexity, quantized / original", b_W - a_W, ratio=True),
        kl=mean("KL(original || quantized)", "nats/token", kl_W, low=0.0),
        top1_agreement=mean("top-1 agreement", "share of tokens", same_W, high=1.0),
        windows=tuple(Window(**dict(zip(Window.model_fields, row, strict=True))) for row in means_W4.tolist()),
    )


@torch.no_grad()
def _window(original: LM, quantized: LM, tokens: list[int]) -> Tensor:
    """Means over a window's predictions: nll of both arms, KL, agreement; float64 `[4]`."""
    for lm in (original, quantized):
        lm.truncate(0)
    parts: list[Tensor] = []
    for start in range(0, len(tokens) - 1, CHUNK):
        end = min(start + CHUNK, len(tokens) - 1)
        inputs_T, targets_T = torch.tensor(tokens[start:end]), torch.tensor(tokens[start + 1 : end + 1])
        p_TV, q_TV = original.forward(inputs_T).cpu(), quantized.forward(inputs_T).cpu()
        same_T = top1_agreement(p_TV, q_TV).double()
        parts.append(torch.stack([nll(p_TV, targets_T), nll(q_TV, targets_T), kl_divergence(p_TV, q_TV), same_T]))
    return torch.cat(parts, 1).mean(1)


def compare(task: TaskSpec, backend: str, original: Scores, quantized: Scores) -> TaskResult:
    """Pair two arms item by item. Raises `SourceError` when they did not answer the same prompts."""
    rows = _pair(original.samples, quantized.samples)
    n, found = len(rows), compare_items([row.original for row in rows], [row.quantized for row in rows])
    a, b = (
        Measurement(
            metric=f"{arm.metric}, {name}",
            value=mean,
            unit="",
            n=n,
            ci=score_interval([sample.score for sample in arm.samples]),
            condition=arm.condition,
        )
        for name, arm, mean in zip(("original", "quantized"), (original, quantized), found.means, strict=True)
    )
    return TaskResult(
        task=task.name,
        backend=backend,
        original=a,
        quantized=b,
        difference=found.difference,
        recovery=found.recovery,
        recovery_ci=found.recovery_ci,
        only_original=found.only_a,
        only_quantized=found.only_b,
        p_value=found.p_value,
        detectable=found.difference.detectable or 1.0,
        verdict=found.verdict("quantized"),
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
        rule = "the arms were not asked the same questions, so their scores cannot be compared"
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
        prompt_cut=a.prompt_cut or b.prompt_cut,
    )


def _sub_tasks(rows: list[TaskRow]) -> tuple[SubTask, ...]:
    names = dict.fromkeys(row.task for row in rows)
    groups = {name: [row for row in rows if row.task == name] for name in names}
    found = {name: compare_items([r.original for r in g], [r.quantized for r in g]) for name, g in groups.items()}
    tested = [name for name, items in found.items() if items.p_value is not None]
    adjusted = dict(zip(tested, holm([found[name].p_value or 0.0 for name in tested]), strict=True))
    return tuple(
        SubTask(
            task=name,
            n=len(groups[name]),
            original=items.means[0],
            quantized=items.means[1],
            difference=items.difference,
            p_value=adjusted.get(name),
        )
        for name, items in found.items()
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
