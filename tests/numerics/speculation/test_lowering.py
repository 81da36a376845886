"""The order in which layers are lowered, against all states there are."""

from itertools import product

from hypothesis import given, strategies as st
import pytest

from qspec.numerics.speculation.lowering import Levels, best, descend, path, single_losses

LOSSES = st.lists(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=2), min_size=3, max_size=3)


@given(LOSSES, st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_no_state_of_the_same_cost_loses_less(raw: list[list[float]], saved: list[int]) -> None:
    """An order by loss alone, or one that stops at a unit's first level: brute force over three units of three levels.

    Where losses add up, a state on the path is the best of its own cost.
    """
    losses = [[0.0, a, a + b] for a, b in raw]
    costs = [[5.0, 5.0 - s, 5.0 - 1.5 * s] for s in saved]

    def total(table: list[list[float]], state: Levels) -> float:
        return sum(unit[level] for unit, level in zip(table, state, strict=True))

    states = list(product(range(3), repeat=3))
    for reached in path(losses, costs):
        cost = total(costs, reached)
        least = min(total(losses, s) for s in states if total(costs, s) <= cost + 1e-12)
        assert total(losses, reached) == pytest.approx(least)
    assert path(losses, costs)[-1] == (2, 2, 2)


def test_levels_that_save_nothing_are_left_alone() -> None:
    """A slower kernel chosen because it has fewer bits."""
    assert path([[0.0, 0.0], [0.0, 0.1]], [[1.0, 1.2], [1.0, 0.5]]) == [(0, 0), (0, 1)]


def test_single_losses_lower_one_unit_at_a_time() -> None:
    """Losses measured on a state that an earlier unit has changed."""
    asked: list[Levels] = []

    def acceptance(levels: Levels) -> float:
        asked.append(levels)
        return 0.9 - 0.1 * levels[0] - 0.01 * levels[1]

    assert single_losses([2, 3], acceptance) == [pytest.approx([0, 0.1]), pytest.approx([0, 0.01, 0.02])]
    assert asked == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_the_descent_ends_at_the_floor_or_without_gain() -> None:
    """A search that walks on when every step makes drafts worse, or a choice below the floor."""
    table: dict[Levels, tuple[float, float]] = {
        (0,): (0.8, 1.0),
        (1,): (0.7, 1.2),
        (2,): (0.6, 1.1),
        (3,): (0.5, 1.1),
        (4,): (0.2, 9.0),
    }
    states = list(table)
    assert [stop.levels for stop in descend(states, table.__getitem__, 0.5, 2)] == states[:4]
    whole = descend(states, table.__getitem__, 0.5, 9)
    assert len(whole) == 5
    assert best(whole, 0.5).levels == (1,)
