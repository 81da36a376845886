"""Plots: marks inside their frame, scales that read well, names that do not cover each other."""

import math
import re

import pytest

from qspec.report.document import Plot, Point, Series, as_table
from qspec.report.render.svg import HEIGHT, KINDS, WIDTH, marker, plot_svg, ticks


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
    assert ticks(low, high) == pytest.approx(expected)


def test_positions_have_whole_ticks():
    """Would catch an axis with a position 1.2."""
    assert ticks(0.9, 2.1, least=1.0) == [1.0, 2.0]


def plot(**options: object) -> Plot:
    points = tuple(Point(f"p{i}", 2.0**i, 0.5 + i / 10, y_interval=(0.2 + i / 10, 0.9)) for i in range(5))
    wild = (Point("wild", 3.0, 0.7, y_interval=(-1e9, math.inf)), Point("none", 4.0, math.nan))
    series = (Series("a & b", points, joined=True), Series("<c>", wild))
    return Plot("caption", "x", "y", series, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"log_x": True, "guide": "one"}, {"guide": "diagonal"}, {"named": True}])
def test_everything_is_inside(options: dict[str, object]):
    """Would catch marks outside of the figure, an endless interval that squeezes all else, bare markup."""
    text = plot_svg(plot(**options))
    assert "nan" not in text
    assert "inf" not in text.replace("-∞", "").replace("∞", "")
    assert "<c>" not in text
    assert "&lt;c&gt;: wild" in text
    paths = [re.findall(r"[-\d.]+", d) for d in re.findall(r'class="(?:whisker|line s\d|mark)" d="([^"]+)"', text)]
    numbers = [float(value) for path in paths for value in path]
    assert numbers
    assert min(numbers) >= 0
    assert max(numbers) <= max(WIDTH, HEIGHT)
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', text)]
    if options.get("guide") != "diagonal":  # x goes to 16 there
        assert max(heights) - min(heights) > 60  # the five points are still told apart


def test_series_differ_in_shape():
    """Would catch series that only their colour tells apart."""
    assert len({marker(kind, 7, 7) for kind in range(KINDS)}) == KINDS


def test_names_do_not_cover_each_other():
    """Would catch a front whose names are printed over each other."""
    near = tuple(Point(f"pair {i}", 1.0 + i / 100, 1.0) for i in range(4))
    far = (Point("far", 9.0, 9.0),)
    text = plot_svg(Plot("c", "x", "y", (Series("s", near + far),), named=True))
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">pair', text)
    assert len(set(places)) == 4


def test_a_plot_is_a_table_too():
    """Would catch a number that only a picture shows."""
    table = as_table(plot())
    assert table.columns == ("", "x", "y", "95 % CI, y")
    assert table.rows[1] == ("a & b: p1", "2.00", "0.600", "0.300 to 0.900")
    assert table.rows[-1][2:] == ("–", "")
