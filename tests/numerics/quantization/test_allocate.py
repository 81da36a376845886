"""Multiple-choice knapsack: never above the budget, never worse for more, close to the optimum."""

from itertools import pairwise, product

from hypothesis import given, settings, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.numerics.quantization.allocate import allocate, gap

Costs, Errors = list[list[int]], list[list[float]]
ROUNDING = 1e-9
"""Errors are sums of a few numbers up to 10: their rounding stays far below."""


@st.composite
def instances(draw: st.DrawFn) -> tuple[Costs, Errors]:
    """One to five units of one to four candidates, dominated and equal ones among them."""
    shapes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    cost = st.integers(0, 12)
    error = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_nan=False))
    costs = [draw(st.lists(cost, min_size=n, max_size=n)) for n in shapes]
    return costs, [draw(st.lists(error, min_size=n, max_size=n)) for n in shapes]


def total(table: Costs | Errors, chosen: list[int]) -> float:
    return sum(row[c] for row, c in zip(table, chosen, strict=True))


@settings(max_examples=100, deadline=None)
@given(instances(), st.integers(0, 60))
def test_within_the_budget_and_within_the_gap_of_the_optimum(instance: tuple[Costs, Errors], budget: int) -> None:
    """Would catch a plan that does not fit, and steps taken in the wrong order."""
    costs, errors = instance
    least = sum(map(min, costs))
    if budget < least:
        with pytest.raises(RecipeError, match=f"smallest possible size is {least};"):
            allocate(costs, errors, budget)
        return
    chosen = allocate(costs, errors, budget)
    assert total(costs, chosen) <= budget
    every = [list(one) for one in product(*(range(len(row)) for row in costs))]
    best = min(total(errors, one) for one in every if total(costs, one) <= budget)
    assert total(errors, chosen) <= best + gap(costs, errors, budget) + ROUNDING


@settings(max_examples=100, deadline=None)
@given(instances())
def test_a_larger_budget_is_never_worse(instance: tuple[Costs, Errors]) -> None:
    """Would catch a leftover that is filled at the cost of a better step."""
    costs, errors = instance
    least, most = sum(map(min, costs)), sum(map(max, costs))
    found = [total(errors, allocate(costs, errors, budget)) for budget in range(least, most + 1)]
    assert all(later <= earlier + ROUNDING for earlier, later in pairwise(found))
    assert found[-1] == pytest.approx(sum(map(min, errors)), abs=ROUNDING)


def test_all_that_is_wanted_fits_or_nothing_does() -> None:
    """Would catch a gap that is claimed where the optimum is reached, and ties that depend on chance."""
    costs, errors = [[4, 8], [4, 8], [4, 8]], [[3.0, 1.0], [3.0, 1.0], [3.0, 1.0]]
    assert allocate(costs, errors, 24) == [1, 1, 1]
    assert gap(costs, errors, 24) == 0
    assert allocate(costs, errors, 16) == [1, 0, 0]  # of equals the earlier unit's
    assert gap(costs, errors, 16) == 2
    assert allocate([[8, 4]], [[5.0, 1.0]], 100) == [1]  # dearer and worse is never taken
