"""Fronts, budgets and schedules."""

from itertools import pairwise

from hypothesis import given, strategies as st

from qspec.numerics.statistics.pareto import choose, excess, front, paying, schedule

COSTS = st.dictionaries(st.integers(), st.tuples(*[st.floats(0.1, 9)] * 3), min_size=1, max_size=12)


@given(COSTS)
def test_front_holds_what_nothing_dominates(costs: dict[int, tuple[float, ...]]) -> None:
    """A dominated point on the front, or one that is missing."""
    kept = front(costs)
    for key, row in costs.items():
        beaten = any(o != row and all(a <= b for a, b in zip(o, row, strict=True)) for o in costs.values())
        assert (key in kept) != beaten


@given(COSTS, st.floats(0.1, 9))
def test_budget_excludes_or_the_nearest_is_chosen(costs: dict[int, tuple[float, ...]], limit: float) -> None:
    """A choice over the budget although one fits, or not the nearest where none does."""
    key, fits = choose(costs, (None, limit, None))
    fitting = [row for row in costs.values() if row[1] <= limit]
    assert fits == bool(fitting)
    if fits:
        assert costs[key][0] == min(row[0] for row in fitting)
    else:
        assert costs[key][1] == min(row[1] for row in costs.values())


def test_unknown_harm_is_not_within_a_limit() -> None:
    """NaN compares false, so an unmeasured KL would pass every budget."""
    assert excess((1.0, float("nan")), (None, 0.1)) > 0


@given(st.dictionaries(st.integers(1, 256), st.integers(0, 8), min_size=1, max_size=8))
def test_schedule_never_rises_and_has_no_gaps(best: dict[int, int]) -> None:
    """Noise that drafts more at a larger batch, or ranges that vLLM refuses."""
    found = schedule(best)
    assert [k for *_, k in found] == sorted({k for *_, k in found}, reverse=True)
    assert all(b[0] == a[1] + 1 for a, b in pairwise(found))
    assert all(k <= best[lo] for lo, _, k in found)


def test_drafts_are_kept_up_to_the_last_batch_that_is_shown_to_pay() -> None:
    """A batch whose lower bound is at 1, one that pays behind one that does not, and drafts that pay nowhere."""
    assert paying({1: 1.2, 2: 1.0, 4: 0.9}, 5) == (1, [(1, 1, 5), (2, 4, 0)])
    assert paying({1: 0.8, 2: 0.9, 4: 1.01, 8: 0.7}, 5) == (4, [(1, 7, 5), (8, 8, 0)])
    assert paying({1: 0.8, 4: 0.0}, 5) == (0, [(1, 4, 0)])
    assert paying({1: 1.3, 8: 1.1}, 5) == (8, [(1, 8, 5)])
