"""Plots as inline SVG: axes, points with their intervals, lines. Colours and dark mode come from the page's style."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
import math

from qspec.readable import interval, number
from qspec.report.document import Plot, Point, Series
from qspec.report.render.axis import Axis, axis_over, tick_text

WIDTH, TOP, BOTTOM, RIGHT, DIGIT = 420, 34, 44, 14, 6.7
HEIGHT = 290
"""Of a figure, in units that are about pixels on a phone; DIGIT: of a tick's character."""
KINDS = 6
"""Series that differ in colour and shape; further ones begin again."""
LONGEST_NAME = 26
"""Characters of a point's name beside it; the table below has all of it."""
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Frame:
    """Both scales of a plot, and where they lie in the figure."""

    x_axis: Axis
    y_axis: Axis
    left: float

    def x(self, value: float) -> float:
        return self.left + (WIDTH - RIGHT - self.left) * self.x_axis.share(value)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM + (TOP - HEIGHT + BOTTOM) * self.y_axis.share(value)


def plot_svg(plot: Plot) -> str:
    """One figure, its values in tooltips; the page shows them as a table too."""
    points = [point for series in plot.series for point in series.points]
    frame = _frame(plot, points)
    parts = [*_axes(plot, frame), *_guide(plot, frame)]
    for i, series in enumerate(plot.series):
        aside = 5 * (i - (len(plot.series) - 1) / 2) if series.joined else 0.0
        parts += _series(series, i % KINDS, frame, aside)
    if plot.named:
        parts += _names([(point.label, frame.x(point.x), frame.y(point.y)) for point in points], frame.left)
    about = escape(f"{plot.caption}: {len(points)} points, {plot.x} against {plot.y}", quote=True)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


def _frame(plot: Plot, points: Sequence[Point]) -> Frame:
    across, up = [(p.x, p.x_interval) for p in points], [(p.y, p.y_interval) for p in points]
    if plot.guide == "diagonal":
        y_axis = x_axis = axis_over([*across, *up])
    else:
        x_axis = axis_over(across, log=True if plot.log_x else None)
        y_axis = axis_over(up, [1.0] if plot.guide == "one" else [])
    widest = max(len(tick_text(value)) for value in y_axis.ticks() or [0.0])
    return Frame(x_axis, y_axis, max(34.0, 12 + DIGIT * widest))


def cut_off(plot: Plot) -> bool:
    """Whether an interval ends in an arrow, because the scale does not hold its end."""
    points = [point for series in plot.series for point in series.points if math.isfinite(point.y)]
    frame = _frame(plot, points)
    sides = [(frame.x_axis, point.x_interval) for point in points] + [(frame.y_axis, p.y_interval) for p in points]
    return any(not axis.holds(end) for axis, ci in sides for end in ci or ())


def marker(kind: int, x: float, y: float) -> str:
    """The shape of a series around a place."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path d="M{x:.1f} {y - 5.5:.1f}l5 9h-10z"/>',
        f'<path d="M{x:.1f} {y - 6:.1f}l5.5 6l-5.5 6l-5.5 -6z"/>',
        f'<path d="M{x:.1f} {y + 5.5:.1f}l5 -9h-10z"/>',
        f'<path d="M{x - 5.5:.1f} {y - 1.8:.1f}h11v3.6h-11zM{x - 1.8:.1f} {y - 5.5:.1f}h3.6v11h-3.6z"/>',
    )
    return shapes[kind % KINDS]


def _axes(plot: Plot, frame: Frame) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in frame.y_axis.ticks():
        yield f'<path class="grid" d="M{frame.left:.1f} {frame.y(value):.1f}H{right}"/>'
        yield _text(tick_text(value), frame.left - 6, frame.y(value) + 4, "end")
    whole = all(float(point.x).is_integer() for series in plot.series for point in series.points)
    shown = -math.inf
    for value in frame.x_axis.ticks(least=float(whole)):
        at, half = frame.x(value), DIGIT * len(tick_text(value)) / 2
        yield f'<path class="axis" d="M{at:.1f} {bottom}v4"/>'
        if at - half > shown:
            shown = at + half + 8
            yield _text(tick_text(value), min(at, WIDTH - half), bottom + 17, "middle")
    yield f'<path class="axis" d="M{frame.left:.1f} {TOP}V{bottom}H{right}"/>'
    yield _text(plot.x, right, HEIGHT - 8, "end", "name")
    yield _text(plot.y, 4, 14, "start", "name")


def _text(text: str, x: float, y: float, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _guide(plot: Plot, frame: Frame) -> Iterator[str]:
    if plot.guide == "one":
        yield f'<path class="mark" d="M{frame.left:.1f} {frame.y(1.0):.1f}H{WIDTH - RIGHT}"/>'
    if plot.guide == "diagonal":
        low, high = frame.x_axis.low, frame.x_axis.high
        yield f'<path class="mark" d="M{frame.x(low):.1f} {frame.y(low):.1f}L{frame.x(high):.1f} {frame.y(high):.1f}"/>'


def _series(series: Series, kind: int, frame: Frame, aside: float) -> Iterator[str]:
    """aside: series over the same places stand beside each other, so that their intervals can be told apart."""
    places = [(p, frame.x(p.x) + aside, frame.y(p.y)) for p in series.points if math.isfinite(p.y)]
    if series.joined and len(places) > 1:
        path = "L".join(f"{px:.1f} {py:.1f}" for _, px, py in places)
        yield f'<path class="line s{kind}" d="M{path}"/>'
    for point, px, py in places:
        tip = escape(_tip(series, point), quote=True)
        shapes = _whiskers(point, px, py, frame) + marker(kind, px, py)
        yield f'<g class="point s{kind}" data-tip="{tip}"><title>{tip}</title>{shapes}</g>'


def _names(places: Sequence[tuple[str, float, float]], start: float) -> Iterator[str]:
    """Each point's name near it, where it covers no point and no other name; those without such a place have none."""
    taken = [(px - 6, py - 6, px + 6, py + 6) for _, px, py in places]
    for label, px, py in places:
        name = shortened(label)
        wide = DIGIT * len(name)
        for up in (-8, 15, -22, 29, -36, 43, -50, 57):
            boxes = [(left, py + up - 11, left + wide, py + up + 3) for left in (px + 8, px - 8 - wide, px - wide / 2)]
            free = next((b for b in boxes if _inside(b, start) and not any(_meet(b, other) for other in taken)), None)
            if free is not None:
                break
        else:
            continue
        taken.append(free)
        if abs(up) > 15:
            middle = (free[0] + free[2]) / 2 if free[0] <= px <= free[2] else free[0] if free[0] > px else free[2]
            yield f'<path class="leader" d="M{px:.1f} {py:.1f}L{middle:.1f} {free[3] if up < 0 else free[1]:.1f}"/>'
        yield _text(name, free[0], free[3] - 3, "start", "label")


def shortened(name: str) -> str:
    """A name that fits beside a point: its beginning and its end, in which names of one kind differ."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _inside(box: Box, start: float) -> bool:
    return box[0] >= start and box[2] <= WIDTH and box[1] >= TOP - 14 and box[3] <= HEIGHT - BOTTOM


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _whiskers(point: Point, px: float, py: float, frame: Frame) -> str:
    """Intervals; an end that the scale does not hold is an arrow."""
    drawn = ""
    if point.x_interval:
        (low, high), axis = point.x_interval, frame.x_axis
        a, b = frame.x(low) + px - frame.x(point.x), frame.x(high) + px - frame.x(point.x)
        drawn += f'<path class="whisker" d="M{a:.1f} {py:.1f}H{b:.1f}"/>'
        drawn += "" if axis.holds(low) else f'<path class="arrow" d="M{a + 5:.1f} {py - 4:.1f}l-5 4l5 4"/>'
        drawn += "" if axis.holds(high) else f'<path class="arrow" d="M{b - 5:.1f} {py - 4:.1f}l5 4l-5 4"/>'
    if point.y_interval:
        (low, high), axis = point.y_interval, frame.y_axis
        a, b = frame.y(low), frame.y(high)
        drawn += f'<path class="whisker" d="M{px:.1f} {a:.1f}V{b:.1f}"/>'
        drawn += "" if axis.holds(low) else f'<path class="arrow" d="M{px - 4:.1f} {a - 5:.1f}l4 5l4 -5"/>'
        drawn += "" if axis.holds(high) else f'<path class="arrow" d="M{px - 4:.1f} {b + 5:.1f}l4 -5l4 5"/>'
    return drawn


def _tip(series: Series, point: Point) -> str:
    name = ": ".join(dict.fromkeys(part for part in (series.name, point.label) if part))
    sides = ((point.x, point.x_interval), (point.y, point.y_interval))
    values = [f"{number(value)}" + (f" ({interval(ci)})" if ci else "") for value, ci in sides]
    return f"{name}: {' → '.join(values)}"
