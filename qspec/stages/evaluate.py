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
from qspec.numerics.fidelity import bootstrap_ci, kl_divergence, mcnemar_exact, nll, top1_agreement, wilson_interval
from qspec.numerics.paired import detectable_difference, pair_deviation, proportion_difference, shown_sign
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import FidelitySpec, Recipe, TaskSpec
from qspec.schema.results import Accuracy, Fidelity, Measurement, Scalar, SubTask, TaskResult, TaskRow

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

    def mean(metric: str, unit: str, values_W: Tensor, exponential: bool = False) -> Measurement:
        f = _exp if exponential else float
        lo, hi = bootstrap_ci(values_W)
        value = f(float(values_W.mean()))
        return Measurement(metric=metric, value=value, unit=unit, n=len(rows), ci=(f(lo), f(hi)), condition=condition)

    return Fidelity(
        original_perplexity=mean("perplexity, original", "", a_W, exponential=True),
        quantized_perplexity=mean("perplexity, quantized", "", b_W, exponential=True),
        perplexity_ratio=mean("perplexity, quantized / original", "", b_W - a_W, exponential=True),
        kl=mean("KL(original || quantized)", "nats/token", kl_W),
        top1_agreement=mean("top-1 agreement", "share of tokens", same_W),
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
    n = len(rows)
    difference, only_original, only_quantized, detectable = _difference(rows)
    binary = all(score in (0.0, 1.0) for row in rows for score in (row.original, row.quantized))
    p_value = mcnemar_exact(only_original, only_quantized) if binary else None
    means = [sum(scores) / n for scores in ([r.original for r in rows], [r.quantized for r in rows])]
    a, b = (
        Measurement(
            metric=f"{arm.metric}, {name}", value=mean, unit="", n=n, ci=_interval(arm), condition=arm.condition
        )
        for name, arm, mean in zip(("original", "quantized"), (original, quantized), means, strict=True)
    )
    return TaskResult(
        task=task.name,
        backend=backend,
        original=a,
        quantized=b,
        difference=difference,
        recovery=b.value / a.value if a.value else None,
        only_original=only_original,
        only_quantized=only_quantized,
        p_value=p_value,
        detectable=detectable,
        verdict=_verdict(difference, p_value, detectable),
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


def _difference(rows: list[TaskRow]) -> tuple[Measurement, int, int, float]:
    """Quantized - original with its interval, the items that one arm alone won, and the detectable difference."""
    n, values_N = len(rows), torch.tensor([r.quantized - r.original for r in rows], dtype=torch.float64)
    lost, won = int((values_N < 0).sum()), int((values_N > 0).sum())
    if all(abs(value) in (0.0, 1.0) for value in values_N.tolist()):
        ci, deviation = proportion_difference(lost, won, n), pair_deviation(lost, won, n)
    else:
        ci, deviation = bootstrap_ci(values_N), float(values_N.std(correction=0))
    mean = float(values_N.mean())
    return (
        Measurement(metric="quantized - original", value=mean, unit="", n=n, ci=ci),
        lost,
        won,
        min(1.0, detectable_difference(deviation, n)),
    )


def _interval(arm: Scores) -> tuple[float, float]:
    scores = [sample.score for sample in arm.samples]
    if all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(int(sum(scores)), len(scores))
    return bootstrap_ci(torch.tensor(scores, dtype=torch.float64))


def _verdict(difference: Measurement, p_value: float | None, detectable: float) -> str:
    """What the numbers carry, in one sentence."""
    lo, hi = difference.ci or (-math.inf, math.inf)
    test = "" if p_value is None else f", McNemar p = {p_value:.2g}"
    sign = shown_sign((lo, hi), p_value)
    if sign == 0:
        limit = f"a true difference below {100 * detectable:.1f} points would go unseen with {difference.n} items"
        return f"no difference detected{test}; {limit}"
    word = "better" if sign > 0 else "worse"
    size = f"{100 * abs(difference.value):.1f} points (95 % CI {100 * lo:+.1f} to {100 * hi:+.1f}{test})"
    return f"quantized is {word} by {size}"


def _sub_tasks(rows: list[TaskRow]) -> tuple[SubTask, ...]:
    names = dict.fromkeys(row.task for row in rows)
    groups = {name: [row for row in rows if row.task == name] for name in names}
    return tuple(
        SubTask(
            task=name,
            n=len(group),
            original=sum(r.original for r in group) / len(group),
            quantized=sum(r.quantized for r in group) / len(group),
        )
        for name, group in groups.items()
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
