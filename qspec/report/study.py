"""A speed study, alone or in its pair's report: speedups, latencies beside their ceiling, largest batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qspec.numerics.statistics.evidence import Evidence, of_ratio
from qspec.readable import Interval, count, interval, number, percent, times
from qspec.report.document import (
    Block,
    Document,
    Finding,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Table,
    sure_cell,
    tabulate,
)
from qspec.report.verdict import TONES
from qspec.schema.results import Results
from qspec.schema.speed_rows import SpeedRows

Row = Mapping[str, Any]
SYNTHETIC = (
    "Synthetic arms have no draft: the target's own tokens, right with a chosen chance, for free. They bound what a "
    "draft could bring, and say nothing of one that could be had."
)
LATENCIES = (
    ("ttft_s", "TTFT, s", "Time to the first token"),
    ("tpot_ms", "ms per token", "Time per further token"),
)
PLACE = ("engine", "cpu", "threads", "torch threads", "qspec")


def document(environment: Mapping[str, str], rows: Sequence[Row]) -> Document:
    """The report on rows of `scripts/study speed`: timed ones, and the largest batches."""
    timed, limits = _split(rows)
    models = _by_model(timed)
    blocks = _body(timed, limits, models)
    blocks += [Heading("Provenance"), Table("Environment", ("", "value"), tuple(sorted(environment.items())))]
    return Document("Speed by lengths and batch", " · ".join(models), tuple(blocks), _lead(timed))


def study_blocks(results: Results, study: SpeedRows, pair: str = "") -> list[Block]:
    """A study as a part of its pair's report. pair: its name, where there are several."""
    timed, limits = _split([row.model_dump() for row in study.rows])
    place = ", ".join(f"{name} {study.environment[name]}" for name in PLACE if name in study.environment)
    blocks: list[Block] = [Heading(f"Speed by lengths and batch: {pair}" if pair else "Speed by lengths and batch")]
    blocks += [Paragraph(f"{_lead(timed)} Measured with: {place}."), *_stranger(results, timed)]
    return [*blocks, *_body(timed, limits, _by_model(timed))]


def _body(timed: Sequence[Row], limits: Sequence[Row], models: Mapping[str, Sequence[Row]]) -> list[Block]:
    """Findings, then speedups and latencies of each model, and the largest batches."""
    blocks: list[Block] = [*_findings(timed)]
    blocks += [Paragraph(SYNTHETIC)] if any(row.get("synthetic") is not None for row in timed) else []
    for model, own in models.items():
        blocks += [Paragraph(f"Model {model}:")] if len(models) > 1 else []
        blocks += [*_plots(own), *_ratios(own), *_latency_plots(own), _latencies(own)]
    return [*blocks, _largest(limits)] if limits else blocks


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Timed rows, whose arms are named for what they are, and those of the largest batches."""
    synthetic = {(r["model"], r["arm"]) for r in rows if r.get("synthetic") is not None}
    named = [
        {**row, "arm": f"{row['arm']} (no draft)"} if (row["model"], row["arm"]) in synthetic else row for row in rows
    ]
    return [row for row in named if "tokens_s" in row], [row for row in named if "largest_batch" in row]


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {model: [r for r in rows if r["model"] == model] for model in dict.fromkeys(row["model"] for row in rows)}


def _stranger(results: Results, rows: Sequence[Row]) -> list[Finding]:
    """A study of another model than the pair's target."""
    own = str(results.recipe.get("target", {}).get("model", ""))
    others = dict.fromkeys(row["target"] for row in rows if row.get("target") not in (None, own))
    return [Finding("open", f"this study is of {other}, the pair of {own}", "caution") for other in others]


def shown(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """A median with its quartiles, as rows hold them."""
    median, low, high = values
    return median, (low, high)


def ratio(row: Row, name: str) -> tuple[float, Evidence]:
    """A ratio over the first arm (nan: that was not timed), and what its groups of prompts allow to be said of it."""
    value, *ci = row[name] or (float("nan"),)
    return value, of_ratio((ci[0], ci[1]) if ci else None, row.get("groups") or 1)


def _lead(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    arms = dict.fromkeys(row["arm"] for row in rows)
    return f"{len(arms)} ways to serve, {len(rows)} cells; speedups over {next(iter(arms))!r} in the same repeats."


def _findings(rows: Sequence[Row]) -> list[Finding]:
    """For every arm, where it is shown to be faster or slower than the first, and where neither is shown.

    All arms are named: the best of several, chosen by the numbers that it is reported with, would flatter itself.
    """
    listed: list[Finding] = []
    for model, own in _by_model(rows).items():
        arms = list(dict.fromkeys(row["arm"] for row in own))
        for arm in arms[1:]:
            cells = [r for r in own if r["arm"] == arm and r.get("synthetic") is None and r["speedup"]]
            if cells:
                listed.append(_beside_first(f"{model}: {arm} against {arms[0]}", cells))
    return listed


def _beside_first(pair: str, rows: Sequence[Row]) -> Finding:
    judged = [(row, ratio(row, "speedup")) for row in rows]
    named = {"faster": 1, "slower": -1, "no difference shown": 0}
    parts = [
        (word, [_cell(row, value) for row, (value, e) in judged if not e.few and e.sign == sign])
        for word, sign in named.items()
    ]
    parts.append(("too few groups of prompts", [_cell(row, value) for row, (value, e) in judged if e.few]))
    text = "; ".join(f"{word} at {', '.join(cells)}" for word, cells in parts if cells)
    signs = {e.sign for _, (_, e) in judged}
    return Finding(TONES[signs.pop()] if len(signs) == 1 else "open", f"{pair}: {text}")


def _cell(row: Row, value: float) -> str:
    return f"{row['shape']} x {row['batch']} ({times(value)})"


def _plots(rows: Sequence[Row]) -> list[Block]:
    """Speedup by batch, a plot for each pair of lengths, a line for each arm but the first."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))[1:]
    plots: list[Block] = []
    for shape in dict.fromkeys(row["shape"] for row in rows) if arms else ():
        caption = f"Tokens per second over the first arm, {shape} tokens, by requests at once (line: 95 % CI)"
        own = [(row, *ratio(row, "speedup")) for row in rows if row["shape"] == shape]
        lines = _lines([(row, value, evidence.ci) for row, value, evidence in own], arms)
        plots.append(Plot(caption, "requests at once", "speedup", lines, guide="one", log_x=True))
    return plots


def _latency_plots(rows: Sequence[Row]) -> list[Block]:
    """Time to the first token and per token by batch, for each pair of lengths, of arms that could be served."""
    arms = list(dict.fromkeys(row["arm"] for row in rows if row.get("synthetic") is None))
    plots: list[Block] = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for name, axis, what in LATENCIES:
            caption = f"{what}, {shape} tokens, by requests at once (line: quartiles)"
            lines = _lines([(row, *shown(row[name])) for row in rows if row["shape"] == shape], arms)
            plots.append(Plot(caption, "requests at once", axis, lines, log_x=True, line="quartiles"))
    return plots


def _lines(values: Sequence[tuple[Row, float, Interval]], arms: Sequence[str]) -> tuple[Series, ...]:
    """Values of rows with their intervals or quartiles: a line for each arm, by batch."""
    lines: list[Series] = []
    for arm in arms:
        own = (Point("", row["batch"], y, y_interval=ci) for row, y, ci in values if row["arm"] == arm)
        lines.append(Series(arm, tuple(own), joined=True))
    return tuple(lines)


def _ratios(rows: Sequence[Row]) -> list[Table]:
    """Every ratio over the first arm; none where only one was timed."""
    others = [row for row in rows if row["arm"] != rows[0]["arm"]]
    if not others:
        return []
    caption = "Tokens per second from the first request to the last token, and time per token after the first, over "
    table = tabulate(
        f"{caption}the first arm",
        others,
        ("arm", lambda row: row["arm"]),
        ("lengths", lambda row: row["shape"]),
        ("at once", lambda row: count(row["batch"])),
        ("speedup", lambda row: times(ratio(row, "speedup")[0])),
        ("95 % CI", lambda row: sure_cell(ratio(row, "speedup")[1])),
        ("per token", lambda row: times(ratio(row, "tpot_speedup")[0])),
        ("95 % CI, per token", lambda row: sure_cell(ratio(row, "tpot_speedup")[1])),
        ("groups of prompts", lambda row: count(row.get("groups") or 1)),
    )
    return [table]


def _latencies(rows: Sequence[Row]) -> Table:
    def optional(name: str) -> Callable[[Row], str]:
        return lambda row: "" if row.get(name) is None else number(row[name])

    caption = "Medians over repeats. Ceiling: bytes read per token over the bandwidth. Peak memory: weights, draft, "
    return tabulate(
        f"{caption}and what the process grew by at most",
        rows,
        ("arm", lambda row: row["arm"]),
        ("lengths", lambda row: row["shape"]),
        ("at once", lambda row: count(row["batch"])),
        ("TTFT, s", lambda row: number(row["ttft_s"][0])),
        ("worst TTFT, s", lambda row: number(row["ttft_worst_s"])),
        ("ms per token", lambda row: number(row["tpot_ms"][0])),
        ("quartiles", lambda row: interval(shown(row["tpot_ms"])[1])),
        ("ceiling, ms", optional("ceiling_tpot_ms")),
        ("of ceiling", lambda row: "" if row.get("of_ceiling") is None else percent(row["of_ceiling"], 0)),
        ("tokens/s", lambda row: number(row["tokens_s"][0])),
        ("tokens per step", optional("tokens_per_step")),
        ("weights, MB", optional("weights_mb")),
        ("draft, MB", optional("draft_mb")),
        ("peak memory, MB", _peak),
    )


def _peak(row: Row) -> str:
    """Only of qspec's own engine: other servers hold theirs elsewhere."""
    return number(row["weights_mb"] + row["draft_mb"] + row["grown_mb"]) if row.get("engine") == "qspec" else ""


def _largest(rows: Sequence[Row]) -> Table:
    shapes = tuple(dict.fromkeys(row["shape"] for row in rows))
    arms = dict.fromkeys((row["model"], row["arm"]) for row in rows)
    largest = {(row["model"], row["arm"], row["shape"]): count(row["largest_batch"]) for row in rows}
    cells = tuple((arm, *(largest.get((model, arm, shape), "") for shape in shapes)) for model, arm in arms)
    limit = rows[0]["ttft_limit_s"]
    caption = f"Largest batch of those that were tried, with a worst first token within {limit:g} s (0: none)"
    return Table(caption, ("", *shapes), cells)
