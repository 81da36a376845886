"""The measured values of a pair by name, each with its interval: what gates and comparisons ask for.

A metric has labels: tasks, texts, arms (the pair itself first), kinds of prompt (all of them first).
"""

from collections.abc import Mapping
from dataclasses import dataclass
import math

from qspec.errors import SourceError
from qspec.measure.items import compare_items, task_evidence
from qspec.numerics.statistics.evidence import of_ratio, of_share
from qspec.numerics.statistics.fidelity import wilson_interval
from qspec.numerics.statistics.paired import geometric_mean
from qspec.readable import Interval
from qspec.report.arms import at, drafting, gain, over_first, pair_arm, pair_first
from qspec.schema.results import Acceptance, ArmSpeed, Equality, Measurement, Ratio, Results, TaskResult

METRICS = {
    "recovery": "task score over the original's, or over that of --against; by task",
    "score": "task score; by task",
    "kl": "KL to the original, nats per token; by text",
    "top1": "share of positions with the original's most likely token; by text",
    "perplexity_ratio": "perplexity over the original's; by text",
    "needle": "share of hidden numbers found, over the original's; by context length",
    "speedup": "decoding speed of the pair over the original's, or over that of --against's pair; by arm",
    "speculation": "decoding speed over the same target without a draft; by arm",
    "alpha": "acceptance per tested draft token; by kind of prompt",
    "tokens_per_step": "accepted + 1 per step; by kind of prompt",
    "lossless": "share of greedy answers that drafts left as they are, or changed at a near tie; by arm",
    "tokens_s": "median tokens per second; by arm",
    "ttft_ms": "median milliseconds to the first token; by arm",
}
"""The meaning of each name, for help and errors."""
EVERY = ("recovery", "score", "lossless", "kl", "top1", "perplexity_ratio", "needle")
"""Metrics whose bare name means every label: all tasks, texts, arms. Others mean the pair itself over all prompts."""
SAME_PROMPTS = ("prompts", "data", "prompt_tokens", "max_new_tokens", "chat_template", "batch")
SAME_MACHINE = ("cpu", "instruction_sets", "cores", "threads", "gpu", "engine")
KNOWN = ("cpu", "threads", "engine")
"""Facts without which nobody can say that two speeds are of one machine."""


@dataclass(frozen=True)
class Value:
    """A measured value; `ci` None: nothing says how sure it is."""

    value: float
    ci: Interval
    n: int


def measured(results: Results, metric: str, against: Results | None = None) -> dict[str, Value]:
    """Values of a metric by label, the pair's own first; {} where it was not measured, or at chance.

    Raises `SourceError` where `against` was not measured on the same questions, prompts or machine.
    """
    values = _accuracy(results, metric, against) | _speed(results, metric, against)
    return {label: value for label, value in values.items() if not math.isnan(value.value)}


def _accuracy(results: Results, metric: str, against: Results | None) -> dict[str, Value]:
    tasks, needles = results.accuracy.tasks, results.accuracy.needles
    texts = {text.data: text for text in results.accuracy.texts}
    match metric:
        case "recovery" if against is not None:
            scored = [task for task in tasks if task.rows and task_evidence(task).chance is None]
            return {_task(task): _recovery_over(task, against) for task in scored}
        case "recovery":
            kept = [task for task in tasks if task.recovery is not None and task_evidence(task).chance is None]
            return {_task(task): _kept_score(task) for task in kept}
        case "score":
            return {_task(task): _value(task.quantized) for task in tasks}
        case "kl":
            return {text: _value(fidelity.kl) for text, fidelity in texts.items()}
        case "top1":
            return {text: _value(fidelity.top1_agreement) for text, fidelity in texts.items()}
        case "perplexity_ratio":
            ratios = {text: fidelity.perplexity_ratio for text, fidelity in texts.items()}
            return {text: Value(m.value, of_ratio(m.ci, m.n).ci, m.n) for text, m in ratios.items()}
        case "needle" if needles is not None:
            lengths = [r for r in (needles.pooled, *needles.lengths) if r.recovery is not None]
            return {str(r.length or "all"): Value(r.recovery or 0.0, r.recovery_ci, r.difference.n) for r in lengths}
    return {}


def _speed(results: Results, metric: str, against: Results | None) -> dict[str, Value]:
    speed = results.speed
    if speed is None or not speed.arms:
        return {}
    own = [a for a in speed.acceptance if a.arm == pair_arm(speed)]
    match metric:
        case "speedup":
            return {_arm(r): _gain(r, results, against) for r in pair_first(speed, over_first(speed))}
        case "speculation":
            return {_arm(r): _ratio(r) for r in pair_first(speed, drafting(speed))}
        case "alpha":
            return {_kind(a): Value(a.alpha.value, of_share(a.alpha.ci, a.prompts).ci, a.alpha.n) for a in own}
        case "tokens_per_step":
            rates = [(a, of_ratio(a.tokens_per_step_ci, a.prompts)) for a in own]
            return {_kind(a): Value(a.tokens_per_step, evidence.ci, a.steps) for a, evidence in rates}
        case "lossless":
            return {e.arm: _kept(e) for e in pair_first(speed, speed.equality)}
        case "tokens_s":
            return {_arm(a): Value(a.decode_rate.median, None, a.tpot.n) for a in pair_first(speed, speed.arms)}
        case "ttft_ms":
            return {_arm(a): Value(a.ttft.median, None, a.ttft.n) for a in pair_first(speed, speed.arms)}
    return {}


def _task(task: TaskResult) -> str:
    return task.task if task.backend == "qspec" else f"{task.task}, {task.backend}"


def _arm(row: Ratio | ArmSpeed) -> str:
    return f"{row.arm}{at(row.temperature)}"


def _kind(a: Acceptance) -> str:
    return f"{a.category}{at(a.temperature)}"


def _value(m: Measurement) -> Value:
    return Value(m.value, m.ci, m.n)


def _ratio(ratio: Ratio) -> Value:
    """A speed over another one; without an interval where that would say nothing."""
    return Value(ratio.speedup.value, gain(ratio).ci, ratio.speedup.n)


def _kept_score(task: TaskResult) -> Value:
    ci = None if task_evidence(task).open else task.recovery_ci
    return Value(task.recovery or 0.0, ci, task.original.n)


def _kept(equality: Equality) -> Value:
    wrong = sum(not mismatch.near_tie for mismatch in equality.mismatches)
    same = equality.n - wrong
    return Value(same / equality.n, wilson_interval(same, equality.n), equality.n)


def _recovery_over(task: TaskResult, against: Results) -> Value:
    """Score of a task over the other pair's, item by item."""
    other = next((t for t in against.accuracy.tasks if (t.task, t.backend) == (task.task, task.backend)), None)
    rows = pair_rows(task, other) if other is not None else []
    if other is None or len(rows) != len(task.rows) or len(rows) != len(other.rows):
        rule = f"was not asked the same questions there ({len(rows)} of {len(task.rows)} are)"
        raise SourceError(f"task {task.task} of {against.name}", rule, "run both recipes with the same evaluation")
    comparison = compare_items([b for _, b in rows], [a for a, _ in rows])
    return Value(math.nan if comparison.recovery is None else comparison.recovery, comparison.recovery_ci, len(rows))


def pair_rows(task: TaskResult, other: TaskResult) -> list[tuple[float, float]]:
    """Scores of both quantized targets on the questions that both were asked in the same words."""
    theirs = {(row.task, row.doc_hash, row.prompt_hash): row.quantized for row in other.rows}
    keyed = [((row.task, row.doc_hash, row.prompt_hash), row.quantized) for row in task.rows]
    return [(score, theirs[key]) for key, score in keyed if key in theirs]


def _gain(ratio: Ratio, results: Results, against: Results | None) -> Value:
    """Speed over the original's; or that over what the other pair gained over the same original, prompt by prompt."""
    if against is None:
        return _ratio(ratio)
    require_same_conditions(results, against)
    assert against.speed is not None
    others = {(r.arm, r.temperature): r for r in over_first(against.speed)}
    other = others.get((ratio.arm, ratio.temperature))
    if other is None or len(other.per_prompt) != len(ratio.per_prompt):
        raise SourceError(f"{against.name}: arm {_arm(ratio)}", "was not timed on the same prompts", "run it again")
    value, ci = geometric_mean([a / b for a, b in zip(ratio.per_prompt, other.per_prompt, strict=True)])
    return Value(value, of_ratio(ci, len(ratio.per_prompt)).ci, len(ratio.per_prompt))


def require_same_conditions(results: Results, against: Results) -> None:
    """Raise `SourceError` where two speeds cannot be compared: another original, other prompts, another machine."""
    for what, mine, theirs in differences(results, against):
        rule = f"has {what} {theirs}, {results.name} {mine}: their speeds cannot be compared"
        raise SourceError(against.name, rule, "run both recipes on one machine with the same benchmark")


def differences(results: Results, against: Results) -> list[tuple[str, object, object]]:
    """Conditions that differed when two pairs were timed, or are known of neither: name, here, there."""
    if results.speed is None or against.speed is None:
        return [("measured speed", results.speed is not None, against.speed is not None)]
    rows = [("original", _original(results), _original(against))]
    rows += [(key, results.speed.condition.get(key), against.speed.condition.get(key)) for key in SAME_PROMPTS]
    rows += [(key, results.environment.get(key), against.environment.get(key)) for key in SAME_MACHINE]
    return [(what, a, b) for what, a, b in rows if a != b or (what in KNOWN and a is None)]


def _original(results: Results) -> object:
    target = results.recipe.get("target")
    return target.get("model") if isinstance(target, Mapping) else None
