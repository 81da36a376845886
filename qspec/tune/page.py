"""Result of a joint search, as data and as a page: predicted beside measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
import math
from operator import attrgetter
from statistics import median
from typing import Any

from qspec.measure.arm import Run
from qspec.numerics.speculation.lowering import Levels
from qspec.numerics.statistics.evidence import useful
from qspec.numerics.statistics.predictive import TOLERANCE, excess_deviation, left_out, off, widened
from qspec.planning.tune_space import Pruned
from qspec.readable import interval, number, percent, size
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
    Tone,
    tabulate,
)
from qspec.tune.answer import Predictions, within
from qspec.tune.confirm import Rate, halves, speed_of
from qspec.tune.layers import Lowered, as_data as layers_data
from qspec.tune.predict import PairPrediction


@dataclass(frozen=True)
class Confirmed:
    """A combination that was run: tokens per second, with a 95 % interval over prompts (None from a single one).

    chosen_by: the speed on every other prompt, which the choice is made by; reported: that on the others, which the
    choice is reported with, since the best of several flatters itself on the prompts that chose it.
    """

    prediction: PairPrediction
    speed: float
    ci: tuple[float, float] | None = None
    chosen_by: float | None = None
    reported: Rate | None = None

    @property
    def predicted(self) -> float:
        return 1 / self.prediction.seconds

    @property
    def error(self) -> float:
        """Error of the prediction, relative to what was measured."""
        return self.predicted / self.speed - 1

    @property
    def off(self) -> bool:
        """Whether the prediction misses by more than its tolerance."""
        return off(self.predicted, self.speed)


def confirmed(prediction: PairPrediction, runs: Sequence[Run]) -> Confirmed:
    """A combination with the speeds of its runs."""
    choosing, judging = halves(runs)
    return Confirmed(prediction, *speed_of(runs), speed_of(choosing)[0], speed_of(judging))


@dataclass(frozen=True)
class SearchResult:
    """All predictions, and those that were confirmed."""

    answer: Predictions
    confirmed: tuple[Confirmed, ...]
    pruned: tuple[Pruned, ...]
    lowered: tuple[Lowered, ...] = ()

    @property
    def chosen(self) -> Confirmed:
        """The fastest within the budget, on the prompts that choose; without one the predicted choice."""
        budget = self.answer.budget
        fitting = [c for c in self.confirmed if within(c.prediction, budget)]
        return max(fitting, key=lambda c: c.chosen_by or c.speed, default=self.confirmed[0])

    @property
    def errors(self) -> tuple[float, float]:
        """Median and worst size of the prediction's error."""
        sizes = [abs(c.error) for c in self.confirmed]
        return median(sizes), max(sizes)

    @property
    def model_error(self) -> float:
        """Standard deviation of the model's own error, relative: what the stated spread does not explain."""
        return excess_deviation(*self._missed)

    def interval(self, p: PairPrediction) -> tuple[float, float]:
        """Tokens/s: where a run would end in 95 of 100 cases, by the errors of the confirmed ones (but its own)."""
        errors, halves = self._missed
        own = next((i for i, c in enumerate(self.confirmed) if c.prediction == p), None)
        half = widened(_half(p), errors, halves) if own is None else left_out(errors, halves)[own]
        return math.exp(-half) / p.seconds, math.exp(half) / p.seconds

    @property
    def coverage(self) -> float:
        """Share of the confirmed ones inside their interval; 0.95 is promised."""
        inside = [low <= c.speed <= high for c in self.confirmed for low, high in [self.interval(c.prediction)]]
        return sum(inside) / len(inside)

    @property
    def warning(self) -> str:
        """Warning about predictions that were not tested; empty where all that were tested held."""
        missed = sum(c.off for c in self.confirmed)
        if not missed:
            return ""
        return (
            f"Warning: {missed} of {len(self.confirmed)} predictions miss by more than the tolerance of "
            f"{percent(TOLERANCE, 0)}, so those of combinations that were not run may be as far off."
        )

    @property
    def why(self) -> str:
        middle, worst = self.errors
        chosen = self.chosen
        speed, _ = chosen.reported or (chosen.speed, None)
        text = (
            f"{self.answer.why} Of {len(self.confirmed)} combinations that were run, {chosen.prediction.name} is the "
            f"choice: {speed:.1f} tokens/s measured on prompts that did not choose it, {chosen.predicted:.1f} "
            f"predicted. Predictions missed by {percent(middle)} (median) and {percent(worst)} (worst); "
            f"{percent(self.coverage, 0)} of the measured speeds lie in their predicted interval, widened by the "
            "errors of the others."
        )
        return f"{text} {self.warning}" if self.warning else text

    @cached_property
    def _missed(self) -> tuple[list[float], list[float]]:
        """Errors of the confirmed predictions as logarithms, and the half-widths of their stated intervals."""
        return [math.log1p(c.error) for c in self.confirmed], [_half(c.prediction) for c in self.confirmed]


def _half(p: PairPrediction) -> float:
    return math.log(p.ci[1] / p.ci[0]) / 2


def as_data(result: SearchResult) -> dict[str, Any]:
    """JSON types only."""
    middle, worst = result.errors
    return {
        "why": result.why,
        "chosen": _confirmed(result, result.chosen),
        "schedule": [list(entry) for entry in result.answer.schedule],
        "error": {
            "median": middle,
            "worst": worst,
            "model": result.model_error,
            "coverage": result.coverage,
            "tolerance": TOLERANCE,
            "beyond_tolerance": sum(c.off for c in result.confirmed),
        },
        "confirmed": [_confirmed(result, c) for c in result.confirmed],
        "front": [_row(result, p) for p in result.answer.front],
        "layers": [layers_data(one) for one in result.lowered],
        "combinations": len(result.answer.every),
        "pruned": [list(entry) for entry in result.pruned],
    }


def document(result: SearchResult, name: str) -> Document:
    """The page."""
    points = tuple(
        Point(c.prediction.name, c.predicted, c.speed, *(ci if useful(ci) else None for ci in intervals))
        for c in result.confirmed
        for intervals in [(result.interval(c.prediction), c.ci)]
    )
    plot = Plot(
        "Predicted and measured", "tokens/s, predicted", "tokens/s, measured", (Series("", points),), "diagonal"
    )
    rows = tuple(
        (*_cells(result, c.prediction), number(c.speed), _ends(c.ci), percent(c.error), "no" if c.off else "yes")
        for c in result.confirmed
    )
    predicted = ("combination", "predicted tokens/s", "95 % of runs", "KL", "95 % CI, KL", "first token, s", "memory")
    columns = (*predicted, "measured tokens/s", "95 % CI", "error", f"within {percent(TOLERANCE, 0)}")
    front = tuple(_cells(result, p) for p in result.answer.front)
    schedule = ", ".join(f"{k} at batch {lo} to {hi}" for lo, hi, k in result.answer.schedule)
    pruned = Table("Left out", ("combination", "why"), result.pruned)
    return Document(
        f"{name}: the best pair",
        f"{len(result.answer.every)} combinations predicted, {len(result.confirmed)} run",
        (
            Finding(_tone(result), result.why),
            *([Finding("open", result.warning, "off")] if result.warning else []),
            Paragraph(f"Draft length of the predicted choice: {schedule}."),
            Heading("Confirmed"),
            plot,
            Table("Run in turns on prompts that acceptance was not measured on", columns, rows),
            Heading("Front"),
            Table("Not dominated in time, KL and memory; predicted", predicted, front),
            *(block for one in result.lowered for block in _layers(one)),
            *((pruned,) if result.pruned else ()),
        ),
    )


def _tone(result: SearchResult) -> Tone:
    """Good only where the budget is met and the predictions that were put to the test held."""
    if not result.answer.fits:
        return "bad"
    return "open" if result.warning else "good"


def _ends(ci: tuple[float, float] | None) -> str:
    """An interval of a speed, as far as it says something."""
    return interval(ci) if useful(ci) else "unknown"


def _cells(result: SearchResult, p: PairPrediction) -> tuple[str, ...]:
    speed = number(1 / p.seconds), _ends(result.interval(p))
    return (p.name, *speed, number(p.kl), interval(p.kl_ci), number(p.ttft), size(p.memory))


def _layers(lowered: Lowered) -> Iterator[Block]:
    """The way of a draft from its finest form down."""
    name, (layers, heads) = lowered.ladder.name, (", ".join(names) for names in _names(lowered))
    yield Heading(name)
    yield Paragraph(
        f"Beside {lowered.target}: layers from {layers}, head from {heads}, by acceptance lost per second of a pass. "
        f"Chosen: {_state(lowered, lowered.chosen.levels)}. Acceptance is the mean overlap of both distributions."
    )
    states = [_state(lowered, stop.levels) for stop in lowered.stops]
    stops = list(zip(states, lowered.stops, lowered.sizes, strict=True))
    for axis, of in (("acceptance", attrgetter("acceptance")), ("tokens/s, predicted", attrgetter("value"))):
        points = tuple(Point(state, weight / 1e6, of(stop)) for state, stop, weight in stops)
        yield Plot(f"{name}: {axis} by size", "MB of the draft", axis, (Series("", points, joined=True),))
    yield tabulate(
        "Lowered one after the other",
        list(zip(stops, lowered.seconds, strict=True)),
        ("state", lambda row: row[0][0]),
        ("acceptance", lambda row: number(row[0][1].acceptance)),
        ("draft", lambda row: size(row[0][2])),
        ("ms per pass", lambda row: number(1e3 * row[1])),
        ("predicted tokens/s", lambda row: number(row[0][1].value)),
    )


def _names(lowered: Lowered) -> tuple[list[str], list[str]]:
    return [form.scheme for form in lowered.ladder.layers], [str(form.head) for form in lowered.ladder.heads]


def _state(lowered: Lowered, levels: Levels) -> str:
    """`W8A8 12, W4A16 18, head W8A8`: layers by scheme."""
    schemes, heads = _names(lowered)
    counts = [f"{name} {levels[:-1].count(i)}" for i, name in enumerate(schemes) if i in levels[:-1]]
    return f"{', '.join(counts)}, head {heads[levels[-1]]}"


def _row(result: SearchResult, p: PairPrediction) -> dict[str, Any]:
    fields = ("name", "target", "draft", "gamma", "tokens_per_step", "kl", "top1", "memory")
    speeds = {"predicted_tok_s": 1 / p.seconds, "predicted_ci": list(result.interval(p)), "ttft_s": p.ttft}
    return {field: getattr(p, field) for field in fields} | {"kl_ci": p.kl_ci and list(p.kl_ci)} | speeds


def _confirmed(result: SearchResult, c: Confirmed) -> dict[str, Any]:
    measured = {"measured_tok_s": c.speed, "measured_ci": c.ci and list(c.ci), "within_tolerance": not c.off}
    speed, ci = c.reported or (c.speed, c.ci)
    halved = {"chosen_by_tok_s": c.chosen_by or c.speed, "reported_tok_s": speed, "reported_ci": ci and list(ci)}
    return _row(result, c.prediction) | measured | halved
