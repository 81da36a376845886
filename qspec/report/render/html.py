"""A document as one self-contained HTML page: inline style, SVG and script, light and dark, phone and print.

The script sorts and filters tables and shows what a point of a plot is; the page says the same without it.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
import math
from pathlib import Path
import re
from urllib.parse import quote

from qspec.readable import Interval, Numeral, Range, percent, size
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
from qspec.report.render.axis import Axis, axis_over, tick_text
from qspec.report.render.svg import KINDS, cut_off, marker, plot_svg

WIDTH = 1000
"""Units across a bar; it stretches to the page."""
MOST_TICKS = 5
"""Of a scale under rows: as many labels as a phone is wide."""
PARTS = 3
"""Colours of a stack."""


def render(document: Document, beside: Sequence[str] = ()) -> str:
    """The whole page. beside: names of files that lie beside it and hold its numbers, for programs."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    body = "\n".join(_run(kind, list(run)) for kind, run in groupby(document.blocks, _kind))
    lead = f'<p class="lead">{escape(document.lead)}</p>\n' if document.lead else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(document.title)}</h1>\n<p class="subtitle">{escape(document.subtitle)}</p>\n'
        f"{lead}{_files(beside)}{_contents(document)}{body}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _files(beside: Sequence[str]) -> str:
    links = ", ".join(f'<a href="{escape(quote(name), quote=True)}">{escape(name)}</a>' for name in beside)
    return f'<p class="files">The numbers as files: {links}</p>\n' if links else ""


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
            return _rows(block, axis_over(_values(block), [] if block.mark is None else [block.mark], zero=True))
        case Dots():
            return _rows(block, axis_over(_values(block), [block.mark]))
        case Stack():
            return _stack(block)
        case Plot():
            return _figure(_caption(block.caption, cut_off(block)), _keys(block) + plot_svg(block) + _numbers(block))
        case Details(title, lines, code, folded):
            inner = f"<pre>{escape(chr(10).join(lines))}</pre>" if code else _list(lines)
            return f"<details{'' if folded else ' open'}><summary>{escape(title)}</summary>{inner}</details>"


def _figure(caption: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{inner}</figure>"


def _table(table: Table) -> str:
    """A table in a box that scrolls by itself, also with the keyboard."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in table.rows)
    name = escape(table.caption, quote=True)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="group" aria-label="{name}">{whole}</div>'


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


def _values(chart: Bars | Dots) -> list[tuple[float, Interval]]:
    return [(bar.value, bar.interval) for bar in chart.bars]


def _rows(chart: Bars | Dots, axis: Axis) -> str:
    """A row per value, with its interval, over one scale; bars begin at 0, dots stand around the mark."""
    rows = []
    for bar in chart.bars:
        at, zero = _x(axis, bar.value), _x(axis, 0.0)
        if isinstance(chart, Bars):
            left, wide = min(at, zero), abs(at - zero)
            shape = f'<rect class="f0" x="{left:.1f}" width="{wide:.1f}" y="1" height="8"/>'
            shapes = shape + _line(bar, axis)
        else:
            dot = f'<path class="dot" vector-effect="non-scaling-stroke" d="M{at:.1f} 5h.01"/>'
            shapes = _line(bar, axis) + (dot if math.isfinite(bar.value) else "")
        rows.append(_bar_row(bar.label, shapes + _mark(chart.mark, axis), bar.text, axis))
    cut = any(not axis.holds(end) for _, ci in _values(chart) for end in ci or ())
    return _figure(_caption(chart.caption, cut), _aligned(rows, axis, chart.axis))


def _caption(caption: str, cut: bool) -> str:
    return f"{caption}; an arrow: the interval goes on beyond the scale" if cut else caption


def _stack(stack: Stack) -> str:
    keys = "".join(f'<span class="key f{i % PARTS}"></span>{escape(part)}' for i, part in enumerate(stack.parts))
    rows, axis = [], Axis(0.0, 100.0)
    for label, shares in stack.rows:
        at, shapes = 0.0, ""
        for i, share in enumerate(shares):
            begin, end = _x(axis, 100 * at), _x(axis, 100 * (at + share))
            shapes += f'<rect class="f{i % PARTS}" x="{begin:.1f}" width="{end - begin:.1f}" height="10"/>'
            at += share
        rows.append(_bar_row(label, shapes, " / ".join(map(percent, shares)), axis))
    return f"<figure><figcaption>{escape(stack.caption)}{keys}</figcaption>{_aligned(rows, axis, '%')}</figure>"


def _aligned(rows: list[str], axis: Axis, name: str) -> str:
    """Rows over their scale. Text is HTML, because the pictures of rows are stretched."""
    text = size if name == "bytes" else tick_text
    ticks = "".join(
        f'<span style="left:{100 * axis.share(value):.2f}%">{escape(text(value))}</span>'
        for value in axis.ticks(MOST_TICKS)
    )
    scale = f'<div class="bar scale" aria-hidden="true"><span></span><div class="ticks">{ticks}</div>'
    return f'<div class="bars">{"".join(rows)}{scale}<span>{escape(name)}</span></div></div>'


def _bar_row(label: str, shapes: str, text: str, axis: Axis) -> str:
    name = escape(f"{label}: {text}", quote=True)
    grid = "".join(f"M{_x(axis, value):.1f} 0V10" for value in axis.ticks(MOST_TICKS))
    lines = f'<path class="grid" vector-effect="non-scaling-stroke" d="{grid}"/>'
    svg = (
        f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img" aria-label="{name}">{lines}{shapes}</svg>'
    )
    return f'<div class="bar"><span>{escape(label)}</span>{svg}<span>{escape(text)}</span></div>'


def _line(bar: Bar, axis: Axis) -> str:
    """An interval; an end that the scale does not hold is an arrow."""
    if bar.interval is None:
        return ""
    low, high = bar.interval
    start, end = _x(axis, low), _x(axis, high)
    path = f"M{start:.1f} 5H{end:.1f}"
    path += "" if axis.holds(low) else f"M{start + 9:.1f} 1.5L{start:.1f} 5L{start + 9:.1f} 8.5"
    path += "" if axis.holds(high) else f"M{end - 9:.1f} 1.5L{end:.1f} 5L{end - 9:.1f} 8.5"
    return f'<path class="whisker" vector-effect="non-scaling-stroke" d="{path}"/>'


def _mark(mark: float | None, axis: Axis) -> str:
    if mark is None:
        return ""
    return f'<path class="mark" vector-effect="non-scaling-stroke" d="M{_x(axis, mark):.1f} 0V10"/>'


def _x(axis: Axis, value: float) -> float:
    return WIDTH * axis.share(value)


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
