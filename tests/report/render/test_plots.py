"""Charts: marks inside their frame, scales that hold every interval, names that do not cover each other."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from qspec.readable import Interval
from qspec.report.document import Bar, Bars, Dots, Plot, Point, Series, Stack, as_table
from qspec.report.render.plots import LONGEST_NAME, WIDTH, Scale, scale_over, shortened, svg, tick_text


def plot(**options: object) -> Plot:
    points = tuple(Point(f"p{i}", 2.0**i, 0.5 + i / 10, y_interval=(0.2 + i / 10, 0.9)) for i in range(5))
    wild = (Point("wild", 3.0, 0.7, y_interval=(-1e9, math.inf)), Point("none", 4.0, math.nan))
    series = (Series("a & b", points, joined=True), Series("<c>", wild))
    return Plot("caption", "x", "y", series, **options)  # type: ignore[arg-type]


def texts(drawn: str) -> list[tuple[str, float, str]]:
    """Text of a drawing, with its place and anchor."""
    found = [element for element in ET.fromstring(drawn).iter("text") if element.text]
    return [(element.text or "", float(element.attrib["x"]), element.attrib["text-anchor"]) for element in found]


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
    scale = scale_over(values, [1.0], zero=zero)
    for value, ci in [*values, (1.0, None)]:
        for place in (value, *(ci or ())):
            assert scale.low < place < scale.high or (place == scale.low == 0.0)
    assert not zero or scale.low <= 0


def test_decades_get_a_logarithmic_scale():
    """Would catch a predicted 0.06 and a measured 1.6 that cannot be told from 0, and shares on decades."""
    assert scale_over([(0.06, None), (2.0, None)]).base == 10
    wide = scale_over([(2.71, (0.00176, 2_577_683.0)), (1.1, (0.9, 1.3))], [1.0])
    assert wide.base == 10
    assert wide.holds(0.00176)
    assert wide.holds(2_577_683.0)
    assert not scale_over([(1.1, (0.9, 1.3)), (2.6, None)]).base
    assert not scale_over([(0.06, None), (2.0, (-1.0, 3.0))]).base  # no logarithm has a place for -1
    assert not scale_over([(30.0, None), (4000.0, None)], zero=True).base  # bars begin at 0
    assert scale_over([(1.0, None), (8.0, None)], doubling=True).base == 2


def test_what_no_scale_can_hold_does_not_squeeze_the_rest():
    """Would catch a picture in which one endless interval makes all values one point."""
    scale = scale_over([(1.0, (-1e9, math.inf)), (1.2, (1.1, 1.3)), (math.nan, None)])
    assert 0.1 * (scale.high - scale.low) < 0.2
    assert (scale.within(-1e9), scale.within(math.inf)) == (scale.low, scale.high)
    assert not scale.holds(-1e9)
    assert Scale(0.0, 1.0).within(0.3) == 0.3


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.001, "0.001"), (12000.0, "12,000"), (2e6, "2e6"), (1e-7, "1e-7"), (-0.5, "-0.5"), (1e12, "1e12")],
)
def test_ticks_are_short(value: float, text: str):
    """Would catch labels that are wider than their places."""
    assert tick_text(value) == text


@pytest.mark.parametrize(
    ("across", "expected"),
    [
        ((1.0, 2.0), ["1", "2"]),  # positions are whole
        ((0.0, 400.0), ["0", "100", "200", "300", "400"]),
        ((1e-8, 1e8), ["1e-8", "0.01", "10", "1e7"]),
    ],
)
def test_ticks_are_round(across: tuple[float, float], expected: list[str]):
    """Would catch a position 1.2, ticks such as 3.1623, and a hundred of them."""
    low, high = across
    drawn = svg(Plot("c", "across", "up", (Series("s", (Point("a", low, 1.0), Point("b", high, 1.0))),)))
    assert set(expected) <= {text for text, _, _ in texts(drawn)}


@pytest.mark.parametrize("options", [{}, {"log_x": True, "guide": "one"}, {"guide": "diagonal"}, {"named": True}])
def test_everything_is_inside(options: dict[str, object]):
    """Would catch marks outside of the figure, an endless interval that squeezes all else, bare markup."""
    drawn = svg(plot(**options))
    assert "nan" not in drawn
    assert "<c>" not in drawn
    assert "&lt;c&gt;: wild" in drawn
    root = ET.fromstring(drawn)
    height = float(root.attrib["viewBox"].split()[3])
    marks = [(float(mark.attrib["x"]), float(mark.attrib["y"])) for mark in root.iter("use")]
    assert all(0 <= x <= WIDTH and 0 <= y <= height for x, y in marks)
    ups = [float(mark.attrib["y"]) for mark in root.iter("use") if mark.get("data-tip", "").startswith("a & b")]
    assert len(ups) == 5
    if options.get("guide") != "diagonal":  # x goes to 16 there
        assert max(ups) - min(ups) > 60  # the five points are still told apart


@pytest.mark.parametrize(
    "chart",
    [
        plot(),
        Bars("b", (Bar("q", 1.0, "1", (0.5, 2.0)), Bar("none", math.nan, "–")), 1.0, "x"),
        Dots("d", (Bar("q", 1.0, "1"),), 1.0),
        Stack("s", ("a", "b"), (("q", (0.3, 0.7)),)),
    ],
)
def test_a_drawing_is_a_part_of_its_page(chart: Plot | Bars | Dots | Stack):
    """Would catch colours that dark mode does not change, fonts and sizes of its own, ids that two figures share, and
    bytes that differ between two runs.
    """
    drawn = svg(chart)
    assert drawn == svg(chart)
    assert "var(--" in drawn
    assert not re.search("#[0-9a-f]{6}|font-family|url\\(|<style|DejaVu", drawn)
    other = svg(Plot("other", "x", "y", plot().series))
    assert not set(re.findall(' id="([^"]*)"', drawn)) & set(re.findall(' id="([^"]*)"', other))
    assert ET.fromstring(drawn).attrib.keys() == {"class", "viewBox", "role", "aria-label"}


def test_text_is_no_formula():
    """Would catch a name with dollar signs that is set as mathematics, or fails as such."""
    drawn = svg(Dots("d", (Bar("$x^{$ and $y$", 1.0, "1"),), 1.0))
    assert "$x^{$ and $y$" in [text for text, _, _ in texts(drawn)]


@pytest.mark.parametrize(
    "chart", [Bars("b", ()), Dots("d", (), 1.0), Stack("s", ("a", "b"), ()), Plot("p", "x", "y", ())]
)
def test_a_chart_of_nothing_is_drawn(chart: Plot | Bars | Dots | Stack):
    """Would catch a page that fails because a kind of layer has no scales."""
    assert ET.fromstring(svg(chart)).tag == "svg"


def test_a_name_may_hold_anything():
    """Would catch a report that fails on a control character in the name of an arm."""
    name = "a\x1b[0m\x00 안녕"
    assert "a�[0m� 안녕" in [text for text, _, _ in texts(svg(Dots("d", (Bar(name, 1.0, "1"),), 1.0)))]
    assert "point" in svg(Plot("c", name, name, (Series(name, (Point(name, 1.0, 2.0),)),), named=True))


def test_series_differ_in_shape():
    """Would catch series that only their colour tells apart."""
    drawn = svg(Plot("c", "x", "y", tuple(Series(f"s{i}", (Point("", 1.0, i),)) for i in range(6))))
    assert len({mark.attrib["href"] for mark in ET.fromstring(drawn).iter("use") if mark.get("data-tip")}) == 6


def test_names_are_as_long_as_there_is_room():
    """Would catch names that are printed over each other, run out of the figure, or are cut at the end that tells them
    apart.
    """
    names = [f"smollm2-135m-int8-group-64-cpu-{i}" for i in range(40)]
    drawn = svg(Plot("c", "x", "y", (Series("s", tuple(Point(n, 1.0, 1.0) for n in names)),), named=True))
    shown = [(text, x) for text, x, _ in texts(drawn) if text.startswith("smollm2")]
    assert 0 < len(shown) < 40  # the others are in the table
    assert len(shortened(names[7])) <= LONGEST_NAME
    assert shortened(names[7]) == f"{names[7][:12]}…{names[7][-12:]}"
    assert shortened("short") == "short"


def test_an_interval_beyond_the_scale_ends_in_an_arrow():
    """Would catch an interval that looks as if it ended where the picture does."""
    wild = plot()
    assert svg(wild).count('class="arrow"') == 2
    tame = Plot("c", "x", "y", wild.series[:1])
    assert 'class="arrow"' not in svg(tame)
    row = Dots("c", (Bar("endless", 1.0, "1", (-1e9, 1.2)), Bar("other", 1.1, "1", (1.0, 1.2))), 1.0)
    assert svg(row).count('class="arrow"') == 1


def test_long_ticks_have_room():
    """Would catch an axis whose numbers begin outside of the figure."""
    series = Series("s", (Point("a", 1.0, -123456.0), Point("b", 2.0, 654321.0)))
    ticks = [(text, x) for text, x, anchor in texts(svg(Plot("c", "x", "y", (series,)))) if anchor == "end"]
    assert "200,000" in [text for text, _ in ticks]
    assert min(x - 6.7 * len(text) for text, x in ticks) > 0


def test_a_plot_is_a_table_too():
    """Would catch a number that only a picture shows."""
    table = as_table(plot())
    assert table.columns == ("", "x", "y", "95 % CI, y")
    assert table.rows[1] == ("a & b: p1", "2.00", "0.600", "0.300 to 0.900")
    assert table.rows[-1][2:] == ("–", "")


def test_nothing_is_drawn_until_it_is_asked_for():
    """Would catch a command line that waits a second for matplotlib to print its help."""
    code = "import sys, qspec.report.page; print([m for m in ('matplotlib', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "matplotlib" not in done.stdout
