"""Intervals that hold a model's own error, over worlds where that error is known."""

import math
import random

import pytest

from qspec.numerics.statistics.predictive import excess_deviation, left_out, miss, off, widened


def test_a_model_that_errs_is_covered_as_often_as_it_says() -> None:
    """Intervals that hold only the spread of what was measured, and miss most confirmed speeds."""
    source, inside, narrow = random.Random(0), 0, 0
    for _ in range(200):
        errors = [source.gauss(0, 0.1) + source.gauss(0, 0.02) for _ in range(20)]
        halves = [1.96 * 0.02] * 20
        inside += sum(abs(error) <= half for error, half in zip(errors, left_out(errors, halves), strict=True))
        narrow += sum(abs(error) <= half for error, half in zip(errors, halves, strict=True))
    assert 0.93 < inside / 4000 < 0.97  # binomial: 0.95 +- 0.007, and the spread is estimated from 19
    assert narrow / 4000 < 0.4


def test_an_error_that_is_explained_adds_nothing() -> None:
    """A model that is punished twice for the spread it stated itself."""
    assert excess_deviation([0.01, -0.02], [0.1, 0.1]) == 0.0
    assert excess_deviation([0.3, -0.3], [0.0, 0.0]) == pytest.approx(0.3)


def test_nothing_confirmed_leaves_the_interval_as_it_is() -> None:
    """A study of one run that has no others to learn from."""
    assert left_out([0.2], [0.1]) == [0.1]
    assert widened(0.1, [0.01], [0.1]) > 0.1


@pytest.mark.parametrize(
    ("predicted", "measured", "by", "beyond"),
    [
        (1.5, 1.0, 0.5, True),
        (1.0, 1.5, 0.5, True),
        (1.25, 1.0, 0.25, False),
        (1.0, 1.26, 0.26, True),
        (2.0, 2.0, 0.0, False),
        (0.0, 1.0, math.inf, True),
        (-1.0, 1.0, math.inf, True),
    ],
)
def test_a_miss_is_the_same_either_way(predicted: float, measured: float, by: float, beyond: bool) -> None:
    """Half as fast called a miss of 50 % and twice as fast one of 100 %, and a tolerance that is another."""
    assert miss(predicted, measured) == pytest.approx(by)
    assert off(predicted, measured) is beyond
    assert off(math.nan, measured)


def test_no_errors_are_no_spread() -> None:
    """A spread that is made up where nothing was confirmed."""
    assert excess_deviation([], []) == 0.0
