"""Scales: every interval is on them, decades where values span them, ticks that read well."""

import math

import pytest

from qspec.readable import Interval
from qspec.report.render.axis import Axis, axis_over, linear_ticks, tick_text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.93, 1.31, [1.0, 1.1, 1.2, 1.3]),
        (-7.0, 12.0, [-5.0, 0.0, 5.0, 10.0]),
        (0.0, 420.0, [0.0, 100.0, 200.0, 300.0, 400.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    """Would catch ticks such as 0.1333, and ones outside of the axis."""
    assert linear_ticks(low, high) == pytest.approx(expected)


def test_positions_have_whole_ticks():
    """Would catch an axis with a position 1.2."""
    assert linear_ticks(0.9, 2.1, least=1.0) == [1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [
        [(1.83, (1.7, 1.95)), (2.6, (0.2, 9.0))],
        [(2.71, (0.0176, 25.0)), (1.1, (0.9, 1.3))],
        [(0.7, (-0.4, 1.8)), (0.71, None)],
        [(-0.1, (-0.6, 0.4)), (0.06, (-0.03, 0.15))],
        [(1e-6, (1e-7, 1e-5)), (10.0, (1.0, 90.0))],
        [(0.0, (0.0, 0.0))],
        [(5.0, None)],
        [],
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_a_scale_holds_values_and_intervals(values: list[tuple[float, Interval]], zero: bool):
    """Would catch an interval that is cut at 0, or at the edge, and looks narrower than it is."""
    axis = axis_over(values, [1.0], zero=zero)
    for value, ci in [*values, (1.0, None)]:
        for place in (value, *(ci or ())):
            assert axis.holds(place)
            assert 0 < axis.share(place) < 1 or (place == axis.low == 0.0)
    assert all(axis.holds(tick) for tick in axis.ticks())
    assert not zero or axis.low <= 0


def test_decades_get_a_logarithmic_scale():
    """Would catch a predicted 0.06 and a measured 1.6 that cannot be told from 0, and shares on decades."""
    assert axis_over([(0.06, None), (2.0, None)]).log
    wide = axis_over([(2.71, (0.00176, 2_577_683.0)), (1.1, (0.9, 1.3))], [1.0])
    assert wide.log
    assert wide.holds(0.00176)
    assert wide.holds(2_577_683.0)
    assert not axis_over([(1.1, (0.9, 1.3)), (2.6, None)]).log
    assert not axis_over([(0.06, None), (2.0, (-1.0, 3.0))]).log  # no logarithm has a place for -1
    assert not axis_over([(30.0, None), (4000.0, None)], zero=True).log  # bars begin at 0


def test_what_no_scale_can_hold_does_not_squeeze_the_rest():
    """Would catch a picture in which one endless interval makes all values one point."""
    axis = axis_over([(1.0, (-1e9, math.inf)), (1.2, (1.1, 1.3)), (math.nan, None)])
    assert axis.share(1.2) - axis.share(1.0) > 0.1
    assert (axis.share(-1e9), axis.share(math.inf), axis.share(math.nan)) == (0.0, 1.0, 0.0)
    assert not axis.holds(-1e9)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(0.9, 24.0, log=True), [1.0, 2.0, 5.0, 10.0, 20.0]),
        (Axis(1e-9, 1e9, log=True), [1e-9, 1e-5, 1e-1, 1e3, 1e7]),
        (Axis(30.0, 3000.0, log=True, doubling=True), [32.0, 128.0, 512.0, 2048.0]),
        (Axis(1.9, 4.2, log=True, doubling=True), [2.0, 4.0]),
        (Axis(1.1, 2.4, log=True), [1.5, 2.0]),
    ],
)
def test_ticks_of_decades_are_round(axis: Axis, expected: list[float]):
    """Would catch ticks such as 3.1623, or a hundred of them."""
    assert axis.ticks() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.001, "0.001"), (12000.0, "12,000"), (2e6, "2e6"), (1e-7, "1e-7"), (-0.5, "-0.5"), (1e12, "1e12")],
)
def test_ticks_are_short(value: float, text: str):
    """Would catch labels that are wider than their places."""
    assert tick_text(value) == text
