"""Estimates before a job: tasks that fit a stated time, and refusals of days."""

from pathlib import Path
import re
from typing import Any

import pytest

from qspec.errors import RecipeError
from qspec.planning import duration
from qspec.planning.planned import PlannedPair, resolve
from qspec.planning.preview import preview
from qspec.planning.remarks import time_findings
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import raise_refused

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 60


def planned(model: str = "meta-llama/Llama-3.1-8B-Instruct", **sections: Any) -> PlannedPair:
    fields = {"name": "t", "target": {"model": model}, "draft": {"kind": "ngram"}}
    return resolve(Recipe.model_validate(fields | sections))


def minutes(pair: PlannedPair, stage: str = "") -> float:
    return sum(step.seconds for step in pair.steps() if stage in (step.stage, "")) / 60


def asked(pair: PlannedPair) -> list[tuple[int | None, int]]:
    """Limit and number of questions of every task."""
    return [(task.limit, duration.questions(task)) for task in pair.recipe.evaluation.tasks]


def test_the_readmes_recipe_takes_hours(tmp_path: Path):
    """Would catch the recipe that people copy asking all 12,032 questions of MMLU-Pro: 70 days on two cores."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = Recipe.read(tmp_path / "recipe.yaml")
    pair = resolve(recipe)
    assert 1 <= asked(pair)[0][1] < 100
    assert minutes(pair, "mmlu_pro") <= 60
    assert minutes(pair) < DAY
    raise_refused(time_findings(pair))
    whole = resolve(recipe.whole())
    assert asked(whole) == [(None, 12_032)]
    assert minutes(whole, "mmlu_pro") > 20 * DAY
    with pytest.raises(
        RecipeError, match=r"budget\.minutes 1440: .* days are estimated, .* mmlu_pro; .* qspec run --long"
    ):
        raise_refused(time_findings(whole))


@pytest.mark.parametrize("tasks", [[{}], [{"name": "gsm8k"}], [{}, {"name": "gsm8k"}], [{"name": "hellaswag"}]])
@pytest.mark.parametrize("allowed", [10.0, 60.0, 600.0])
def test_tasks_without_a_limit_fit_their_time(tasks: list[dict[str, Any]], allowed: float):
    """Would catch a limit that overshoots the time that the recipe states, or leaves most of it: two tasks share it."""
    small = {"target": {"model": "Qwen/Qwen2.5-0.5B-Instruct"}}
    pair = planned(**small, evaluation={"tasks": tasks, "task_minutes": allowed})
    spent = sum(minutes(pair, task.name) for task in pair.recipe.evaluation.tasks)
    assert spent <= allowed
    assert spent > 0.3 * allowed


def test_one_question_is_asked_at_least():
    """Would catch no question at all where none fits, or one of every subject, which takes hours with 70 B weights."""
    pair = planned("meta-llama/Llama-3.1-70B-Instruct", device="h20")
    (task,) = pair.recipe.evaluation.tasks
    assert (task.limit, task.subjects) == (1, ("biology",))
    own = planned(device="h100", evaluation={"tasks": [{"subjects": ["law", "math", "health"]}]})
    assert own.recipe.evaluation.tasks[0].subjects == ("law", "math")


@pytest.mark.parametrize(
    ("evaluation", "found"),
    [
        ({"tasks": [{"limit": 500}]}, [(500, 7000)]),
        ({"tasks": [{"limit": 500}, {"subjects": ["law"]}]}, [(500, 7000), (1, 1)]),
        ({"task_minutes": None}, [(None, 12_032)]),
        (
            {"tasks": [{"backends": ["api"]}], "api": {"original": "http://a/v1", "quantized": "http://b/v1"}},
            [(None, 12_032)],
        ),
    ],
)
def test_what_is_said_is_kept(evaluation: dict[str, Any], found: list[tuple[int | None, int]]):
    """Would catch a limit of the recipe's own that is lowered, or one for servers elsewhere, whose speed is unknown."""
    assert asked(planned(evaluation=evaluation)) == found


def test_a_small_task_is_asked_whole():
    """Would catch a limit where none is needed: its first rows, in place of all."""
    evaluation = {"tasks": [{"name": "humaneval", "run_code": True}], "task_minutes": 10 * DAY}
    assert asked(planned("Qwen/Qwen2.5-0.5B-Instruct", evaluation=evaluation)) == [(None, 164)]


def test_a_settled_recipe_stays_as_it_is():
    """Would catch a resumed run, or one of the recipe.yaml beside a pair, that asks other questions."""
    once = planned().recipe
    assert resolve(once).recipe == once
    assert Recipe.of(once.as_dict(), (), "again") == once


def test_more_cores_ask_more_and_take_less(monkeypatch: pytest.MonkeyPatch):
    """Would catch a day of estimate that is refused on a server which needs an hour."""
    before, slow = asked(planned())[0][1], minutes(planned(), "fidelity")
    monkeypatch.setattr(duration, "usable_cores", lambda: 64)
    assert asked(planned())[0][1] > 10 * before
    assert minutes(planned(), "fidelity") == pytest.approx(slow / 32)


def test_counted_questions_are_judged():
    """Would catch a group of 57 unknown parts that is planned as one, and then takes days."""
    pair = planned("Qwen/Qwen2.5-0.5B-Instruct", evaluation={"tasks": [{"name": "a_group_of_many"}]})
    (task,) = pair.recipe.evaluation.tasks
    raise_refused(time_findings(pair, {task: duration.questions(task)}))
    with pytest.raises(RecipeError, match="a_group_of_many"):
        raise_refused(time_findings(pair, {task: 57 * duration.questions(task)}))


def test_plan_tells_what_is_not_asked():
    """Would catch a subset that looks like the whole task, and a plan without the time of a stage."""
    recipe = Recipe.model_validate({"name": "t", "target": {"model": "Qwen/Qwen3-0.6B"}, "draft": {"kind": "ngram"}})
    view = preview(recipe)
    notes = [f"{f['value']}: {f['rule']}; {f['fix']}" for f in view["findings"] if f["level"] == "note"]
    assert any("task_minutes 60: leaves time for" in n and "of the 12,032 questions" in n for n in notes)
    stages = {stage["stage"]: stage for stage in view["time"]["stages"]}
    assert " of 12,032 questions" in stages["mmlu_pro"]["work"]
    assert view["time"]["minutes"] == pytest.approx(sum(stage["seconds"] for stage in stages.values()) / 60)
    assert view["recipe"]["evaluation"]["tasks"][0]["limit"] is not None
