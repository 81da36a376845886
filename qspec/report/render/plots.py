"""Charts as inline SVG, drawn by matplotlib: text stays text, and every colour is one of the page's style, which knows
light, dark and print.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
import io
import math
import re
import textwrap
from typing import TYPE_CHECKING, Any, Literal
import warnings
import xml.etree.ElementTree as ET

from qspec.readable import Interval, interval, number, percent, size
from qspec.report.document import Bars, Dots, Plot, Point, Series, Stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

Drawn = Bars | Dots | Stack | Plot
Text = Callable[[float], str]
WIDTH, HEIGHT, LINE, EDGE, CHARACTERS = 440, 210, 16, 12, 58
"""In units that are pixels at full width: of a figure, of a plot's axes, of a line of text and what fits into one."""
NAMES = ("s0", "s1", "s2", "s3", "s4", "s5", "ink", "soft", "line")
COLOURS = {name: f"#00000{i}" for i, name in enumerate(NAMES, 1)}
"""Stand-ins for the page's colours while matplotlib draws."""
MARKERS = "osD^vP"
"""Series differ in colour and shape; further ones begin again."""
PARTS = ("s0", "s1", "s5")
"""Colours of a stack."""
LONGEST_NAME = 26
"""Characters of a point's name beside it; the table below has all of it."""
NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
"""Characters that a name may hold and XML may not."""
DECADES = 30.0
"""Ratio of the largest to the least value from which on a scale is logarithmic, if all of them are positive."""
REACH = 30.0
"""A linear scale holds intervals up to so many times the spread of the values; longer ones end in an arrow."""
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": COLOURS["soft"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlecolor": COLOURS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 1,
    "xaxis.labellocation": "right",
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "ytick.major.size": 0,
    "text.color": COLOURS["ink"],
    "grid.color": COLOURS["line"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["soft"],
    "lines.markersize": 8,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`; base: of its logarithm, 2 for lengths and batches, which double; None: linear."""

    low: float
    high: float
    base: int | None = None

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def within(self, value: float) -> float:
        """The value, or the end of the scale that lies nearer; both ends for what has no place (NaN)."""
        return min(self.high, max(self.low, value))


def scale_over(
    values: Iterable[tuple[float, Interval]],
    marks: Iterable[float] = (),
    *,
    doubling: bool = False,
    zero: bool = False,
) -> Scale:
    """The scale of values with their intervals, and of reference lines: logarithmic where these span decades.

    doubling: logarithmic by powers of two. zero: it begins at 0, as bars do, or below.
    """
    listed = list(values)
    centres = [value for value, _ in listed if math.isfinite(value)] + list(marks) or [0.0, 1.0]
    ends = [end for _, ci in listed for end in ci or () if math.isfinite(end)]
    least, most = min([*centres, *ends]), max([*centres, *ends])
    if least > 0 and (doubling or (not zero and most / least > DECADES)):
        room = max(1.1, (most / least) ** 0.06)
        return Scale(least / room, most * room, 2 if doubling else 10)
    low, high = min(centres), max(centres)
    spread = max(high - low, 0.5 * abs(low), 0.5 * abs(high)) or 1.0
    held = [end for end in ends if low - REACH * spread <= end <= high + REACH * spread]
    low, high = min([low, *held]), max([high, *held])
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    if zero or 0 <= low < 0.4 * high:
        return Scale(low - room if low < 0 else 0.0, high + room)
    return Scale(low - room, high + room)


def scales(plot: Plot) -> tuple[Scale, Scale]:
    """Across and up."""
    points = _points(plot)
    across, up = [(p.x, p.x_interval) for p in points], [(p.y, p.y_interval) for p in points]
    if plot.guide == "diagonal":
        both = scale_over([*across, *up])
        return both, both
    return scale_over(across, doubling=plot.log_x), scale_over(up, [1.0] if plot.guide == "one" else [])


def tick_text(value: float) -> str:
    """A tick as it is written: 0.001, 12,000, 2e6."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    return f"{value:.3g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


def svg(chart: Drawn) -> str:
    """The chart as an element for a page. Points carry what they are, for the page's script."""
    from matplotlib import style

    salt = {"svg.hashsalt": repr(chart)}  # ids differ between the figures of a page, and never between two runs
    with style.context(["default", STYLE, salt]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has the fonts, and draws the text
        tips: list[list[str]] = []
        figure = _plot(chart, tips) if isinstance(chart, Plot) else _rows(chart)
        return _inline(figure, tips, _about(chart))


def _about(chart: Drawn) -> str:
    if isinstance(chart, Plot):
        return f"{chart.caption}: {len(_points(chart))} points, {chart.x} against {chart.y}"
    return f"{chart.caption}: {len(chart.rows if isinstance(chart, Stack) else chart.bars)} rows"


def _points(plot: Plot) -> list[Point]:
    return [point for series in plot.series for point in series.points if math.isfinite(point.y)]


def _figure(left: float, top: float, height: float, below: float) -> "tuple[Figure, Axes]":
    """A figure whose axes are `height` high, with room around."""
    from matplotlib.figure import Figure

    whole = top + height + below
    figure = Figure(figsize=(WIDTH / 72, whole / 72))
    return figure, figure.add_axes((left / WIDTH, below / whole, (WIDTH - left - EDGE) / WIDTH, height / whole))


def _set(axes: "Axes", side: Literal["x", "y"], scale: Scale, whole: bool = False, text: Text = tick_text) -> None:
    """Scale, round ticks and their labels. whole: ticks at whole numbers only."""
    from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

    span = scale.high / scale.low if scale.base else 1.0
    locator: Locator = MaxNLocator(5, steps=[1, 2, 5, 10], integer=whole)
    if scale.base:
        axes.set_xscale("log", base=scale.base) if side == "x" else axes.set_yscale("log", base=scale.base)
        if scale.base == 2 or span > 5:
            factors = (1.0, 2.0, 5.0) if scale.base == 10 and span < 1e3 else (1.0,)
            locator = LogLocator(scale.base, factors, numticks=6)
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set(**{f"{side}lim": (scale.low, scale.high)})


def _rows(chart: Bars | Dots | Stack) -> "Figure":
    """A row per value over one scale, its name above it; bars begin at 0, dots stand around the mark."""
    if isinstance(chart, Stack):
        named = [(label, " / ".join(map(percent, shares))) for label, shares in chart.rows]
    else:
        named = [(bar.label, bar.text) for bar in chart.bars]
    texts, middles, depth = list[tuple[float, float, str]](), list[float](), 0.0
    for label, value in named:
        lines = textwrap.wrap(label, CHARACTERS) or [""]
        alone = len(lines[-1]) + len(value) + 2 > CHARACTERS
        texts += [(0.0, depth + LINE * i, line) for i, line in enumerate(lines)]
        depth += LINE * (len(lines) + alone)
        texts.append((1.0, depth - LINE, value))
        middles.append(depth + 9)
        depth += 22
    figure, axes = _figure(EDGE, 0, depth or 1, 2 * LINE + 8 + (LINE + 8) * isinstance(chart, Stack))
    axes.set(ylim=(depth or 1, 0), yticks=[])
    axes.spines["left"].set_visible(False)
    for x, y, text in texts:
        beside = axes.get_yaxis_transform()
        axes.text(x, y + 13, text, transform=beside, horizontalalignment="right" if x else "left")
    if isinstance(chart, Stack):
        _stack(figure, axes, chart, middles)
    else:
        _bars(axes, chart, middles)
    _tidy(axes)
    return figure


def _stack(figure: "Figure", axes: "Axes", stack: Stack, middles: Sequence[float]) -> None:
    handles: list[Any] = []
    for i in range(len(stack.parts)):
        widths, begins = ([100 * sum(shares[j:k]) for _, shares in stack.rows] for j, k in ((i, i + 1), (0, i)))
        handles.append(axes.barh(middles, widths, 11, begins, color=COLOURS[PARTS[i % len(PARTS)]]))
    axes.set_xlabel("%")
    _set(axes, "x", Scale(0.0, 100.0))
    figure.legend(handles, stack.parts, loc="lower left", ncols=len(stack.parts))


def _bars(axes: "Axes", chart: Bars | Dots, middles: Sequence[float]) -> None:
    marks = [] if chart.mark is None else [chart.mark]
    scale = scale_over([(bar.value, bar.interval) for bar in chart.bars], marks, zero=isinstance(chart, Bars))
    _set(axes, "x", scale, text=size if chart.axis == "bytes" else tick_text)
    axes.set_xlabel("" if chart.axis == "bytes" else chart.axis)
    known = [
        (scale.within(bar.value), y) for bar, y in zip(chart.bars, middles, strict=True) if math.isfinite(bar.value)
    ]
    values, places = [value for value, _ in known], [y for _, y in known]
    if isinstance(chart, Bars):
        axes.barh(places, values, 11, color=COLOURS["s0"])
    else:
        axes.plot(values, places, "o", color=COLOURS["s0"])
    if chart.mark is not None:
        ends = [y - 9 for y in middles], [y + 9 for y in middles]
        axes.vlines([chart.mark] * len(middles), *ends, color=COLOURS["ink"], linestyles=(0, (3, 3)), linewidth=1)
    spans = [(y, bar.interval) for bar, y in zip(chart.bars, middles, strict=True)]
    _whiskers(axes, "x", spans, scale, color=COLOURS["ink"])


def _whiskers(
    axes: "Axes", side: Literal["x", "y"], spans: Iterable[tuple[float, Interval]], scale: Scale, **options: Any
) -> None:
    """Intervals along a side, each at its place on the other; an end that the scale does not hold is an arrow."""
    known = [(at, ci, [scale.within(end) for end in ci]) for at, ci in spans if ci is not None]
    if not known:
        return
    draw, arrows = (axes.hlines, "<>") if side == "x" else (axes.vlines, "v^")
    lows, highs = [held[0] for _, _, held in known], [held[1] for _, _, held in known]
    draw([at for at, _, _ in known], lows, highs, linewidth=1.3, alpha=0.75, gid="whisker", **options)
    for end, arrow in enumerate(arrows):
        beyond = [(held[end], at) for at, ci, held in known if not scale.holds(ci[end])]
        ends, places = [held for held, _ in beyond], [at for _, at in beyond]
        if beyond:
            axes.plot(*((ends, places) if side == "x" else (places, ends)), arrow, markersize=6, gid="arrow", **options)


def _plot(plot: Plot, tips: list[list[str]]) -> "Figure":
    """Both scales, the guide, and every series; a legend below where there are several."""
    from matplotlib.transforms import offset_copy

    x, y = scales(plot)
    several = len(plot.series) > 1
    below = 2 * LINE + 8 + several * (8 + (LINE + 2) * len(plot.series))
    figure, axes = _figure(_left(y), LINE + 12, HEIGHT, below)
    _set(axes, "x", x, whole=all(float(point.x).is_integer() for series in plot.series for point in series.points))
    _set(axes, "y", y)
    axes.set(xlabel=plot.x, title=plot.y)
    axes.grid(axis="y")
    if plot.guide != "none":
        ends = [y.low, y.high] if plot.guide == "diagonal" else [1.0, 1.0]
        axes.plot([x.low, x.high], ends, color=COLOURS["ink"], linestyle=(0, (3, 3)), linewidth=1)
    for i, series in enumerate(plot.series):
        aside = 5 * (i - (len(plot.series) - 1) / 2) if series.joined else 0.0
        _series(axes, series, i, (x, y), offset_copy(axes.transData, figure, x=aside, units="points"), tips)
    if several:
        names = [textwrap.shorten(series.name, CHARACTERS - 6, placeholder="…") for series in plot.series]
        handles = [axes.plot([], [], _marker(i), color=_colour(i))[0] for i in range(len(names))]
        figure.legend(handles, names, loc="lower left", labelspacing=0.3, borderpad=0)
    _tidy(axes)
    if plot.named:
        _name(axes, _points(plot))
    return figure


def _left(scale: Scale) -> float:
    """Room for the labels of a scale's ticks."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    _set(axes, "y", scale)
    return 14 + 7.5 * max(len(label.get_text()) for label in axes.get_yticklabels())


def _series(
    axes: "Axes", series: Series, kind: int, both: tuple[Scale, Scale], place: "Transform", tips: list[list[str]]
) -> None:
    """place: series over the same places stand beside each other, so that their intervals can be told apart."""
    (x, y), points = both, [p for p in series.points if math.isfinite(p.y)]
    across, up = [x.within(p.x) for p in points], [y.within(p.y) for p in points]
    options: dict[str, Any] = {"color": _colour(kind), "transform": place}
    if series.joined:
        axes.plot(across, up, alpha=0.75, **options)
    _whiskers(axes, "x", [(at, p.x_interval) for p, at in zip(points, up, strict=True)], x, **options)
    _whiskers(axes, "y", [(at, p.y_interval) for p, at in zip(points, across, strict=True)], y, **options)
    axes.plot(across, up, _marker(kind), gid=f"points {len(tips)}", **options)
    tips.append([_tip(series, point) for point in points])


def _colour(kind: int) -> str:
    return COLOURS[f"s{kind % len(MARKERS)}"]


def _marker(kind: int) -> str:
    return MARKERS[kind % len(MARKERS)]


def _tip(series: Series, point: Point) -> str:
    name = ": ".join(dict.fromkeys(part for part in (series.name, point.label) if part))
    sides = ((point.x, point.x_interval), (point.y, point.y_interval))
    values = [f"{number(value)}" + (f" ({interval(ci)})" if ci else "") for value, ci in sides]
    return f"{name}: {' → '.join(values)}"


def _tidy(axes: "Axes") -> None:
    """Labels of ticks that would stand in each other, or out of the figure, are moved or left out."""
    end = -math.inf
    for label in axes.get_xticklabels():
        box = label.get_window_extent()
        if box.x1 > WIDTH:
            label.set_horizontalalignment("right")
            box = label.get_window_extent()
        label.set_visible(box.x0 >= end + 6)
        end = box.x1 if label.get_visible() else end


def _name(axes: "Axes", points: Sequence[Point]) -> None:
    """Each point's name near it, where it covers no point and no other name; those without such a place have none."""
    from matplotlib.transforms import Bbox

    inside, places = axes.get_window_extent(), [axes.transData.transform((point.x, point.y)) for point in points]
    taken = [Bbox([place - 6, place + 6]) for place in places]
    beside = [(dx, dy, ha) for dy in (-4, 10, -19, 25, -34) for dx, ha in ((9, "left"), (-9, "right"), (0, "center"))]
    for point in points:
        for dx, dy, ha in beside:
            at, name = (point.x, point.y), shortened(point.label)
            label = axes.annotate(name, at, (dx, dy), textcoords="offset points", horizontalalignment=ha, gid="label")
            box = label.get_window_extent()
            if (
                box.x0 >= inside.x0
                and box.x1 <= WIDTH
                and inside.y0 <= box.y0
                and box.y1 <= inside.y1
                and not box.count_overlaps(taken)
            ):
                taken.append(box)
                break
            label.remove()


def shortened(name: str) -> str:
    """A name that fits beside a point: its beginning and its end, in which names of one kind differ."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _inline(figure: "Figure", tips: Sequence[Sequence[str]], about: str) -> str:
    """matplotlib's figure as an element of the page, without sizes, fonts, ids and clipping of its own."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for artist in figure.findobj():
        artist.set_clip_on(False)  # scales hold what is drawn
    written = io.StringIO()
    unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(written, metadata=unsaid)  # type: ignore[no-untyped-call]
    root = ET.fromstring(NO_XML.sub("\ufffd", written.getvalue()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip() or None, None
        _own(element)
    for drawn in root.iter("g"):
        if drawn.get("class") == "points":
            for mark, tip in zip(drawn.iter("use"), tips[int(drawn.attrib.pop("data-series"))], strict=True):
                mark.attrib |= {"class": "point", "data-tip": tip}
    root.remove(root[0])  # a style for all of it
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"class": "plot", "viewBox": view, "role": "img", "aria-label": about})
    return ET.tostring(root, encoding="unicode")


def _own(element: ET.Element) -> None:
    """Classes of what the page's style and script know; numbers and colours as short as they can be."""
    attributes = element.attrib
    if element.tag == "g":
        kind, _, place = attributes.pop("id", "").partition(" ")
        if kind in ("points", "whisker", "arrow", "label"):
            attributes |= {"class": kind} | ({"data-series": place} if place else {})
    if "{http://www.w3.org/1999/xlink}href" in attributes:
        attributes["href"] = attributes.pop("{http://www.w3.org/1999/xlink}href")
    if element.tag == "text":
        attributes["text-anchor"] = (re.findall(r"text-anchor: (\w+)", attributes["style"]) or ["start"])[0]
        attributes.pop("transform", None)
        attributes["style"] = " ".join(re.findall(r"fill: #\w+", attributes["style"]))
    for name in {"style", "d", "x", "y"} & attributes.keys():
        short = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(attributes[name].split()))
        attributes[name] = re.sub(r"#00000(\d)", lambda match: f"var(--{NAMES[int(match[1]) - 1]})", short)
