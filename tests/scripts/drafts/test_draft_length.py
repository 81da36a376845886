"""The replay of draft lengths over recorded drafts."""

import pytest

from qspec.speculation.length import cost_aware
from qspec.speculation.length.policies import Fixed
from scripts.drafts.draft_length import COSTS, ROW, SETTINGS, Clock, Draft, Record, changed, replay, variants


def test_a_fixed_length_takes_the_seconds_that_its_steps_cost() -> None:
    """Catches accepted tokens lost or counted twice, and drafts behind the end of the text counted as rejected."""
    drafts = [Draft(2, 1), Draft(0, 0), Draft(2, 2), Draft(2, 2), Draft(1, 1)]
    record, setting = Record("chat", 10, 6, {"ngram": drafts}), SETTINGS["n-grams"]
    seconds = replay(Fixed(2), setting, record, Clock(setting, 0.0, 0))
    cost = COSTS["ngram"]  # two drafted, one accepted; then two, both accepted: 1 + 2 + 3 tokens
    assert seconds == pytest.approx(2 * (cost.ask + 2 * cost.token + 1 + 2 * ROW))


def test_every_constant_is_one_of_the_policy_and_comes_back() -> None:
    """Catches a constant that was renamed, and a variant that goes on into the next one."""
    for _, name, value in variants():
        before = getattr(cost_aware, name)
        with changed(name, value):
            assert getattr(cost_aware, name) == value
        assert getattr(cost_aware, name) == before
