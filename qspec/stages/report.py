"""The report: verdict first, then the numbers behind it. Pure from `Results` to text; one page for all readers."""

from collections.abc import Callable, Mapping
from pathlib import Path

from qspec.provenance import atomic_write
from qspec.schema.results import Accuracy, Prediction, Results, Scalar, Speed, Spread, TaskResult
from qspec.schema.text import dump_yaml
from qspec.stages import report_html, report_markdown, verdict
from qspec.stages.document import (
    Bar,
    Bars,
    Block,
    Details,
    Document,
    Heading,
    Paragraph,
    Stack,
    Table,
    interval,
    number,
    percent,
    size,
)

Naming = Callable[[str, float], str]
"""Label of an arm at a temperature."""


def report(results: Results, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `results.json` into `folder`; returns the page's path."""
    page = document(results)
    atomic_write(folder / "results.json", results.dump())
    atomic_write(folder / "report.md", report_markdown.render(page))
    atomic_write(folder / "report.html", report_html.render(page))
    return folder / "report.html"


def document(results: Results) -> Document:
    """The report of `results` as blocks."""
    device, cpu = str(results.recipe.get("device", "")), results.environment.get("cpu", "")
    about = [str(results.recipe.get("description", "")), f"{device}: {cpu}" if device == "cpu" and cpu else device]
    blocks: list[Block] = [Heading("Verdict"), *verdict.findings(results)]
    blocks += _accuracy(results.accuracy)
    if results.speed is not None:
        blocks += _speed(results.speed)
    blocks += _notes(results)
    blocks += _limits(results)
    blocks += _provenance(results)
    subtitle = " · ".join(part for part in about if part)
    return Document(f"{results.name}: quantized speculative pair", subtitle, tuple(blocks))


def _accuracy(accuracy: Accuracy) -> list[Block]:
    blocks: list[Block] = [Heading("Accuracy")]
    if accuracy.fidelity is not None:
        measurements = accuracy.fidelity.measurements()
        rows = tuple((m.metric, number(m.value), interval(m.ci), m.unit, str(m.n)) for m in measurements)
        caption = f"Fidelity to the original on held-out text ({_condition(measurements[0].condition)})"
        blocks.append(Table(caption, ("", "value", "95 % CI", "unit", "windows"), rows))
    for task in accuracy.tasks:
        blocks += _task(task)
    return blocks if len(blocks) > 1 else [*blocks, Paragraph("Not measured.")]


def _task(task: TaskResult) -> list[Block]:
    """Both arms' scores, the paired difference, and what may be concluded from it."""
    label, metric = f"{task.task} ({task.backend})", task.original.metric.rpartition(", ")[0]
    arms = (("original", task.original, task.original_cut), ("quantized", task.quantized, task.quantized_cut))
    rows = [(arm, percent(score.value), _percents(score.ci), percent(cut)) for arm, score, cut in arms]
    rows.append(("quantized - original", percent(task.difference.value), _percents(task.difference.ci), ""))
    table = Table(
        f"{label}, {metric}: {task.original.n} items, paired one by one (lm-evaluation-harness)",
        ("", "score", "95 % CI", "answers cut"),
        tuple(rows),
    )
    alone = f"Right in one arm only: original {task.only_original}, quantized {task.only_quantized} items."
    kept = "" if task.recovery is None else f" Score kept: {percent(task.recovery)}."
    blocks: list[Block] = [table, Paragraph(f"{label}: {task.verdict}. {alone}{kept}")]
    if len(task.sub_tasks) > 1:
        blocks.append(_sub_tasks(task))
    return [*blocks, Details(f"{label}: conditions", _lines(task.original.condition))]


def _sub_tasks(task: TaskResult) -> Table:
    rows = tuple((s.task, str(s.n), percent(s.original), percent(s.quantized)) for s in task.sub_tasks)
    return Table(f"{task.task} ({task.backend}) by sub-task", ("", "items", "original", "quantized"), rows)


def _speed(speed: Speed) -> list[Block]:
    several = len({arm.temperature for arm in speed.arms}) > 1

    def name(arm: str, temperature: float) -> str:
        return f"{arm}, temperature {temperature:g}" if several else arm

    about = f"Measured in turns on the same prompts: {_condition(speed.condition)}."
    return [
        Heading("Speed"),
        Paragraph(about),
        _rates(speed, name),
        _arms(speed, name),
        *_ratios(speed, name),
        *_acceptance(speed, name),
        *_sources(speed, name),
        *_predictions(speed, name),
        *_batches(speed, name),
        *_time(speed, name),
    ]


def _rates(speed: Speed, name: Naming) -> Bars:
    bars = tuple(
        Bar(name(a.arm, a.temperature), a.decode_rate.median, number(a.decode_rate.median), _quartiles(a.decode_rate))
        for a in speed.arms
    )
    return Bars("Decoding speed, tokens/s (median; line: quartiles)", bars)


def _ratios(speed: Speed, name: Naming) -> list[Block]:
    bars = tuple(
        Bar(
            f"{name(r.arm, r.temperature)} against {r.baseline}",
            r.speedup.value,
            f"{number(r.speedup.value)}× ({interval(r.speedup.ci)}, {r.speedup.n} prompts)",
            r.speedup.ci,
        )
        for r in speed.ratios
    )
    caption = "Speedup: time per token of the baseline over the arm's, same prompts (line: 95 % CI)"
    return [Bars(caption, bars, mark=1.0)] if bars else []


def _arms(speed: Speed, name: Naming) -> Table:
    columns = (
        "arm",
        "TTFT, ms",
        "ms per token",
        "quartiles",
        "tokens/s",
        "tokens/s with prefill",
        "runs",
        "weights",
        "KV per token",
        "ceiling, tokens/s",
        "of ceiling",
    )
    rows = tuple(
        (
            name(a.arm, a.temperature),
            number(a.ttft.median),
            number(a.tpot.median),
            interval(_quartiles(a.tpot)),
            number(a.decode_rate.median),
            number(a.total_rate.median),
            str(a.tpot.n),
            size(a.weight_bytes) if a.weight_bytes else "–",
            size(a.kv_bytes_per_token) if a.kv_bytes_per_token else "–",
            "–" if a.ceiling_tokens_s is None else number(a.ceiling_tokens_s),
            "–" if a.ceiling_tokens_s is None else percent(a.decode_rate.median / a.ceiling_tokens_s, 0),
        )
        for a in speed.arms
    )
    caption = f"Medians over runs. Ceiling: memory bandwidth {size(speed.bandwidth.value)}/s over bytes read per token"
    return Table(caption, columns, rows)


def _acceptance(speed: Speed, name: Naming) -> list[Block]:
    if not speed.acceptance:
        return []
    columns = (
        "arm",
        "prompts",
        "steps",
        "drafted",
        "accepted",
        "α",
        "95 % CI",
        "α forced",
        "tokens/step",
        "nodes/step",
        "by position or depth",
    )
    rows = tuple(
        (
            f"{name(a.arm, a.temperature)}: {a.category}",
            str(a.prompts),
            str(a.steps),
            str(a.drafted),
            str(a.accepted),
            number(a.alpha.value),
            interval(a.alpha.ci, 2),
            "" if a.teacher_forced is None else number(a.teacher_forced.value),
            number(a.tokens_per_step),
            "" if a.nodes_per_step is None else number(a.nodes_per_step),
            " ".join(number(share, 2) for share in a.per_position[:8]) + (" …" if len(a.per_position) > 8 else ""),
        )
        for a in speed.acceptance
    )
    caption = (
        "α: accepted / tested draft tokens; forced: from both models' laws behind each token of the plain answers;"
        " tokens/step = 1 + accepted / steps"
    )
    return [Heading("Acceptance by kind of prompt"), Table(caption, columns, rows)]


def _sources(speed: Speed, name: Naming) -> list[Block]:
    """Whose draft tokens stood, of drafters that have several sources."""
    rows = tuple(
        (
            f"{name(a.arm, a.temperature)}: {a.category}",
            source.source,
            str(source.steps),
            str(source.drafted),
            str(source.accepted),
            number(1 + source.accepted / source.steps),
        )
        for a in speed.acceptance
        for source in a.sources
    )
    columns = ("arm", "source", "steps", "drafted", "accepted", "tokens/step")
    return [Table("Acceptance by what drafted", columns, rows)] if rows else []


def _batches(speed: Speed, name: Naming) -> list[Block]:
    rows = tuple(
        (
            name(b.arm, b.temperature),
            str(b.batch),
            number(b.rate.median),
            interval(_quartiles(b.rate)),
            "" if b.speedup is None else f"{number(b.speedup.value)}×",
            "" if b.speedup is None else interval(b.speedup.ci),
            "" if b.speedup is None else number(b.draft_length),
            "" if b.speedup is None or not b.answers else f"{b.equal} of {b.answers}",
        )
        for b in speed.batches
    )
    columns = ("arm", "batch", "tokens/s", "quartiles", "speedup", "95 % CI", "draft length", "equal answers")
    caption = "Tokens per second of all requests together, after their first tokens; speedup over the same batch plain"
    return [Heading("Several requests at once"), Table(caption, columns, rows)] if rows else []


def _predictions(speed: Speed, name: Naming) -> list[Block]:
    if not speed.predictions:
        return []
    columns = (
        "arm",
        "α",
        "draft length",
        "draft cost c",
        "E, tokens/step",
        "verify cost by rows",
        "operations",
        "predicted",
        "measured",
        "best length",
        "steps at 0",
        "cost of 0",
    )
    rows = tuple(
        (
            name(p.arm, p.temperature),
            number(p.alpha),
            number(p.draft_length),
            number(p.draft_cost),
            "" if p.expected_tokens is None else number(p.expected_tokens),
            _costs(p),
            "" if p.operations is None else f"{number(p.operations)}×",
            f"{number(p.predicted)}×",
            f"{number(p.measured)}×",
            "" if p.best_length is None or p.best is None else f"{p.best_length} ({number(p.best)}×)",
            "" if p.idle_share is None else percent(p.idle_share),
            "" if p.idle_cost is None else percent(p.idle_cost, 2),
        )
        for p in speed.predictions
    )
    caption = (
        "Speedup over the same target without a draft; costs in plain steps (arXiv 2211.17192, theorem 3.8). Cost of 0:"
        " what drafter, policy and bookkeeping add to a step that drafts nothing"
    )
    return [Heading("Predicted and measured speedup"), Table(caption, columns, rows)]


def _costs(p: Prediction) -> str:
    """Verification by number of rows, in plain steps: as many as a row of the table holds."""
    if not p.verify_costs:
        return number(p.verify_cost)
    shown = list(p.verify_costs.items())[:6]
    return " ".join(f"{rows}: {number(cost, 2)}" for rows, cost in shown) + " …" * (len(p.verify_costs) > 6)


def _time(speed: Speed, name: Naming) -> list[Block]:
    parts = ("draft", "verify", "other")
    rows = tuple((name(a.arm, a.temperature), tuple(a.time_share[part] for part in parts)) for a in speed.arms)
    return [Heading("Where the time goes"), Stack("Shares of the decoding time", parts, rows)]


def _notes(results: Results) -> list[Block]:
    if not any(results.notes.values()):
        return []
    notes = [Details(f"{model} ({len(lines)} notes)", lines) for model, lines in results.notes.items() if lines]
    return [Heading("Quantization notes"), *notes]


def _limits(results: Results) -> list[Block]:
    """What these numbers do not show."""
    lines = [*results.limits, *results.accuracy.skipped]
    for task in results.accuracy.tasks:
        available = task.original.condition.get("rows_available")
        if isinstance(available, int) and available > task.original.n:
            lines.append(f"{task.task} ({task.backend}): {task.original.n} of {available} items were asked.")
        if max(task.original_cut, task.quantized_cut) > 0:
            shares = f"{percent(task.original_cut)} / {percent(task.quantized_cut)}"
            limit = task.original.condition.get("max_gen_toks")
            lines.append(
                f"{task.task} ({task.backend}): answers cut at {limit} tokens: {shares} (original / quantized)."
            )
        if task.prompts_cut:
            lines.append(f"{task.task} ({task.backend}): {task.prompts_cut} prompts lost their beginning (context).")
    if results.speed is not None and not results.speed.batches:
        lines.append("Speed was measured with one request at a time; batches behave differently.")
    return [Heading("Limits"), Details("What these numbers do not show", tuple(lines), folded=False)] if lines else []


def _provenance(results: Results) -> list[Block]:
    environment = tuple(sorted(results.environment.items()))
    blocks: list[Block] = [Heading("Provenance"), Table("Environment", ("", "value"), environment)]
    if results.digests:
        blocks.append(Table("sha256", ("", "digest"), tuple(sorted(results.digests.items()))))
    return [*blocks, Details("Recipe", tuple(dump_yaml(results.recipe).splitlines()), code=True)]


def _quartiles(spread: Spread) -> tuple[float, float]:
    return spread.q1, spread.q3


def _percents(ci: tuple[float, float] | None) -> str:
    return "" if ci is None else f"{percent(ci[0])} to {percent(ci[1])}"


def _condition(condition: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in condition.items())


def _lines(condition: Mapping[str, Scalar]) -> tuple[str, ...]:
    return tuple(f"{key.replace('_', ' ')}: {'–' if value is None else value}" for key, value in condition.items())
