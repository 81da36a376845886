"""Tasks of lm-eval on the targets of a search's front, item by item against the original."""

from collections.abc import Mapping, Sequence
from functools import cache

from qspec.bridges import harness
from qspec.bridges.harness import Scores
from qspec.schema.results import TaskResult
from qspec.stages.evaluate import compare
from qspec.stages.tune_answer import Answer
from qspec.stages.tune_halves import ORIGINAL
from qspec.stages.tune_measure import Pieces

BACKEND = "qspec"
Tasks = Mapping[str, tuple[TaskResult, ...]]
"""By target."""


def asked(answer: Answer, most: int) -> list[str]:
    """Targets of the choice and the front, at most so many."""
    return list(dict.fromkeys(p.target for p in (answer.chosen, *answer.front)))[:most]


def measure_tasks(pieces: Pieces, targets: Sequence[str]) -> Tasks:
    """The recipe's tasks of qspec's own backend; the original answers once, and nothing that the journal has."""
    halves = pieces.halves
    recipe = halves.space.recipe
    tasks = [task for task in recipe.evaluation.tasks if BACKEND in task.backends]

    @cache
    def scores(target: str, index: int) -> Scores:
        pieces.progress.stage(f"{tasks[index].name} of {target}")
        lm, eos_ids = halves.decoder(target), halves.target.arch.eos_ids
        return harness.evaluate(lm, halves.target.tokenizer, tasks[index], eos_ids, pieces.progress)

    def kept(target: str, index: int) -> TaskResult:
        task, settings = tasks[index], pieces.setting([target])
        found = pieces.journal.kept(
            "task",
            [task.model_dump(mode="json"), settings],
            lambda: compare(task, BACKEND, scores(ORIGINAL, index), scores(target, index)).model_dump(mode="json"),
        )
        return TaskResult.model_validate(found)

    return {target: tuple(kept(target, index) for index in range(len(tasks))) for target in targets}
