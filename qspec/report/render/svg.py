"""Plots as inline SVG: axes, points with their intervals, lines. Colours and dark mode come from the page's style."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
import math

from qspec.readable import Interval, interval, number
from qspec.report.document import Plot, Point, Series

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 30, 44
KINDS = 6
"""Series that differ in colour and shape; further ones begin again."""
Scale = Callable[[float], float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def plot_svg(plot: Plot) -> str:
    """One figure, its values in tooltips; the page shows them as a table too."""
    points = [point for series in plot.series for point in series.points]
    xs, ys = _extent((p.x, p.x_interval) for p in points), _extent((p.y, p.y_interval) for p in points)
    if plot.guide == "diagonal":
        xs = ys = (min(xs[0], ys[0]), max(xs[1], ys[1]))
    if plot.guide == "one":
        ys = (min(ys[0], 1.0), max(ys[1], 1.0))
    xs, ys = _padded(*xs, plot.log_x), _padded(*ys)
    if ys[0] < 0.4 * ys[1]:
        ys = (min(0.0, ys[0]), ys[1])
    x, y = _scale(*xs, LEFT, WIDTH - RIGHT, plot.log_x), _scale(*ys, HEIGHT - BOTTOM, TOP, False)
    parts = [*_axes(plot, xs, ys, x, y), *_guide(plot, xs, ys, x, y)]
    for i, series in enumerate(plot.series):
        aside = 4 * (i - (len(plot.series) - 1) / 2) if series.joined else 0.0
        parts += _series(series, i % KINDS, _moved(x, aside), y)
    if plot.named:
        parts += _names([(point.label, x(point.x), y(point.y)) for point in points])
    about = escape(f"{plot.caption}: {len(points)} points, {plot.x} against {plot.y}", quote=True)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


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


def ticks(low: float, high: float, least: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart, at least `least`) between the ends."""
    rough = max(least, (high - low) / most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two, thinned to what fits."""
    powers = [2.0**i for i in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)]
    return powers[:: max(1, math.ceil(len(powers) / 6))] or [low]


def _extent(values: Iterable[tuple[float, Interval]]) -> tuple[float, float]:
    """Least and greatest of all finite values and ends of intervals; intervals may not stretch a plot fivefold."""
    listed = list(values)
    centres = [value for value, _ in listed if math.isfinite(value)] or [0.0]
    low, high = min(centres), max(centres)
    reach = 2 * (high - low) or abs(high) or 1.0
    ends = [end for _, ci in listed if ci is not None for end in ci if low - reach <= end <= high + reach]
    return min([low, *ends]), max([high, *ends])


def _padded(low: float, high: float, log: bool = False) -> tuple[float, float]:
    """Room around the values."""
    if log:
        room = max(1.1, (high / low) ** 0.06)
        return low / room, high * room
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    a, b = (math.log(low), math.log(max(high, 1.01 * low))) if log else (low, high)

    def place(value: float) -> float:
        at = math.log(value) if log else value
        share = (at - a) / (b - a)
        return start + (end - start) * min(1.0, max(0.0, share))

    return place


def _moved(scale: Scale, pixels: float) -> Scale:
    """Series over the same places stand beside each other, so that their intervals can be told apart."""
    return lambda value: scale(value) + pixels


def _axes(plot: Plot, xs: tuple[float, float], ys: tuple[float, float], x: Scale, y: Scale) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in ticks(*ys):
        yield f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_tick(value)}</text>'
    whole = all(float(point.x).is_integer() for series in plot.series for point in series.points)
    for value in _log_ticks(*xs) if plot.log_x else ticks(*xs, least=float(whole)):
        yield f'<path class="grid" d="M{x(value):.1f} {bottom}v4"/>'
        yield f'<text x="{x(value):.1f}" y="{bottom + 17}" text-anchor="middle">{_tick(value)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'
    yield f'<text class="name" x="{right}" y="{HEIGHT - 8}" text-anchor="end">{escape(plot.x)}</text>'
    yield f'<text class="name" x="4" y="14">{escape(plot.y)}</text>'


def _tick(value: float) -> str:
    return f"{value:,.6g}"


def _guide(plot: Plot, xs: tuple[float, float], ys: tuple[float, float], x: Scale, y: Scale) -> Iterable[str]:
    if plot.guide == "one":
        yield f'<path class="mark" d="M{LEFT} {y(1.0):.1f}H{WIDTH - RIGHT}"/>'
    if plot.guide == "diagonal":
        low, high = max(xs[0], ys[0]), min(xs[1], ys[1])
        yield f'<path class="mark" d="M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"/>'


def _series(series: Series, kind: int, x: Scale, y: Scale) -> Iterable[str]:
    places = [(point, x(point.x), y(point.y)) for point in series.points if math.isfinite(point.y)]
    if series.joined and len(places) > 1:
        path = "L".join(f"{px:.1f} {py:.1f}" for _, px, py in places)
        yield f'<path class="line s{kind}" d="M{path}"/>'
    for point, px, py in places:
        tip = escape(_tip(series, point), quote=True)
        shapes = _whiskers(point, px, py, x, y) + marker(kind, px, py)
        yield f'<g class="point s{kind}" data-tip="{tip}"><title>{tip}</title>{shapes}</g>'


def _names(places: Sequence[tuple[str, float, float]]) -> Iterable[str]:
    """Each point's name where it covers no point and no other name, as far as there is such a place."""
    taken = [(px - 5, py - 5, px + 5, py + 5) for _, px, py in places]
    for label, px, py in places:
        wide = 6.4 * len(label)
        sides = ((px + 8, py - 8), (px + 8, py + 15), (px - 8 - wide, py - 8), (px - 8 - wide, py + 15))
        boxes = [(left, base - 11, left + wide, base + 3) for left, base in sides]
        free = [box for box in boxes if box[0] >= LEFT and box[2] <= WIDTH and not any(_meet(box, t) for t in taken)]
        box = (free or boxes)[0]
        taken.append(box)
        yield f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}">{escape(label)}</text>'


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _whiskers(point: Point, px: float, py: float, x: Scale, y: Scale) -> str:
    drawn = ""
    if point.x_interval:
        drawn += f'<path class="whisker" d="M{x(point.x_interval[0]):.1f} {py:.1f}H{x(point.x_interval[1]):.1f}"/>'
    if point.y_interval:
        drawn += f'<path class="whisker" d="M{px:.1f} {y(point.y_interval[0]):.1f}V{y(point.y_interval[1]):.1f}"/>'
    return drawn


def _tip(series: Series, point: Point) -> str:
    name = ": ".join(dict.fromkeys(part for part in (series.name, point.label) if part))
    sides = ((point.x, point.x_interval), (point.y, point.y_interval))
    values = [f"{number(value)}" + (f" ({interval(ci)})" if ci else "") for value, ci in sides]
    return f"{name}: {' → '.join(values)}"
