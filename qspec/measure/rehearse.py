"""Everything that later stages read besides the model, read once before compute: a fault costs seconds, not the run."""

from qspec.bridges import harness
from qspec.bridges.text import calibration_rows, windows
from qspec.errors import RecipeError
from qspec.measure.bench import load_requests
from qspec.measure.evaluate import SERVED
from qspec.measure.needle import questions
from qspec.records import LoadedModel
from qspec.schema.recipe import Recipe, TaskSpec


def rehearse(recipe: Recipe, target: LoadedModel, calibrates: bool = True) -> dict[TaskSpec, int]:
    """Raise what calibration, fidelity, tasks or benchmark would raise about text, tasks, and the room for answers.

    calibrates: whether any half reads the calibration text. Returns how many questions each task asks.
    """
    context = min(recipe.speculation.max_length or target.arch.max_positions, target.arch.max_positions)
    fidelity, needle, speed = recipe.evaluation.fidelity, recipe.evaluation.needle, recipe.benchmark
    if calibrates:
        calibration_rows(recipe.calibration, target.tokenizer, recipe.seed)
    if fidelity is not None:
        for text in (fidelity.data, *fidelity.domains):
            windows(text, fidelity.windows, min(fidelity.length, context), target.tokenizer)
    if needle is not None:
        if (longest := max(needle.lengths)) > context:
            rule = f"is above the {context:,} tokens that target and speculation.max_length allow"
            raise RecipeError(f"evaluation.needle.lengths {longest:,}", rule, "leave it out")
        questions(target.tokenizer, needle, recipe.seed)
    if speed is not None:
        load_requests(speed, target.tokenizer, context - speed.max_new_tokens)
    here = [task for task in recipe.evaluation.tasks if set(task.backends) - set(SERVED)]
    return {task: harness.require(task, context) for task in here}
