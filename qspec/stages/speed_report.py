"""A speed study as a document: speedup by lengths and batch, latencies beside their ceiling, the largest batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from qspec.stages.document import (
    Block,
    Document,
    Finding,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Table,
    compact,
    count,
    interval,
    number,
    percent,
    times,
)

Row = Mapping[str, Any]
SYNTHETIC = (
    "Synthetic arms have no draft: the target's own tokens, right with a chosen chance, for free. They bound what a "
    "draft could bring, and say nothing of one that could be had."
)


def document(environment: Mapping[str, str], rows: Sequence[Row]) -> Document:
    """Of the rows of `scripts/bench_speed`: timed ones, and the largest batches."""
    timed, limits = [r for r in rows if "tokens_s" in r], [r for r in rows if "largest_batch" in r]
    models = dict.fromkeys(row["model"] for row in timed)
    blocks: list[Block] = [*_findings(timed)]
    if any(row.get("synthetic") is not None for row in timed):
        blocks.append(Paragraph(SYNTHETIC))
    for model in models:
        own = [row for row in timed if row["model"] == model]
        blocks += [Heading(f"Speedup of {model}"), *_plots(own), _ratios(own)]
        blocks += [Heading(f"Latency of {model}"), _latencies(own)]
    if limits:
        blocks += [Heading("Largest batch under the limit of the first token"), _largest(limits)]
    blocks += [Heading("Provenance"), Table("Environment", ("", "value"), tuple(sorted(environment.items())))]
    return Document("Speed by lengths and batch", " · ".join(models), tuple(blocks), _lead(timed))


def shown(ratio: Sequence[float] | None) -> tuple[float, tuple[float, float] | None]:
    """A ratio and its interval, as rows hold them."""
    value, *ci = ratio or (float("nan"),)
    return value, (ci[0], ci[1]) if ci else None


def _lead(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    arms = dict.fromkeys(row["arm"] for row in rows)
    return f"{len(arms)} ways to serve, {len(rows)} cells; speedups over {next(iter(arms))!r} in the same repeats."


def _findings(rows: Sequence[Row]) -> list[Finding]:
    """The fastest arm of every shape and batch that could be served, and whether it is shown to be faster."""
    found: list[Finding] = []
    for key in dict.fromkeys((row["model"], row["shape"], row["batch"]) for row in rows):
        own = [r for r in rows if (r["model"], r["shape"], r["batch"]) == key and r.get("synthetic") is None]
        best = max(own, key=lambda row: shown(row["speedup"])[0])
        value, ci = shown(best["speedup"])
        said = f"{key[1]}, {key[2]} at once: {best['arm']}, {times(value)} ({interval(ci) or 'no interval'})"
        found.append(Finding("good" if ci is not None and ci[0] > 1 else "open", said))
    return found


def _plots(rows: Sequence[Row]) -> list[Block]:
    """Speedup by batch, a plot for each pair of lengths, a line for each arm."""
    arms, shapes = (dict.fromkeys(row[name] for row in rows) for name in ("arm", "shape"))
    plots: list[Block] = []
    for shape in shapes:
        series = [
            Series(arm, tuple(_point(r) for r in rows if (r["arm"], r["shape"]) == (arm, shape)), joined=True)
            for arm in list(arms)[1:]
        ]
        caption = f"Tokens per second over the first arm, {shape} tokens, by requests at once (line: 95 % CI)"
        plots.append(Plot(caption, "requests at once", "speedup", tuple(series), guide="one", log_x=True))
    return plots


def _point(row: Row) -> Point:
    value, ci = shown(row["speedup"])
    return Point("", row["batch"], value, y_interval=ci)


def _ratios(rows: Sequence[Row]) -> Table:
    columns = ("arm", "lengths", "at once", "speedup", "95 % CI", "per token", "95 % CI, per token", "repeats")
    caption = "Tokens per second from the first request to the last token, and time per token after the first, over "
    return compact(caption + "the first arm", columns, tuple(_ratio(row) for row in rows))


def _ratio(row: Row) -> tuple[str, ...]:
    (whole, ci), (later, later_ci) = shown(row["speedup"]), shown(row["tpot_speedup"])
    head = (row["arm"], row["shape"], count(row["batch"]))
    return (*head, times(whole), interval(ci), times(later), interval(later_ci), count(row["repeats"]))


def _latencies(rows: Sequence[Row]) -> Table:
    columns = (
        "arm",
        "lengths",
        "at once",
        "TTFT, s",
        "worst TTFT, s",
        "ms per token",
        "quartiles",
        "ceiling, ms",
        "of ceiling",
        "tokens/s",
        "tokens per step",
        "weights, MB",
        "draft, MB",
        "grown by, MB",
    )
    return compact("Medians over repeats. Ceiling: bytes read per token over the bandwidth", columns, _cells(rows))


def _cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    def optional(row: Row, name: str) -> str:
        return "" if row.get(name) is None else number(row[name])

    return tuple(
        (
            row["arm"],
            row["shape"],
            count(row["batch"]),
            number(row["ttft_s"][0]),
            number(row["ttft_worst_s"]),
            number(row["tpot_ms"][0]),
            interval((row["tpot_ms"][1], row["tpot_ms"][2])),
            optional(row, "ceiling_tpot_ms"),
            "" if row.get("of_ceiling") is None else percent(row["of_ceiling"], 0),
            number(row["tokens_s"][0]),
            optional(row, "tokens_per_step"),
            optional(row, "weights_mb"),
            optional(row, "draft_mb"),
            optional(row, "grown_mb"),
        )
        for row in rows
    )


def _largest(rows: Sequence[Row]) -> Table:
    shapes = tuple(dict.fromkeys(row["shape"] for row in rows))
    arms = dict.fromkeys((row["model"], row["arm"]) for row in rows)
    found = {(row["model"], row["arm"], row["shape"]): row["largest_batch"] for row in rows}
    cells = tuple((arm, *(count(found[model, arm, shape]) for shape in shapes)) for model, arm in arms)
    limit = rows[0]["ttft_limit_s"]
    return Table(
        f"Of those that were tried, with a worst first token within {limit:g} s (0: none)", ("", *shapes), cells
    )
