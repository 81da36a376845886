"""Batches of the benchmark: groups, rates, and what is compared with what."""

from dataclasses import replace

import pytest

from qspec.measure.arm import Arm, TokenizedPrompt
from qspec.measure.batch import _groups, _rate, _ratios, measure_batches
from qspec.measure.bench import arm_facts
from qspec.progress import Progress
from qspec.schema.recipe import Recipe
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.types import Generation, StepRecord
from tests.speculation.toys import TableLM, blend, table

TABLE = table(1, 6)
REQUESTS = [TokenizedPrompt("even" if i % 2 == 0 else "odd", [1, i]) for i in range(5)]


def _recipe(**benchmark: object) -> Recipe:
    fields = {"max_new_tokens": 12, "repeats": 2, "temperatures": [0.0, 0.8], **benchmark}
    speculation = {"draft_length": {"policy": "fixed", "k": 3}}
    return Recipe.model_validate(
        {
            "name": "t",
            "target": {"model": "m"},
            "draft": {"kind": "ngram"},
            "speculation": speculation,
            "benchmark": fields,
        }
    )


def _arms() -> dict[str, Arm]:
    plain = Arm(TableLM(TABLE))
    make = lambda: ModelDrafter(TableLM(blend(2, TABLE, 0.4)))  # noqa: E731
    return {"plain": plain, "drafts": replace(plain, drafter=make(), new_drafter=make)}


def test_each_size_is_measured_with_and_without_drafts() -> None:
    """Catches sizes that are left out, answers that drafts change, and a plain arm that drafts."""
    arms = _arms()
    facts = {name: arm_facts(name, arms) for name in arms}
    recipe = _recipe(batch_sizes=[1, 2, 4])
    found = measure_batches(arms, facts, REQUESTS, recipe, (), Progress(quiet=True))
    sizes = [(b.arm, b.batch, b.temperature) for b in found]
    assert sizes == [(arm, n, t) for n in (2, 4) for t in (0.0, 0.8) for arm in ("plain", "drafts")]
    by_arm = {b.arm: b for b in found if (b.batch, b.temperature) == (2, 0.0)}
    assert by_arm["plain"].draft_length == 0
    assert by_arm["plain"].speedup is None
    assert by_arm["drafts"].draft_length > 1
    assert by_arm["drafts"].speedup is not None
    assert by_arm["drafts"].rate.n == 2 * 2  # repeats x groups
    assert by_arm["drafts"].speedup.n == 2  # groups: a repeat is no new prompt
    assert (by_arm["drafts"].equal, by_arm["drafts"].answers) == (8, 8)
    assert all(b.answers == 0 for b in found if b.temperature)


def test_a_schedule_of_the_recipe_holds_in_batches() -> None:
    """Catches `by_batch` that the benchmark forgets: it would measure what is never served."""
    arms = _arms()
    facts = {name: arm_facts(name, arms) for name in arms}
    recipe = _recipe(batch_sizes=[2], max_new_tokens=6, temperatures=[0.0])
    length = recipe.speculation.draft_length.model_copy(update={"by_batch": ((1, 1, 3), (2, 8, 0))})
    recipe = recipe.model_copy(update={"speculation": recipe.speculation.model_copy(update={"draft_length": length})})
    found = measure_batches(arms, facts, REQUESTS, recipe, (), Progress(quiet=True))
    assert [b.draft_length for b in found] == [0, 0]


@pytest.mark.parametrize(("batch", "sizes"), [(2, [2, 2]), (5, [5]), (8, [8])])
def test_groups_are_full(batch: int, sizes: list[int]) -> None:
    """Catches a batch smaller than it is called, and prompts that are asked twice where there are enough."""
    groups = _groups(REQUESTS, batch)
    assert [len(group) for group in groups] == sizes
    assert batch > 5 or len({id(request) for group in groups for request in group}) == sum(sizes)


def test_rates_add_requests_up() -> None:
    """Catches seconds counted once per request: they are shares of one clock."""
    group = [Generation([1, 2, 3], [StepRecord(1, 1, 0.1, 0.3, 0.1)]) for _ in range(4)]
    assert _rate(group) == pytest.approx(8 / 2.0)


def test_a_repeat_is_no_new_prompt() -> None:
    """Catches repeats counted as if they were more prompts, of several groups or of the only one."""
    assert _ratios([2.0, 3.0, 8.0, 3.0], [1.0, 1.0, 1.0, 1.0], 2) == pytest.approx([4.0, 3.0])
    assert _ratios([2.0, 8.0], [1.0, 1.0], 1) == pytest.approx([4.0])
