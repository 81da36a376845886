"""Accuracy in the report: fidelity to the original by text, tasks, and subjects, each with what would have shown."""

from collections.abc import Mapping, Sequence

from qspec.measure.items import subject_evidence, task_evidence, task_verdict
from qspec.numerics.statistics.evidence import of_ratio
from qspec.readable import Interval, Numeral, count, interval, number, percent, percents, times
from qspec.report.document import Bar, Block, Details, Dots, Heading, Paragraph, Table, compact, least, sure_cell
from qspec.schema.results import Accuracy, Fidelity, Measurement, Scalar, TaskResult

DETECTABLE = "Detectable: the smallest true change that such a measurement shows in 4 of 5 repetitions."


def accuracy_blocks(accuracy: Accuracy) -> list[Block]:
    """Everything that was measured of it."""
    blocks: list[Block] = []
    if accuracy.fidelity is not None:
        blocks += [_fidelity(accuracy.fidelity), *_texts([accuracy.fidelity, *accuracy.domains])]
    for task in accuracy.tasks:
        blocks += _task(task)
    return [Heading("Accuracy"), *([Paragraph(DETECTABLE), *blocks] if blocks else [Paragraph("Not measured.")])]


def _fidelity(found: Fidelity) -> Table:
    measurements = found.measurements()
    rows = tuple((m.metric, number(m.value), *_sure(m), m.unit, count(m.n)) for m in measurements)
    caption = f"Fidelity to the original on held-out text ({conditions(measurements[0].condition)})"
    return compact(caption, ("", "value", "95 % CI", "detectable", "unit", "windows"), rows)


def _texts(texts: Sequence[Fidelity]) -> list[Block]:
    """Every text beside the others: a loss in code or another language hides in one perplexity."""
    if len(texts) < 2:
        return []
    ratios = [(str(text.kl.condition.get("data", "")), text.perplexity_ratio) for text in texts]
    bars = tuple(Bar(name, ratio.value, times(ratio.value), of_ratio(ratio.ci, ratio.n).ci) for name, ratio in ratios)
    columns = ("text", "windows", "perplexity", "ratio", "95 % CI", "detectable", "KL", "95 % CI", "top-1", "95 % CI")
    rows = tuple(
        (
            name,
            count(ratio.n),
            number(text.original_perplexity.value),
            times(ratio.value),
            *_sure(ratio),
            number(text.kl.value),
            interval(text.kl.ci),
            percent(text.top1_agreement.value),
            percents(text.top1_agreement.ci),
        )
        for (name, ratio), text in zip(ratios, texts, strict=True)
    )
    chart = Dots("Perplexity, quantized over original, by text (line: 95 % CI)", bars, mark=1.0, axis="ratio")
    return [chart, compact("Fidelity by text; perplexity is the original's", columns, rows)]


def _sure(m: Measurement) -> tuple[str, str]:
    """Interval and what would have shown; of what has a detectable change, which are ratios, only as far as they say
    something.
    """
    if m.detectable is None:
        return interval(m.ci), ""
    found = of_ratio(m.ci, m.n)
    return sure_cell(found), least(found)


def _task(task: TaskResult) -> list[Block]:
    """Both arms' scores, the paired difference, and what may be concluded from it."""
    label, metric = f"{task.task} ({task.backend})", task.original.metric.rpartition(", ")[0]
    arms = (("original", task.original, task.original_cut), ("quantized", task.quantized, task.quantized_cut))
    rows: list[tuple[str, ...]] = [
        (arm, percent(score.value), percents(score.ci), "", percent(cut)) for arm, score, cut in arms
    ]
    found = task_evidence(task)
    difference = percent(task.difference.value), percents(task.difference.ci)
    rows.append(("quantized - original", *difference, found.brief if found.open else least(found), ""))
    if task.recovery is not None and not found.open:
        rows.append(("score kept", percent(task.recovery), percents(task.recovery_ci), "", ""))
    table = compact(
        f"{label}, {metric}: {task.original.n} items, paired one by one (lm-evaluation-harness)",
        ("", "score", "95 % CI", "detectable drop", "answers cut"),
        tuple(rows),
    )
    alone = f"Right in one arm only: original {task.only_original}, quantized {task.only_quantized} items."
    blocks: list[Block] = [table, Paragraph(f"{label}: {task_verdict(task)}. {alone}")]
    if len(task.sub_tasks) > 1:
        blocks += _sub_tasks(task)
    return [*blocks, Details(f"{label}: conditions", _lines(task.original.condition))]


def _sub_tasks(task: TaskResult) -> list[Block]:
    """Subjects one by one; p is corrected for their number, so that one of many does not stand out by chance."""
    label = f"{task.task} ({task.backend})"
    found = [(s, subject_evidence(task, s)) for s in task.sub_tasks]
    rows = tuple(
        (
            _short(task, s.task),
            count(s.n),
            percent(s.original),
            percent(s.quantized),
            percent(s.quantized - s.original),
            percents(s.difference.ci) if s.difference else "",
            evidence.brief if evidence.open else least(evidence),
            "" if s.p_value is None else number(s.p_value, 2),
        )
        for s, evidence in found
    )
    heads = ("items", "original", "quantized", "difference", "95 % CI", "detectable drop", "p, corrected")
    bars = tuple(
        Bar(_short(task, s.task), 100 * (s.quantized - s.original), _points(s.quantized - s.original), _hundredfold(m))
        for s in task.sub_tasks
        if (m := s.difference) is not None
    )
    caption = f"{label}: quantized - original by subject (line: 95 % CI)"
    chart = [Dots(caption, bars, mark=0.0, axis="points")] if bars else []
    return [*chart, compact(f"{label} by sub-task", ("", *heads), rows)]


def _short(task: TaskResult, name: str) -> str:
    return name.removeprefix(f"{task.task}_").replace("_", " ")


def _hundredfold(difference: Measurement) -> Interval:
    return None if difference.ci is None else (100 * difference.ci[0], 100 * difference.ci[1])


def _points(difference: float) -> Numeral:
    return Numeral(f"{100 * difference:+.1f} points", difference)


def conditions(condition: Mapping[str, Scalar]) -> str:
    """In one line."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in condition.items())


def _lines(condition: Mapping[str, Scalar]) -> tuple[str, ...]:
    return tuple(f"{key.replace('_', ' ')}: {'–' if value is None else value}" for key, value in condition.items())
