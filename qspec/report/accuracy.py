"""Accuracy in the report: fidelity to the original by text, tasks, subjects, and numbers hidden in long contexts, each
with what would have shown.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from qspec.measure.items import subject_evidence, task_evidence, task_verdict
from qspec.numerics.statistics.evidence import Evidence, of_difference, of_ratio
from qspec.numerics.statistics.paired import shown_sign
from qspec.readable import Interval, Numeral, count, interval, number, percent, percents, times
from qspec.report.document import (
    Bar,
    Block,
    Details,
    Dots,
    Finding,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Table,
    compact,
    least,
    sure_cell,
    tabulate,
)
from qspec.report.verdict import LOSS, TONES
from qspec.schema.results import Accuracy, Fidelity, Measurement, Needles, Retrieval, Scalar, TaskResult

DETECTABLE = "Detectable: the smallest true change that such a measurement shows in 4 of 5 repetitions."

ARMS = {"original": "original", "quantized": "quantized", "float_kv": "quantized, float KV cache"}
METHOD = (
    "A number is hidden in running text and asked for at its end; it is found where every token of the answer is the "
    "likeliest. The answer's log-likelihood moves before any number is lost. A proxy for long contexts, no task."
)


def accuracy_blocks(accuracy: Accuracy) -> list[Block]:
    """Everything that was measured of it."""
    blocks: list[Block] = []
    if accuracy.fidelity is not None:
        blocks += [_fidelity(accuracy.fidelity), *_texts([accuracy.fidelity, *accuracy.domains])]
    for task in accuracy.tasks:
        blocks += _task(task)
    return [Heading("Accuracy"), *([Paragraph(DETECTABLE), *blocks] if blocks else [Paragraph("Not measured.")])]


def _fidelity(fidelity: Fidelity) -> Table:
    measurements = fidelity.measurements()
    rows = tuple((m.metric, number(m.value), *_sure(m), m.unit, count(m.n)) for m in measurements)
    caption = f"Fidelity to the original on held-out text ({conditions(measurements[0].condition)})"
    return compact(caption, ("", "value", "95 % CI", "detectable", "unit", "windows"), rows)


def _texts(texts: Sequence[Fidelity]) -> list[Block]:
    """Every text beside the others: a loss in code or another language hides in one perplexity."""
    if len(texts) < 2:
        return []
    ratios = [(str(text.kl.condition.get("data", "")), text.perplexity_ratio) for text in texts]
    bars = tuple(Bar(name, ratio.value, times(ratio.value), of_ratio(ratio.ci, ratio.n).ci) for name, ratio in ratios)
    table = tabulate(
        "Fidelity by text; perplexity is the original's",
        texts,
        ("text", lambda text: str(text.kl.condition.get("data", ""))),
        ("windows", lambda text: count(text.perplexity_ratio.n)),
        ("perplexity", lambda text: number(text.original_perplexity.value)),
        ("ratio", lambda text: times(text.perplexity_ratio.value)),
        ("95 % CI", lambda text: _sure(text.perplexity_ratio)[0]),
        ("detectable", lambda text: _sure(text.perplexity_ratio)[1]),
        ("KL", lambda text: number(text.kl.value)),
        ("95 % CI", lambda text: interval(text.kl.ci)),
        ("top-1", lambda text: percent(text.top1_agreement.value)),
        ("95 % CI", lambda text: percents(text.top1_agreement.ci)),
    )
    chart = Dots("Perplexity, quantized over original, by text (line: 95 % CI)", bars, mark=1.0, axis="ratio")
    return [chart, table]


def _sure(m: Measurement) -> tuple[str, str]:
    """Interval and what would have shown; of what has a detectable change, which are ratios, only as far as they say
    something.
    """
    if m.detectable is None:
        return interval(m.ci), ""
    evidence = of_ratio(m.ci, m.n)
    return sure_cell(evidence), least(evidence)


def _task(task: TaskResult) -> list[Block]:
    """Both arms' scores, the paired difference, and what may be concluded from it."""
    label, metric = f"{task.task} ({task.backend})", task.original.metric.rpartition(", ")[0]
    arms = (("original", task.original, task.original_cut), ("quantized", task.quantized, task.quantized_cut))
    rows: list[tuple[str, ...]] = [
        (arm, percent(score.value), percents(score.ci), "", percent(cut)) for arm, score, cut in arms
    ]
    evidence = task_evidence(task)
    difference = percent(task.difference.value), percents(task.difference.ci)
    rows.append(("quantized - original", *difference, evidence.brief if evidence.open else least(evidence), ""))
    if task.recovery is not None and not evidence.open:
        rows.append(("score kept", percent(task.recovery), percents(task.recovery_ci), "", ""))
    if (m := task.likelihood) is not None:
        rows.append(
            ("likelihood of right answers, nats", number(m.value), interval(m.ci), number(m.detectable or 0.0), "")
        )
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
    table = tabulate(
        f"{label} by sub-task",
        [(s, subject_evidence(task, s)) for s in task.sub_tasks],
        ("", lambda row: _short(task, row[0].task)),
        ("items", lambda row: count(row[0].n)),
        ("original", lambda row: percent(row[0].original)),
        ("quantized", lambda row: percent(row[0].quantized)),
        ("difference", lambda row: percent(row[0].quantized - row[0].original)),
        ("95 % CI", lambda row: percents(row[0].difference.ci) if row[0].difference else ""),
        ("detectable drop", lambda row: row[1].brief if row[1].open else least(row[1])),
        ("p, corrected", lambda row: "" if row[0].p_value is None else number(row[0].p_value, 2)),
    )
    bars = tuple(
        Bar(_short(task, s.task), 100 * (s.quantized - s.original), _points(s.quantized - s.original), _hundredfold(m))
        for s in task.sub_tasks
        if (m := s.difference) is not None
    )
    caption = f"{label}: quantized - original by subject (line: 95 % CI)"
    chart = [Dots(caption, bars, mark=0.0, axis="points")] if bars else []
    return [*chart, table]


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


def needle_blocks(needles: Needles) -> list[Block]:
    """Shares found as a plot, and as a table what was lost."""
    arms = {arm: label for arm, label in ARMS.items() if arm in needles.pooled.found}
    series = tuple(
        Series(
            label,
            tuple(Point("", r.length, (m := r.found[arm]).value, y_interval=m.ci) for r in needles.lengths),
            joined=True,
        )
        for arm, label in arms.items()
    )
    caption = f"Hidden numbers found by context length (line: 95 % CI; text {needles.condition.get('data')})"
    plot = Plot(caption, "context, tokens", "share found", series, log_x=True)
    table = tabulate(
        "Quantized against original; nll in nats per token of the answer",
        (*needles.lengths, needles.pooled),
        ("context", lambda r: count(r.length) if r.length else "all"),
        ("n", lambda r: count(r.difference.n)),
        *((label, partial(_retrieved_share, arm)) for arm, label in arms.items()),
        ("difference", lambda r: percent(r.difference.value)),
        ("95 % CI", lambda r: percents(r.difference.ci)),
        ("detectable drop", lambda r: evidence.brief if (evidence := _retrieved(r)).open else least(evidence)),
        ("p", lambda r: "" if r.p_value is None else number(r.p_value, 2)),
        ("nll of the answer", lambda r: number(r.nll.value, 2)),
        ("95 % CI", lambda r: interval(r.nll.ci, 2)),
        ("of that KV cache", lambda r: "" if r.kv_nll is None else number(r.kv_nll.value, 2)),
        ("95 % CI", lambda r: "" if r.kv_nll is None else interval(r.kv_nll.ci, 2)),
    )
    return [Heading("Long contexts"), Paragraph(METHOD), plot, table]


def _retrieved_share(arm: str, r: Retrieval) -> str:
    return percent(r.found[arm].value)


def needle_finding(needles: Needles) -> Finding:
    """Over all lengths, in one sentence."""
    pooled, longest = needles.pooled, max(r.length for r in needles.lengths)
    if not pooled.found["original"].value:
        return Finding(
            "plain", f"numbers hidden in up to {longest:,} tokens: the original finds none, so none can be lost"
        )
    shares = f"{percent(pooled.found['quantized'].value)} found, original {percent(pooled.found['original'].value)}"
    judged = _retrieved(pooled)
    carried = judged.shortage("numbers") if judged.open else pooled.verdict
    return Finding(TONES[judged.sign], f"numbers hidden in up to {longest:,} tokens: {shares}; {carried}")


def _retrieved(r: Retrieval) -> Evidence:
    """The evidence of the numbers hidden at a length; nobody guesses five digits."""
    m, original = r.difference, r.found["original"]
    return of_difference(original.value, m.ci, r.p_value, m.n, m.detectable or 1.0)


def lost_contexts(needles: Needles) -> list[Finding]:
    """Context lengths at which numbers are lost, and whether that is the KV cache's doing."""
    lost: list[Finding] = []
    for r in needles.lengths:
        if _retrieved(r).sign < 0:
            cache = r.kv_difference is not None and shown_sign(r.kv_difference.ci, r.kv_p_value) < 0
            why = "; the KV cache alone loses them: do not quantize it so from here on" if cache else ""
            lost.append(Finding("bad", f"contexts of {r.length:,} tokens: {r.verdict}{why}", LOSS))
    return lost
