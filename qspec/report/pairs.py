"""Several pairs beside each other: which are not dominated, what differs beyond noise, how far proxies foretell."""

from collections.abc import Iterable, Mapping, Sequence

from qspec.measure.items import chance_of, compare_items, task_evidence, task_loss
from qspec.numerics.statistics.evidence import of_ratio
from qspec.numerics.statistics.paired import geometric_mean, rank_correlation, shown_sign
from qspec.numerics.statistics.pareto import dominated
from qspec.numerics.statistics.student import mean_interval
from qspec.readable import count, interval, number, percent, percents, times
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
    compact,
    least,
    sure,
)
from qspec.report.headline import lead, pair_ratio
from qspec.report.measured import Value, differences, measured, pair_rows
from qspec.report.study import study_blocks
from qspec.report.verdict import blockers
from qspec.schema.results import Ratio, Results, TaskResult
from qspec.schema.speed_rows import SpeedRows

FEWEST = 5
"""Pairs from which a correlation is stated."""
COLUMNS = {
    "recovery": "score kept",
    "kl": "KL, nats/token",
    "top1": "top-1 agreement",
    "perplexity_ratio": "perplexity ratio",
    "needle": "hidden numbers kept",
    "alpha": "α",
    "tokens_per_step": "tokens/step",
    "speculation": "gain of drafting",
    "speedup": "speed over original",
    "tokens_s": "tokens/s",
}
SHARES, RATIOS = ("recovery", "top1", "needle"), ("speculation", "speedup")
LOWER_IS_BETTER = ("kl", "perplexity_ratio")
Values = Mapping[str, Mapping[str, Value | None]]
"""By pair and metric."""


def comparison(pairs: Mapping[str, Results], studies: Mapping[str, SpeedRows] | None = None) -> Document:
    """The pairs as one document; the first is what the others are compared with. studies: of speed, by pair."""
    values = {name: {metric: _first(results, metric) for metric in COLUMNS} for name, results in pairs.items()}
    apart = _conditions(pairs)
    blocks: list[Block] = [Heading("Verdict", brief=True), *apart, *(() if apart else _fronts(values))]
    blocks += [Finding("plain", f"{name}: {lead(results)}", "pair") for name, results in pairs.items()]
    blocks += [_table(values), *_plots(values, ranked=not apart)]
    blocks += _paired(pairs)
    blocks += _proxies(values)
    blocks += [block for name, study in (studies or {}).items() for block in study_blocks(pairs[name], study, name)]
    blocks += [Heading("Provenance"), _provenance(pairs)]
    answer = f"Nothing is called the fastest: {apart[0].text}." if apart else _lead(pairs)
    return Document(f"{len(pairs)} speculative pairs", ", ".join(pairs), tuple(blocks), answer)


def _lead(pairs: Mapping[str, Results]) -> str:
    """The fastest pair that nothing speaks against, of pairs that were timed alike.

    It is chosen on every other prompt and judged on the others, where it has to beat each of the rest.
    """
    doubts = {name: _doubt(results) for name, results in pairs.items()}
    sound = {name: results for name, results in pairs.items() if not doubts[name]}
    if not sound:
        return f"Nothing is called the fastest: {'; '.join(f'{name} {doubt}' for name, doubt in doubts.items())}."
    ratios = {name: list(ratio.per_prompt) for name, results in sound.items() if (ratio := _own(results))}
    best = max(ratios, key=lambda name: geometric_mean(ratios[name][::2])[0])
    left = "".join(f"; {name} {doubt}" for name, doubt in doubts.items() if doubt)
    if len(ratios) == 1:
        fast = f"{times(geometric_mean(ratios[best])[0])} its original's speed"
        return f"{best} is the only pair that keeps its budgets and shows no loss: {fast}{left}."
    judging = ratios[best][1::2]
    if not judging:
        return f"Nothing is called the fastest: too few prompts to say: {len(ratios[best])}{left}."
    value, ci = geometric_mean(judging)
    fast = f"{times(value)} its original's speed ({sure(of_ratio(ci, len(judging)), 'prompts that did not choose it')})"
    for name in ratios.keys() - {best}:
        value, ci = geometric_mean([a / b for a, b in zip(judging, ratios[name][1::2], strict=True)])
        evidence = of_ratio(ci, len(judging))
        if evidence.sign <= 0:
            beside = f"{times(value)} the speed of {name} ({sure(evidence, 'prompts that did not choose it')})"
            return f"Nothing is called the fastest: {best} is not shown to beat {name}, at {beside}{left}."
    return f"{best} is the fastest pair that keeps its budgets and shows no loss: {fast}{left}."


def _doubt(results: Results) -> str:
    """Why a pair cannot be called the best; empty where nothing speaks against it."""
    judged = [task_evidence(task) for task in results.accuracy.tasks]
    if wrong := blockers(results):
        return f"is out: {wrong[0]}"
    if any(map(task_loss, results.accuracy.tasks)):
        return "loses accuracy"
    if all(evidence.open for evidence in judged):
        return "has no accuracy measured on a task that could show a loss"
    return "" if _own(results) is not None else "was not timed beside its original"


def _own(results: Results) -> Ratio | None:
    return None if results.speed is None else pair_ratio(results.speed)


def _first(results: Results, metric: str) -> Value | None:
    return next(iter(measured(results, metric).values()), None)


def _conditions(pairs: Mapping[str, Results]) -> list[Finding]:
    """Speeds that do not stand on the same ground as the first that was measured."""
    timed = [(name, results) for name, results in pairs.items() if results.speed is not None]
    if not timed:
        return []
    (first, base), *others = timed
    return [
        Finding(
            "open", f"{first} and {name} were timed under different conditions: {what} {mine} and {theirs}", "caution"
        )
        for name, other in others
        for what, mine, theirs in differences(base, other)
    ]


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names that no other one equals in both values and exceeds in one; larger is better in both."""
    costs = {name: (-x, -y) for name, (x, y) in points.items()}
    return [name for name, row in costs.items() if not dominated(row, costs.values())]


def _points(values: Values, metric: str) -> dict[str, tuple[Value, Value]]:
    """Speed and an accuracy metric of the pairs that have both."""
    points = {name: (row["speedup"], row[metric]) for name, row in values.items()}
    return {name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None}


def _front_of(points: Mapping[str, tuple[Value, Value]], metric: str) -> list[str]:
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return front({name: (x.value, sign * y.value) for name, (x, y) in points.items()})


def _fronts(values: Values) -> list[Finding]:
    fronts: list[Finding] = []
    for metric in ("recovery", "kl"):
        points = _points(values, metric)
        if len(points) > 1:
            best = _front_of(points, metric)
            text = f"by speed and {COLUMNS[metric]} not dominated: {', '.join(best)}"
            fronts.append(Finding("plain", f"{text} (values; see below what noise allows)", "front"))
    return fronts


def _plots(values: Values, ranked: bool) -> list[Block]:
    """Accuracy against speed; where they are ranked the line joins the pairs that are not dominated."""
    plots: list[Block] = []
    for metric in ("recovery", "kl"):
        points = _points(values, metric)
        best = _front_of(points, metric)
        shapes = {name: Point(name, x.value, y.value, x.ci, y.ci) for name, (x, y) in points.items()}
        ahead = sorted((shapes[name] for name in best), key=lambda point: point.x)
        behind = tuple(point for name, point in shapes.items() if name not in best)
        series = [
            Series("not dominated", tuple(ahead), joined=True),
            *([Series("dominated", behind)] if behind else ()),
        ]
        series = series if ranked else [Series("pairs, not to be ranked", tuple(shapes.values()))]
        better = "lower is better" if metric in LOWER_IS_BETTER else "higher is better"
        if len(points) > 1:
            caption = f"Speed against {COLUMNS[metric]} (lines: 95 % CI)"
            plots.append(
                Plot(caption, "speed over original", f"{COLUMNS[metric]}, {better}", tuple(series), named=True)
            )
    return [Heading("Accuracy against speed"), *plots] if plots else []


def _table(values: Values) -> Table:
    columns = [column for name in COLUMNS.values() for column in (name, "95 % CI")]
    rows = tuple(
        (name, *(cell for metric in COLUMNS for cell in _cells(metric, row[metric]))) for name, row in values.items()
    )
    return compact("Every pair; intervals are of the pair alone", ("pair", *columns), rows)


def _cells(metric: str, value: Value | None) -> tuple[str, str]:
    if value is None:
        return "", ""
    if metric in SHARES:
        return percent(value.value), percents(value.ci)
    return (times if metric in RATIOS else number)(value.value), interval(value.ci)


def _paired(pairs: Mapping[str, Results]) -> list[Block]:
    """Each pair beside the first on the same questions and windows: differences that a pair alone cannot show."""
    (first, base), *others = pairs.items()
    rows = [row for name, other in others for row in [*_tasks(name, base, other), *_windows(name, base, other)]]
    columns = ("", "difference", "95 % CI", "detectable", "p", "n", "verdict")
    caption = f"Quantized targets paired with that of {first}, on the same questions and windows"
    note = Paragraph("No questions or windows are common to the pairs, so their accuracy cannot be paired.")
    return [Heading("Paired differences"), compact(caption, columns, tuple(rows)) if rows else note]


def _tasks(name: str, base: Results, other: Results) -> Iterable[tuple[str, ...]]:
    theirs: dict[tuple[str, str], TaskResult] = {(t.task, t.backend): t for t in other.accuracy.tasks}
    for task in base.accuracy.tasks:
        match = theirs.get((task.task, task.backend))
        if match is None or not (scores := pair_rows(task, match)):
            continue
        comparison = compare_items([a for a, _ in scores], [b for _, b in scores])
        judged = comparison.evidence(chance_of(task.task, task.original.condition))
        p = "" if comparison.p_value is None else number(comparison.p_value, 2)
        word = {1: "better", 0: "no difference shown", -1: "worse"}[judged.sign]
        difference = percent(comparison.difference.value), percents(comparison.difference.ci)
        word = judged.brief if judged.open else word
        yield f"{name}: {task.task}", *difference, least(judged), p, count(len(scores)), word


def _windows(name: str, base: Results, other: Results) -> Iterable[tuple[str, ...]]:
    a, b = base.accuracy.fidelity, other.accuracy.fidelity
    if a is None or b is None or not a.windows or not _same_text(base, other):
        return
    values = [two.kl - one.kl for one, two in zip(a.windows, b.windows, strict=True)]
    ci = mean_interval(values)
    word = {1: "further from the original", 0: "no difference shown", -1: "closer to the original"}[
        shown_sign(ci, None)
    ]
    difference = number(sum(values) / len(values)), interval(ci)
    yield f"{name}: KL, nats/token", *difference, "", "", count(len(values)), word


def _same_text(base: Results, other: Results) -> bool:
    """Whether both originals said the same of the same windows."""
    a, b = base.accuracy.fidelity, other.accuracy.fidelity
    if a is None or b is None or a.kl.condition != b.kl.condition or len(a.windows) != len(b.windows):
        return False
    return all(abs(x.original_nll - y.original_nll) < 1e-3 for x, y in zip(a.windows, b.windows, strict=True))


def _proxies(values: Values) -> list[Block]:
    """How the quick measures order the pairs beside the order by task score."""
    rows: list[tuple[str, ...]] = []
    for metric in ("kl", "top1", "perplexity_ratio", "needle"):
        both = [(row[metric], row["recovery"]) for row in values.values()]
        known = [(x.value, y.value) for x, y in both if x is not None and y is not None]
        if len(known) >= FEWEST:
            rho, p = rank_correlation([x for x, _ in known], [y for _, y in known])
            rows.append((COLUMNS[metric], number(rho, 2), number(p, 2), count(len(known))))
    if not rows:
        text = f"Whether KL or agreement foretell task scores is not stated: that takes {FEWEST} pairs with both."
        return [Heading("Proxies"), Paragraph(text)]
    caption = "Rank correlation (Spearman) with the share of the task score that is kept, over the pairs"
    return [Heading("Proxies"), Table(caption, ("", "ρ", "p", "pairs"), tuple(rows))]


def _provenance(pairs: Mapping[str, Results]) -> Table:
    keys: Sequence[str] = ("qspec", "torch", "cpu", "instruction_sets", "threads", "engine")
    rows = tuple((name, *(results.environment.get(key, "") for key in keys)) for name, results in pairs.items())
    return compact("Environment", ("pair", *keys), rows)
