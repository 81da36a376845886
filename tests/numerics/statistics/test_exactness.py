"""Counts of tokens inside sets of known chance, against enumeration and simulation."""

from itertools import product
import math

import pytest
from scipy import stats

from qspec.numerics.statistics.fidelity import detectable_shift, excess_p


def test_p_is_that_of_enumeration() -> None:
    """Would catch a normal approximation, a tail without the count itself, and one side taken for both."""
    chances = [0.1, 0.7, 0.45, 0.9]

    def probability(inside: tuple[bool, ...]) -> float:
        return math.prod(c if i else 1 - c for i, c in zip(inside, chances, strict=True))

    every = list(product((False, True), repeat=4))
    for inside in every:
        tails = [
            sum(probability(other) for other in every if sum(other) <= sum(inside)),
            sum(probability(other) for other in every if sum(other) >= sum(inside)),
        ]
        assert excess_p(inside, chances) == pytest.approx(min(1.0, 2 * min(tails)))
    assert excess_p([], []) == 1.0


def test_certain_tokens_say_nothing() -> None:
    """Would catch a p-value of 0 where every token was certain."""
    assert excess_p([True] * 5 + [False] * 5, [1.0] * 5 + [0.0] * 5) == 1.0
    assert excess_p([False] + [True] * 4, [1.0] * 5) == 0.0


@pytest.mark.parametrize(("count", "chance"), [(60, 0.5), (480, 0.3), (200, 0.05)])
def test_the_stated_shift_is_found_as_often_as_stated(count: int, chance: float) -> None:
    """Would catch "would have been found in 4 of 5 cases" said of a shift that mostly is not."""
    level, shift = 0.01, detectable_shift([chance] * count, 0.01)
    fewest = range(round(count * chance), count + 1)
    first = next(k for k in fewest if excess_p([True] * k + [False] * (count - k), [chance] * count) < level)
    power, half = (float(stats.binom.sf(first - 1, count, chance + part)) for part in (shift, shift / 2))
    assert power == pytest.approx(0.8, abs=0.01)
    assert half < 0.4


def test_few_tokens_show_no_shift() -> None:
    """Would catch a shift that is claimed to be detectable where no count is rare enough."""
    assert detectable_shift([0.97] * 300, 0.001) == pytest.approx(0.03, abs=0.001)  # no chance rises above 1
    assert detectable_shift([], 0.001) == detectable_shift([0.9] * 3, 0.001) == 1.0
    assert detectable_shift([0.5] * 40, 0.001) > 3 * detectable_shift([0.5] * 480, 0.001)
