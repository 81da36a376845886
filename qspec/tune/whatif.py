"""A joint search for a device that is not here: acceptance and KL measured on this one, seconds from a data sheet.

Every number of speed is a prediction that nothing has confirmed. A pass takes its roofline (`numerics.roofline`) at the
stated share of the sheet's figures; launching kernels, sampling and rounds take nothing, lookups what they take here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qspec.errors import RecipeError
from qspec.numerics.roofline import Rates, pass_seconds, prefill_seconds
from qspec.plan import LayerScheme
from qspec.planning.forecast import rates
from qspec.planning.planned import PlannedHalf
from qspec.planning.tune_space import PLAIN, Pruned
from qspec.readable import interval, number, percent, size
from qspec.report.document import Block, Document, Finding, Heading, Paragraph, Table
from qspec.schema.devices import DeviceSheet, read_devices
from qspec.schema.recipe import Recipe
from qspec.tune.answer import Predictions, answer
from qspec.tune.measure import Pieces
from qspec.tune.predict import DraftPiece, PairPrediction, Passes, SeparableModel, TargetPiece

BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.6
"""Share of the data sheet's figures that a pass is assumed to reach."""
SHOWN = 12
"""Pairs of the page's table by context, the fastest first."""


@dataclass(frozen=True)
class WhatIf:
    """Answers by context: cached tokens of every sequence."""

    sheet: DeviceSheet
    answers: dict[int, Predictions]
    pruned: tuple[Pruned, ...]

    @property
    def why(self) -> str:
        """The choice at every context."""
        return "\n".join(f"{self.sheet.title}, context {c}, predicted: {a.why}" for c, a in self.answers.items())

    def as_data(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "device": self.sheet.name,
            "predicted": True,
            "confirmed": [],
            "assumed": {
                "bandwidth_share": BANDWIDTH_SHARE,
                "compute_share": COMPUTE_SHARE,
                "source": self.sheet.source,
            },
            "contexts": [
                {
                    "context": context,
                    "why": predicted.why,
                    "chosen": _row(predicted.chosen),
                    "schedule": [list(entry) for entry in predicted.schedule],
                    "front": [_row(p) for p in predicted.front],
                    "combinations": [_row(p) for p in predicted.every],
                }
                for context, predicted in self.answers.items()
            ],
            "pruned": [list(entry) for entry in self.pruned],
        }

    def document(self, name: str) -> Document:
        """The page."""
        assumed = (
            f"Predicted at {percent(BANDWIDTH_SHARE, 0)} of the bandwidth and {percent(COMPUTE_SHARE, 0)} of the "
            f"operations of a data sheet ({self.sheet.source}); acceptance and KL were measured on this machine. "
            "Nothing was run on that device: order and size of effects are what these numbers are for."
        )
        blocks: list[Block] = [Paragraph(assumed)]
        for context, predicted in self.answers.items():
            blocks += [
                Heading(f"Context {context:,}, predicted"),
                Finding("open", predicted.why, "predicted"),
                _table(predicted),
            ]
        if self.pruned:
            blocks.append(Table("Refused on that device", ("combination", "why"), self.pruned))
        return Document(f"{name} on {self.sheet.title}: predicted", "from a data sheet, not run", tuple(blocks))


def on_device(recipe: Recipe, device: str) -> Recipe:
    """The recipe for a device whose data sheet is known; raises `RecipeError` for another one."""
    known = {name: sheet for name, sheet in read_devices().items() if sheet.bandwidth_tb_s is not None}
    if device not in known:
        fix = f"use one of {', '.join(known)}, or cpu to measure on this machine"
        raise RecipeError(f"device {device}", "has no data sheet with a bandwidth", fix)
    return Recipe.model_validate(recipe.as_dict() | {"device": device})


def predict_device(pieces: Pieces, sheet: DeviceSheet) -> WhatIf:
    """Every combination of the space at every context that the target has room for."""
    space = pieces.halves.space
    most = pieces.halves.target.arch.max_positions
    wanted = sorted({space.spec.context, *space.spec.contexts})
    pruned = [*space.pruned, *((f"context {c}", f"the target has {most} positions") for c in wanted if c > most)]
    answers = {
        context: answer(space, device_model(pieces, sheet, context), space.recipe.budget, context)
        for context in wanted
        if context <= most
    }
    return WhatIf(sheet, answers, tuple(pruned))


def device_model(pieces: Pieces, sheet: DeviceSheet, context: int) -> SeparableModel:
    """Measured distributions and harm with passes of a data sheet; each request has a prompt of `context` tokens."""
    space, targets, drafts = pieces.halves.space, dict[str, TargetPiece](), dict[str, DraftPiece]()
    for name, pair in space.targets.items():
        target = pieces.target(name, passes(pair.target, sheet, pieces, context))
        targets[name] = replace(target, ttft=_prompt(pair.target, sheet, context))
    for name, pair in space.drafts.items():
        if name == PLAIN:
            continue
        draft = pieces.draft(name, passes(pair.draft, sheet, pieces, context) if pair.draft is not None else {})
        if pair.draft is not None:
            draft = replace(draft, prompts=[_prompt(pair.draft, sheet, context)] * len(draft.prompts))
        elif pair.head is not None:
            draft = replace(draft, seconds=pass_seconds(pair.head.cost, sheet_rates(sheet, {}), 1, 0, 1))
        drafts[name] = draft
    return SeparableModel(targets, drafts)


def passes(half: PlannedHalf, sheet: DeviceSheet, pieces: Pieces, context: int) -> Passes:
    """Rooflines of a half by batch size and rows; a data sheet has no spread."""
    at, batches = sheet_rates(sheet, half.schemes), pieces.halves.space.spec.batches
    return {b: {r: (pass_seconds(half.bytes.cost, at, b, context, r), 0.0) for r in pieces.rows} for b in batches}


def sheet_rates(sheet: DeviceSheet, schemes: Mapping[str, LayerScheme | None]) -> Rates:
    """The reached share of a sheet's figures, for the formats of most layers."""
    figures = rates(sheet, schemes)
    assert figures is not None, "`on_device` lets only known sheets through"
    compute = figures.matmul * COMPUTE_SHARE, figures.attention * COMPUTE_SHARE
    return Rates(figures.bandwidth * BANDWIDTH_SHARE, *compute)


def _prompt(half: PlannedHalf, sheet: DeviceSheet, length: int) -> float:
    return prefill_seconds(half.bytes.cost, sheet_rates(sheet, half.schemes), length)


def _table(answer: Predictions) -> Table:
    """The best draft length of every pair, the fastest pairs first."""
    pairs: dict[tuple[str, str], PairPrediction] = {}
    for p in sorted(answer.every, key=lambda p: p.seconds):
        pairs.setdefault((p.target, p.draft), p)
    rows = tuple(
        (p.name, number(1 / p.seconds), number(p.kl), interval(p.kl_ci), number(p.ttft), size(p.memory))
        for p in list(pairs.values())[:SHOWN]
    )
    columns = (
        "combination",
        "tokens/s, predicted",
        "KL, measured here",
        "95 % CI",
        "first token, s, predicted",
        "memory",
    )
    return Table("The fastest pairs, each at its best draft length", columns, rows)


def _row(p: PairPrediction) -> dict[str, Any]:
    fields = ("name", "target", "draft", "gamma", "tokens_per_step", "kl", "memory")
    speeds = {"predicted_tok_s": 1 / p.seconds, "predicted_ttft_s": p.ttft, "kl_ci": p.kl_ci and list(p.kl_ci)}
    return {field: getattr(p, field) for field in fields} | speeds
