"""Drafts in the report: acceptance by kind of prompt and by position, and predicted beside measured speedup."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from qspec.numerics.speculation.speedup import optimal_gamma, pass_cost, walltime_speedup
from qspec.numerics.statistics.evidence import Evidence, of_ratio, of_share
from qspec.numerics.statistics.predictive import TOLERANCE, off
from qspec.readable import count, number, percent, times
from qspec.report.arms import drafting, gain
from qspec.report.document import Bar, Block, Dots, Heading, Plot, Point, Series, sure_cell, tabulate
from qspec.report.speed import Naming, naming
from qspec.report.verdict import off_predictions
from qspec.schema.results import Acceptance, Measurement, Prediction, Speed

SHOWN = 8
"""Positions that a row of the table holds."""
LENGTHS, ALPHAS, COSTS = range(9), (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
"""Where speedups are predicted."""


def acceptance_blocks(speed: Speed) -> list[Block]:
    """By position, by kind of prompt, by source."""
    if not speed.acceptance:
        return []
    name = naming(speed)
    caption = (
        "α: accepted / tested draft tokens; forced: from both distributions behind each token of the plain answers;"
        " tokens/step = 1 + accepted / steps; intervals over prompts"
    )
    table = tabulate(
        caption,
        speed.acceptance,
        ("arm", lambda a: _label(a, name)),
        ("prompts", lambda a: count(a.prompts)),
        ("steps", lambda a: count(a.steps)),
        ("drafted", lambda a: count(a.drafted)),
        ("accepted", lambda a: count(a.accepted)),
        ("α", lambda a: number(a.alpha.value)),
        ("95 % CI", lambda a: sure_cell(of_share(a.alpha.ci, a.prompts))),
        ("α forced", lambda a: "" if a.teacher_forced is None else number(a.teacher_forced.value)),
        ("tokens/step", lambda a: number(a.tokens_per_step)),
        ("95 % CI", lambda a: sure_cell(of_ratio(a.tokens_per_step_ci, a.prompts))),
        ("nodes/step", lambda a: "" if a.nodes_per_step is None else number(a.nodes_per_step)),
        ("by position or depth", _shares),
    )
    return [
        Heading("Acceptance"),
        *_kinds(speed, name),
        *_positions(speed, name),
        *_temperatures(speed),
        table,
        *_sources(speed, name),
    ]


def _label(a: Acceptance, name: Naming) -> str:
    return f"{name(a.arm, a.temperature)}: {a.category}"


def _shares(a: Acceptance) -> str:
    return " ".join(number(share, 2) for share in a.per_position[:SHOWN]) + " …" * (len(a.per_position) > SHOWN)


def _kinds(speed: Speed, name: Naming) -> list[Block]:
    """Acceptance of every kind of prompt beside that of all."""
    bars = tuple(
        Bar(_label(a, name), a.alpha.value, f"{number(a.alpha.value)} ({sure_cell(evidence)})", evidence.ci)
        for a in speed.acceptance
        if a.drafted and (evidence := of_share(a.alpha.ci, a.prompts))
    )
    caption = "Acceptance α by kind of prompt (line: 95 % CI over prompts)"
    return [Dots(caption, bars, mark=0.0, axis="α")] if bars else []


def _positions(speed: Speed, name: Naming) -> list[Block]:
    """Two plots: arms over all prompts, and the kinds of prompt of the last arm that drafts."""
    pooled = [a for a in speed.acceptance if a.category == "all"]
    last = [a for a in speed.acceptance if (a.arm, a.temperature) == (pooled[-1].arm, pooled[-1].temperature)]
    kinds = [a for a in last if a.category != "all"]
    plots = [("Acceptance by position in the draft", [(name(a.arm, a.temperature), a) for a in pooled])]
    if len(kinds) > 1:
        plots.append((f"The same by kind of prompt: {pooled[-1].arm}", [(a.category, a) for a in kinds]))
    return [
        Plot(caption, "position", "share accepted", series)
        for caption, rows in plots
        if (series := tuple(_by_position(label, a) for label, a in rows if a.per_position))
    ]


def _by_position(label: str, a: Acceptance) -> Series:
    intervals = a.per_position_ci if len(a.per_position_ci) == len(a.per_position) else (None,) * len(a.per_position)
    shares = enumerate(zip(a.per_position, intervals, strict=True), 1)
    return Series(label, tuple(Point("", i, share, y_interval=ci) for i, (share, ci) in shares), joined=True)


def _sources(speed: Speed, name: Naming) -> list[Block]:
    """Accepted draft tokens of each source, of drafters that have several."""
    table = tabulate(
        "Acceptance by what drafted",
        [(_label(a, name), source) for a in speed.acceptance for source in a.sources],
        ("arm", lambda row: row[0]),
        ("source", lambda row: row[1].source),
        ("steps", lambda row: count(row[1].steps)),
        ("drafted", lambda row: count(row[1].drafted)),
        ("accepted", lambda row: count(row[1].accepted)),
        ("tokens/step", lambda row: number(1 + row[1].accepted / row[1].steps)),
    )
    return [table] if table.rows else []


def prediction_blocks(speed: Speed) -> list[Block]:
    """The model of speculation with measured inputs, and whether measurement agrees."""
    if not speed.predictions:
        return []
    name = naming(speed)
    measured = {(r.arm, r.baseline, r.temperature): gain(r) for r in speed.ratios}
    points = [
        (name(p.arm, p.temperature), p, measured.get((p.arm, p.baseline, p.temperature), Evidence(0, few=True)))
        for p in speed.predictions
    ]
    series = tuple(Series(label, (Point("", p.predicted, p.measured, y_interval=e.ci),)) for label, p, e in points)
    caption = (
        "Speedup over the same target without a draft; costs in plain steps (arXiv 2211.17192, theorem 3.8). Cost of 0:"
        " what drafter, policy and bookkeeping add to a step that drafts nothing"
    )
    plot = Plot("Predicted and measured speedup (line: equal)", "predicted", "measured", series, guide="diagonal")
    table = tabulate(
        caption,
        points,
        ("arm", lambda row: row[0]),
        ("α", lambda row: number(row[1].alpha)),
        ("draft length", lambda row: number(row[1].draft_length)),
        ("draft cost c", lambda row: number(row[1].draft_cost)),
        ("E, tokens/step", lambda row: "" if row[1].expected_tokens is None else number(row[1].expected_tokens)),
        ("verify cost by rows", lambda row: _costs(row[1])),
        ("operations", lambda row: "" if row[1].operations is None else times(row[1].operations)),
        ("predicted", lambda row: times(row[1].predicted)),
        ("measured", lambda row: times(row[1].measured)),
        ("95 % CI", lambda row: sure_cell(row[2])),
        (f"within {percent(TOLERANCE, 0)}", lambda row: "no" if off(row[1].predicted, row[1].measured) else "yes"),
        ("best length", lambda row: "" if row[1].best is None else f"{row[1].best_length} ({times(row[1].best)})"),
        ("steps at 0", lambda row: "" if row[1].idle_share is None else percent(row[1].idle_share)),
        ("cost of 0", lambda row: "" if row[1].idle_cost is None else percent(row[1].idle_cost, 2)),
    )
    sound = [(label, p) for label, p, _ in points if not off(p.predicted, p.measured)]
    return [Heading("Predicted and measured"), *off_predictions(speed), plot, table, *(_curves(sound) if sound else ())]


def _costs(p: Prediction) -> str:
    """Verification by number of rows, in plain steps: as many as a row of the table holds."""
    if not p.verify_costs:
        return number(p.verify_cost)
    shown = list(p.verify_costs.items())[:6]
    return " ".join(f"{rows}: {number(cost, 2)}" for rows, cost in shown) + " …" * (len(p.verify_costs) > 6)


def _temperatures(speed: Speed) -> list[Block]:
    """Acceptance and speed by temperature, where several were measured."""
    pooled, gained = [a for a in speed.acceptance if a.category == "all"], drafting(speed)
    if len({a.temperature for a in pooled}) < 2:
        return []
    arms = dict.fromkeys(a.arm for a in pooled)
    accepted = {arm: [(a.temperature, a.alpha) for a in pooled if a.arm == arm] for arm in arms}
    gains = {arm: [(r.temperature, r.speedup) for r in gained if r.arm == arm] for arm in arms}
    alpha = Plot("Acceptance by temperature", "temperature", "α", _by_temperature(accepted))
    speedup = Plot("Speedup of drafting by temperature", "temperature", "speedup", _by_temperature(gains), guide="one")
    return [alpha, *([speedup] if speedup.series else [])]


def _by_temperature(rows: Mapping[str, Sequence[tuple[float, Measurement]]]) -> tuple[Series, ...]:
    series = {arm: tuple(Point("", at, m.value, y_interval=m.ci) for at, m in values) for arm, values in rows.items()}
    return tuple(Series(arm, points, joined=True) for arm, points in series.items() if points)


def _curves(predictions: Sequence[tuple[str, Prediction]]) -> list[Block]:
    """The model's speedup over each of what decides it, the others as measured; the last two at their best length."""

    def at(p: Prediction, gamma: int) -> float:
        return walltime_speedup(p.alpha, gamma, p.draft_cost, _verification(p)(gamma + 1))

    def best(p: Prediction, alpha: float, c: float) -> float:
        gamma = optimal_gamma(alpha, c, LENGTHS[-1], _verification(p))
        return walltime_speedup(alpha, gamma, c, _verification(p)(gamma + 1))

    plots: list[tuple[str, str, Callable[[Prediction], Iterable[tuple[float, float]]]]] = [
        ("draft length", "draft length", lambda p: ((gamma, at(p, gamma)) for gamma in LENGTHS)),
        ("acceptance, at the best length", "α", lambda p: ((share, best(p, share, p.draft_cost)) for share in ALPHAS)),
        ("cost of a draft token, at the best length", "c", lambda p: ((c, best(p, p.alpha, c)) for c in COSTS)),
    ]
    return [
        Plot(
            f"Predicted speedup by {what}",
            axis,
            "speedup",
            tuple(Series(name, tuple(Point("", x, y) for x, y in curve(p)), joined=True) for name, p in predictions),
            guide="one",
        )
        for what, axis, curve in plots
    ]


def _verification(p: Prediction) -> Callable[[int], float]:
    """Cost of a pass by its rows: lines between those that were measured."""
    known = p.verify_costs or {1: 1.0, max(2, round(p.draft_length) + 1): p.verify_cost}
    return lambda rows: pass_cost(known, rows)
