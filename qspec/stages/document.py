"""A report as data: a title and blocks, which `report_html` and `report_markdown` render with the same numbers."""

from dataclasses import dataclass
import math
from typing import Literal

Tone = Literal["good", "bad", "open", "plain"]
"""good / bad: the numbers carry it; open: they do not decide; plain: a statement."""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict."""

    tone: Tone
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row, the others are numbers."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Bar:
    """One bar of a chart with its label, the text of its value, and an interval drawn over it."""

    label: str
    value: float
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Bars from zero on one scale; `mark` draws a reference line (1.0 for ratios)."""

    caption: str
    bars: tuple[Bar, ...]
    mark: float | None = None


@dataclass(frozen=True)
class Stack:
    """Shares of a whole, by row: `parts` names them in drawing order."""

    caption: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Details:
    """Lines of text or preformatted code under a title; `folded` ones are for those who look for them."""

    title: str
    lines: tuple[str, ...]
    code: bool = False
    folded: bool = True


Block = Heading | Finding | Paragraph | Table | Bars | Stack | Details


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    blocks: tuple[Block, ...]


def number(value: float, digits: int = 3) -> str:
    """`digits` significant digits without an exponent where that is readable: 1.42, 0.00034, 12,345, –, ∞."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(share: float, digits: int = 1) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def interval(ci: tuple[float, float] | None, digits: int = 3) -> str:
    """`1.30 to 1.55`, or nothing."""
    return "" if ci is None else f"{number(ci[0], digits)} to {number(ci[1], digits)}"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{number(count / scale)} {unit}"
    return f"{number(count)} B"
