"""A report as data: a title and blocks, from which HTML, Markdown, text, CSV and JSON take the same numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from qspec.numerics.statistics.evidence import Evidence
from qspec.readable import Interval, Numeral, interval, number, percent

Row = TypeVar("Row")
Tone = Literal["good", "bad", "open", "plain", "danger"]
"""good / bad: the numbers carry it; open: they do not decide; plain: a statement; danger: not to be used as it is."""


TONES: dict[Tone, str] = {"good": "pass", "bad": "fail", "open": "undecided", "plain": "note", "danger": "danger"}


@dataclass(frozen=True)
class Heading:
    """The title of a section; `brief`: whether the short form has it too."""

    text: str
    brief: bool = False


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict. `word`: said before it, in place of the tone's."""

    tone: Tone
    text: str
    word: str = ""


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Tile:
    """A number to see at a glance, what it is, and how sure it is."""

    label: str
    value: str
    note: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Tiles:
    caption: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Table:
    """Cells as text (a `Numeral` where they are numbers); the first column names the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Bar:
    """One row of a chart with its label, the text of its value, and an interval drawn over it."""

    label: str
    value: float
    text: str
    interval: Interval = None


@dataclass(frozen=True)
class Bars:
    """Bars from zero on one scale; `mark` draws a reference line (1.0 for ratios). axis: name or unit of the values."""

    caption: str
    bars: tuple[Bar, ...]
    mark: float | None = None
    axis: str = ""


@dataclass(frozen=True)
class Dots:
    """Values with their intervals around a reference line, `mark`: where no effect is. axis: as of `Bars`."""

    caption: str
    bars: tuple[Bar, ...]
    mark: float
    axis: str = ""


@dataclass(frozen=True)
class Stack:
    """Shares of a whole, by row: `parts` names them in drawing order."""

    caption: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Point:
    """`label` says what it is; intervals are drawn as lines."""

    label: str
    x: float
    y: float
    x_interval: Interval = None
    y_interval: Interval = None


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line where their order means something."""

    name: str
    points: tuple[Point, ...]
    joined: bool = False


@dataclass(frozen=True)
class Plot:
    """Points over two axes. guide: a line at y = 1, at y = x, or none. log_x: for lengths that double.
    named: points have their labels beside them. line: what intervals are.
    """

    caption: str
    x: str
    y: str
    series: tuple[Series, ...]
    guide: Literal["none", "one", "diagonal"] = "none"
    log_x: bool = False
    named: bool = False
    line: str = "95 % CI"


@dataclass(frozen=True)
class Details:
    """Lines of text or preformatted code under a title; `folded` ones are for those who look for them."""

    title: str
    lines: tuple[str, ...]
    code: bool = False
    folded: bool = True


Chart = Tiles | Bars | Dots | Stack | Plot


Block = Heading | Finding | Paragraph | Table | Chart | Details


@dataclass(frozen=True)
class Document:
    """`lead`: the answer in one or two sentences."""

    title: str
    subtitle: str
    blocks: tuple[Block, ...]
    lead: str = ""


def brief(document: Document, files: Sequence[str]) -> Document:
    """The short form: what stands before the first heading, what is found, and the sections that say so. files: where
    all of it lies.
    """
    blocks: list[Block] = []
    keep = True
    for block in document.blocks:
        keep = block.brief if isinstance(block, Heading) else keep
        if isinstance(block, Finding) or (keep and not isinstance(block, Bars | Dots | Stack | Plot)):
            blocks.append(block)
    return replace(document, blocks=(*blocks, Details("All of it: --full, or", tuple(files), folded=False)))


def compact(caption: str, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Table:
    """A table without the columns that no row fills."""
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    return Table(caption, tuple(columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))


def tabulate(caption: str, rows: Iterable[Row], *columns: tuple[str, Callable[[Row], str]]) -> Table:
    """A table with a line for each of `rows`, and each column's name beside what its cells say of a row."""
    cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows)
    return compact(caption, tuple(name for name, _ in columns), cells)


def tables(document: Document) -> Iterator[Table]:
    """Every number of the document: its tables, and its charts as tables."""
    for block in document.blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Chart):
            yield as_table(block)


def as_table(chart: Chart) -> Table:
    """The numbers of a chart as a table."""
    match chart:
        case Tiles(caption, tiles):
            rows = tuple((tile.label, tile.value, tile.note) for tile in tiles)
            return Table(caption, ("", "value", "how sure"), rows)
        case Bars(caption, bars) | Dots(caption, bars):
            return Table(caption, ("", "value"), tuple((bar.label, Numeral(bar.text, bar.value)) for bar in bars))
        case Stack(caption, parts, shares):
            return Table(caption, ("", *parts), tuple((label, *map(percent, row)) for label, row in shares))
        case Plot():
            return _plot_table(chart)


def _plot_table(plot: Plot) -> Table:
    points = [(series.name, point) for series in plot.series for point in series.points]
    sides = [("x_interval", plot.x), ("y_interval", plot.y)]
    shown = [(name, axis) for name, axis in sides if any(getattr(point, name) for _, point in points)]
    columns = ("", plot.x, plot.y, *(f"{plot.line}, {axis}" for _, axis in shown))
    rows = tuple(
        (
            ": ".join(dict.fromkeys(part for part in (series, point.label) if part)),
            number(point.x),
            number(point.y),
            *(interval(getattr(point, name)) for name, _ in shown),
        )
        for series, point in points
    )
    return Table(plot.caption, columns, rows)


def sure(evidence: Evidence, values: str) -> str:
    """How sure an effect is: its interval and how many `values` (prompts, items) it is from, or why nothing is said."""
    return (
        evidence.shortage(values) if evidence.ci is None else f"95 % CI {interval(evidence.ci)}, {evidence.n} {values}"
    )


def sure_cell(evidence: Evidence) -> str:
    """The same for a table that counts values in a column of its own."""
    return evidence.brief if evidence.ci is None else interval(evidence.ci)


def least(evidence: Evidence) -> str:
    """The smallest true effect that would have shown; empty where none could have."""
    return "" if evidence.detectable is None else percent(evidence.detectable)
