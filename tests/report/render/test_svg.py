"""Plots: marks inside their frame, scales that read well, names that do not cover each other."""

import math
import re

import pytest

from qspec.report.document import Plot, Point, Series, as_table
from qspec.report.render.svg import HEIGHT, KINDS, LONGEST_NAME, WIDTH, cut_off, marker, plot_svg, shortened


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
    places = re.findall(r'<text class="label" x="([\d.]+)" y="([\d.]+)" text-anchor="start">pair', text)
    assert len(set(places)) == 4


def test_names_are_as_long_as_there_is_room():
    """Would catch a long name that runs out of the figure, or one whose end, in which names differ, is cut."""
    names = [f"smollm2-135m-int8-group-64-cpu-{i}" for i in range(40)]
    text = plot_svg(Plot("c", "x", "y", (Series("s", tuple(Point(n, 1.0, 1.0) for n in names)),), named=True))
    shown = re.findall(r'<text class="label" x="([\d.]+)"[^>]*>([^<]+)', text)
    assert 0 < len(shown) < 40  # the others are in the table
    assert all(float(x) + 6.7 * len(name) <= WIDTH for x, name in shown)
    assert shortened(names[7]) == "smollm2-135m…up-64-cpu-7".replace("up-64-cpu-7", names[7][-12:])
    assert len(shortened(names[7])) <= LONGEST_NAME
    assert shortened("short") == "short"


def test_an_interval_beyond_the_scale_ends_in_an_arrow():
    """Would catch an interval that looks as if it ended where the picture does."""
    wild = plot()
    assert cut_off(wild)
    assert plot_svg(wild).count('class="arrow"') == 2
    tame = Plot("c", "x", "y", wild.series[:1])
    assert not cut_off(tame)
    assert 'class="arrow"' not in plot_svg(tame)


def test_long_ticks_have_room():
    """Would catch an axis whose numbers begin outside of the figure."""
    series = Series("s", (Point("a", 1.0, -123456.0), Point("b", 2.0, 654321.0)))
    text = plot_svg(Plot("c", "x", "y", (series,)))
    ticks = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)', text)
    assert ("-100,000" in [label for _, label in ticks]) or ticks
    assert min(float(x) - 6.7 * len(label) for x, label in ticks) > 0


def test_a_plot_is_a_table_too():
    """Would catch a number that only a picture shows."""
    table = as_table(plot())
    assert table.columns == ("", "x", "y", "95 % CI, y")
    assert table.rows[1] == ("a & b: p1", "2.00", "0.600", "0.300 to 0.900")
    assert table.rows[-1][2:] == ("–", "")
