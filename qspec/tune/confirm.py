"""Predictions put to the test: whom to run, all of them in turns, and how fast they were."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
import math
from typing import Any

from qspec.kept import Kept
from qspec.measure.arm import Arm, Run, TokenizedPrompt
from qspec.measure.bench import measure
from qspec.numerics.statistics.student import ratio_interval
from qspec.progress import Progress
from qspec.schema.recipe import Recipe
from qspec.speculation.types import Generation, StepRecord
from qspec.tune.answer import Predictions
from qspec.tune.predict import PairPrediction

Rate = tuple[float, tuple[float, float] | None]
"""Tokens per second, and their interval."""


def finalists(answer: Predictions, most: int, also: Collection[tuple[str, str]] = ()) -> list[PairPrediction]:
    """Whom to run: the choice, the pairs of `also`, the front, the fastest other pairs; each at its best length."""
    front = [p for p in answer.front if p.seconds <= 2 * answer.chosen.seconds]
    named = [[p for p in answer.every if (p.target, p.draft) == pair] for pair in also]
    best = [min(rows, key=lambda p: p.seconds) for rows in named if rows]  # the others were pruned
    listed = dict.fromkeys([answer.chosen, *best, *front])
    seen: set[tuple[str, str]] = {(p.target, p.draft) for p in listed}
    for p in sorted(answer.every, key=lambda p: p.seconds):
        if (p.target, p.draft) not in seen:
            seen.add((p.target, p.draft))
            listed[p] = None
    return list(listed)[:most]


def confirm(
    arms: Mapping[str, Arm],
    requests: list[TokenizedPrompt],
    recipe: Recipe,
    eos_ids: Collection[int],
    kept: Kept,
    progress: Progress,
) -> dict[str, list[Run]]:
    """Every arm answers the requests, in turns, at the recipe's own sampling; what `kept` has is not asked again."""
    facts = [sorted(arms), [r.tokens for r in requests], {**recipe.as_dict(), "budget": None}]
    spec = recipe.timing.model_copy(update={"temperatures": (recipe.speculation.temperature,)})
    every = list(product(spec.temperatures, range(spec.repeats), range(len(requests))))
    fields_of = {one: entry.value for one in every if (entry := kept.find("runs", [facts, one]))}
    runs = measure(arms, requests, recipe.model_copy(update={"benchmark": spec}), eos_ids, progress, fields_of)
    for one, group in groupby(runs, lambda r: (r.temperature, r.repeat, r.prompt)):
        fields_of[one] = kept.value("runs", [facts, one], partial(_fields, list(group)))
    every_run = [_run(fields) for one in every for fields in fields_of[one]]
    return {name: [run for run in every_run if run.arm == name] for name in arms}


def speed_of(runs: Sequence[Run]) -> Rate:
    """Tokens per second of decoding over all runs, with its 95 % interval over prompts."""
    prompts = sorted({run.prompt for run in runs})
    same = [[run.generation for run in runs if run.prompt == prompt] for prompt in prompts]
    seconds = [sum(g.seconds for g in of) for of in same]
    tokens = [float(sum(len(g.tokens) - 1 for g in of)) for of in same]
    if not sum(seconds):
        return math.nan, None
    ci = ratio_interval(seconds, tokens)
    return sum(tokens) / sum(seconds), ci and (1 / ci[1], 1 / ci[0] if ci[0] > 0 else math.inf)


def halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Runs of every other prompt, and of the others: the best is chosen by the first and reported with the second.

    Both are all runs where there is a single prompt.
    """
    prompts = sorted({run.prompt for run in runs})
    first, second = (prompts[::2], prompts[1::2]) if len(prompts) > 1 else (prompts, prompts)
    return [run for run in runs if run.prompt in first], [run for run in runs if run.prompt in second]


def _fields(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [asdict(run) for run in runs]


def _run(fields: dict[str, Any]) -> Run:
    generation = fields["generation"]
    steps = [StepRecord(**step) for step in generation["steps"]]
    return Run(**fields | {"generation": Generation(**generation | {"steps": steps})})
