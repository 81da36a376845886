"""Everything that later stages read besides the model, read once before compute: a fault costs seconds, not the run."""

from qspec.bridges import harness
from qspec.bridges.text import calibration_rows, windows
from qspec.records import LoadedModel
from qspec.schema.recipe import Recipe
from qspec.stages.bench import load_requests


def rehearse(recipe: Recipe, target: LoadedModel, calibrates: bool = True) -> None:
    """Raise what calibration, fidelity, tasks or benchmark would raise about text, tasks, and the room for answers.

    calibrates: whether any half reads the calibration text.
    """
    context = min(recipe.speculation.max_length or target.arch.max_positions, target.arch.max_positions)
    fidelity, speed = recipe.evaluation.fidelity, recipe.benchmark
    if calibrates:
        calibration_rows(recipe.calibration, target.tokenizer, recipe.seed)
    if fidelity is not None:
        windows(fidelity.data, fidelity.windows, min(fidelity.length, context), target.tokenizer)
    load_requests(speed, target.tokenizer, context - speed.max_new_tokens)
    for task in recipe.evaluation.tasks:
        harness.require(task, context)
