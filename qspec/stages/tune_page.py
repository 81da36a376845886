"""What a joint search found, as data and as a page: predicted beside measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from qspec.stages.document import (
    Document,
    Finding,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Table,
    number,
    percent,
    size,
)
from qspec.stages.tune_predict import Answer, Prediction, within
from qspec.stages.tune_space import Pruned


@dataclass(frozen=True)
class Confirmed:
    """A combination that was run: tokens per second."""

    prediction: Prediction
    speed: float

    @property
    def predicted(self) -> float:
        return 1 / self.prediction.seconds

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.speed - 1


@dataclass(frozen=True)
class Outcome:
    """All predictions, and those that were confirmed."""

    answer: Answer
    confirmed: tuple[Confirmed, ...]
    pruned: tuple[Pruned, ...]

    @property
    def chosen(self) -> Confirmed:
        """The fastest measured one within the budget; without one the predicted choice, which is run first."""
        fitting = [c for c in self.confirmed if within(c.prediction, self.answer.budget)]
        return max(fitting, key=lambda c: c.speed, default=self.confirmed[0])

    @property
    def errors(self) -> tuple[float, float]:
        """Median and worst size of the prediction's error."""
        sizes = [abs(c.error) for c in self.confirmed]
        return median(sizes), max(sizes)

    @property
    def why(self) -> str:
        middle, worst = self.errors
        chosen = self.chosen
        return (
            f"{self.answer.why} Of {len(self.confirmed)} combinations that were run, {chosen.prediction.name} is the "
            f"choice: {chosen.speed:.1f} tokens/s measured, {chosen.predicted:.1f} predicted. Predictions missed by "
            f"{percent(middle)} (median) and {percent(worst)} (worst)."
        )


def as_data(found: Outcome) -> dict[str, Any]:
    """JSON types only."""
    middle, worst = found.errors
    return {
        "why": found.why,
        "chosen": _row(found.chosen.prediction) | {"measured_tok_s": found.chosen.speed},
        "schedule": [list(entry) for entry in found.answer.schedule],
        "error": {"median": middle, "worst": worst},
        "confirmed": [_row(c.prediction) | {"measured_tok_s": c.speed} for c in found.confirmed],
        "front": [_row(p) for p in found.answer.front],
        "combinations": len(found.answer.every),
        "pruned": [list(entry) for entry in found.pruned],
    }


def document(found: Outcome, name: str) -> Document:
    """The page."""
    points = tuple(
        Point(c.prediction.name, c.predicted, c.speed, (1 / c.prediction.ci[1], 1 / c.prediction.ci[0]))
        for c in found.confirmed
    )
    plot = Plot(
        "Predicted and measured", "tokens/s, predicted", "tokens/s, measured", (Series("", points),), "diagonal"
    )
    rows = tuple((c.prediction.name, *_cells(c.prediction), number(c.speed), percent(c.error)) for c in found.confirmed)
    columns = ("combination", "predicted tokens/s", "KL", "first token, s", "memory", "measured tokens/s", "error")
    front = tuple((p.name, *_cells(p)) for p in found.answer.front)
    schedule = ", ".join(f"{k} at batch {lo} to {hi}" for lo, hi, k in found.answer.schedule)
    pruned = Table("Left out", ("combination", "why"), found.pruned)
    return Document(
        f"{name}: the best pair",
        f"{len(found.answer.every)} combinations predicted, {len(found.confirmed)} run",
        (
            Finding("good" if found.answer.fits else "bad", found.why),
            Paragraph(f"Draft length of the predicted choice: {schedule}."),
            Heading("Confirmed"),
            plot,
            Table("Run in turns on prompts that acceptance was not measured on", columns, rows),
            Heading("Front"),
            Table("Not dominated in time, KL and memory; predicted", columns[:-2], front),
            *((pruned,) if found.pruned else ()),
        ),
    )


def _cells(p: Prediction) -> Sequence[str]:
    return number(1 / p.seconds), number(p.kl), number(p.ttft), size(p.memory)


def _row(p: Prediction) -> dict[str, Any]:
    fields = ("name", "target", "draft", "gamma", "tokens_per_step", "kl", "top1", "memory")
    speeds = {"predicted_tok_s": 1 / p.seconds, "predicted_ci": [1 / p.ci[1], 1 / p.ci[0]], "ttft_s": p.ttft}
    return {field: getattr(p, field) for field in fields} | speeds
