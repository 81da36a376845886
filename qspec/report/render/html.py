"""A document as one self-contained HTML page: inline style, SVG and script, light and dark, phone and print.

The script sorts and filters tables and shows what a point of a plot is; the page says the same without it.
"""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
import math
from pathlib import Path
import re

from qspec.readable import Numeral, Range, percent
from qspec.report.document import (
    TONES,
    Bar,
    Bars,
    Block,
    Chart,
    Details,
    Document,
    Dots,
    Finding,
    Heading,
    Paragraph,
    Plot,
    Stack,
    Table,
    Tiles,
    as_table,
)
from qspec.report.render.svg import KINDS, marker, plot_svg

WIDTH = 1000
"""Units across a bar; it stretches to the page."""
PARTS = 3
"""Colours of a stack."""


def render(document: Document) -> str:
    """The whole page."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    body = "\n".join(_run(kind, list(run)) for kind, run in groupby(document.blocks, _kind))
    lead = f'<p class="lead">{escape(document.lead)}</p>\n' if document.lead else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(document.title)}</h1>\n<p class="subtitle">{escape(document.subtitle)}</p>\n'
        f"{lead}{_contents(document)}{body}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _kind(block: Block) -> type[Block]:
    return type(block)


def _run(kind: type[Block], blocks: list[Block]) -> str:
    """Neighbours of one kind: findings make a list, plots stand side by side."""
    inner = "\n".join(map(_block, blocks))
    if kind is Finding:
        return f'<ul class="findings">\n{inner}\n</ul>'
    return f'<div class="plots">\n{inner}\n</div>' if kind is Plot else inner


def _contents(document: Document) -> str:
    """Links to the sections, where there are several."""
    names = [block.text for block in document.blocks if isinstance(block, Heading)]
    links = "".join(f'<a href="#{_slug(name)}">{escape(name)}</a>' for name in names)
    return f'<nav aria-label="Sections">{links}</nav>\n' if len(names) > 3 else ""


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f'<h2 id="{_slug(text)}">{escape(text)}</h2>'
        case Finding(tone, text, word):
            return f'<li class="{tone}"><b>{escape(word or TONES[tone])}</b><span>{escape(text)}</span></li>'
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Table():
            return _figure(block.caption, _table(block))
        case Tiles():
            return _tiles(block)
        case Bars():
            return _figure(block.caption, _bars(block))
        case Dots():
            return _figure(block.caption, _dots(block))
        case Stack():
            return _stack(block)
        case Plot():
            return _figure(block.caption, _keys(block) + plot_svg(block) + _numbers(block))
        case Details(title, lines, code, folded):
            inner = f"<pre>{escape(chr(10).join(lines))}</pre>" if code else _list(lines)
            return f"<details{'' if folded else ' open'}><summary>{escape(title)}</summary>{inner}</details>"


def _figure(caption: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{inner}</figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(row: tuple[str, ...]) -> Iterator[str]:
    """The first cell heads its row; long text is set as prose; a number says by what it is sorted."""
    for i, cell in enumerate(row):
        value = cell.value if isinstance(cell, Numeral) else cell.ends[0] if isinstance(cell, Range) else math.nan
        sorted_by = f' data-v="{value:.10g}"' if math.isfinite(value) else ""
        prose = " class=prose" if len(cell) > 40 and i else ""
        yield (
            f'<th scope="row"{sorted_by}>{escape(cell)}</th>'
            if i == 0
            else f"<td{prose}{sorted_by}>{escape(cell)}</td>"
        )


def _tiles(block: Tiles) -> str:
    tiles = "".join(
        f'<dl class="tile {tile.tone}"><dt>{escape(tile.label)}</dt>'
        f'<dd class="value">{escape(tile.value)}</dd><dd>{escape(tile.note)}</dd></dl>'
        for tile in block.tiles
    )
    return f'<section class="tiles" aria-label="{escape(block.caption, quote=True)}">{tiles}</section>'


def _bars(chart: Bars) -> str:
    ends = [bar.interval[1] if bar.interval else bar.value for bar in chart.bars]
    top = max([*filter(math.isfinite, (*ends, *(bar.value for bar in chart.bars))), chart.mark or 0.0, 1e-12]) * 1.02
    rows: list[str] = []
    for bar in chart.bars:
        shapes = f'<rect class="f0" width="{_x(bar.value, 0, top)}" height="10"/>'
        rows.append(_bar_row(bar.label, shapes + _line(bar, 0, top) + _mark(chart.mark, 0, top), bar.text))
    return _aligned(rows)


def _dots(chart: Dots) -> str:
    """Values with their intervals; the scale holds every value and the mark, and intervals as far as that allows."""
    values = [*(bar.value for bar in chart.bars if math.isfinite(bar.value)), chart.mark]
    reach = 2 * (max(values) - min(values)) or 0.1
    ends = [end for bar in chart.bars for end in bar.interval or () if abs(end - chart.mark) <= reach]
    low, high = min(*values, *ends), max(*values, *ends)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) or 1.0
    rows: list[str] = []
    for bar in chart.bars:
        at = _x(bar.value, low, high)
        dot = f'<path class="dot" vector-effect="non-scaling-stroke" d="M{at} 5h.01"/>'
        rows.append(_bar_row(bar.label, _mark(chart.mark, low, high) + _line(bar, low, high) + dot, bar.text))
    return _aligned(rows)


def _stack(stack: Stack) -> str:
    keys = "".join(f'<span class="key f{i % PARTS}"></span>{escape(part)}' for i, part in enumerate(stack.parts))
    rows: list[str] = []
    for label, shares in stack.rows:
        at, shapes = 0.0, ""
        for i, share in enumerate(shares):
            shapes += f'<rect class="f{i % PARTS}" x="{_x(at, 0, 1)}" width="{_x(share, 0, 1)}" height="10"/>'
            at += share
        rows.append(_bar_row(label, shapes, " / ".join(map(percent, shares))))
    return f"<figure><figcaption>{escape(stack.caption)}{keys}</figcaption>{_aligned(rows)}</figure>"


def _aligned(rows: list[str]) -> str:
    return f'<div class="bars">{"".join(rows)}</div>'


def _bar_row(label: str, shapes: str, text: str) -> str:
    name = escape(f"{label}: {text}", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img" aria-label="{name}">{shapes}</svg>'
    return f'<div class="bar"><span>{escape(label)}</span>{svg}<span>{escape(text)}</span></div>'


def _line(bar: Bar, low: float, high: float) -> str:
    if bar.interval is None:
        return ""
    start, end = (_x(side, low, high) for side in bar.interval)
    return f'<path class="whisker" vector-effect="non-scaling-stroke" d="M{start} 5H{end}"/>'


def _mark(mark: float | None, low: float, high: float) -> str:
    if mark is None:
        return ""
    return f'<path class="mark" vector-effect="non-scaling-stroke" d="M{_x(mark, low, high)} 0V10"/>'


def _x(value: float, low: float, high: float) -> str:
    """Position on the chart; values beyond it, and those that are none, are drawn at its edge."""
    share = (value - low) / (high - low) if not math.isnan(value) else 0.0
    return f"{WIDTH * min(1.0, max(0.0, share)):.1f}"


def _keys(plot: Plot) -> str:
    """Which shape is which series, where there are several."""
    if len(plot.series) < 2:
        return ""
    keys = "".join(
        f'<span><svg viewBox="0 0 14 14" aria-hidden="true"><g class="s{i % KINDS}">{marker(i, 7, 7)}</g></svg>'
        f"{escape(series.name)}</span>"
        for i, series in enumerate(plot.series)
    )
    return f'<div class="keys">{keys}</div>'


def _numbers(chart: Chart) -> str:
    return f"<details><summary>The numbers</summary>{_table(as_table(chart))}</details>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
