"""A document as one self-contained HTML page: inline style and SVG, no script, light and dark, phone and print."""

from collections.abc import Iterable
from html import escape

from qspec.stages.document import Bars, Block, Details, Document, Finding, Heading, Paragraph, Stack, Table, percent

STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #5b6570; --line: #d9dee3; --page: #fff; --tint: #f5f7f9;
  --a: #2f6db5; --b: #c2701c; --c: #8a94a0; --good: #1f7a4d; --bad: #b3261e; --open: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #333b44; --page: #14181d;
  --tint: #1b2026; --a: #6ea8e6; --b: #e09a4f; --c: #717c88; --good: #5cc08d; --bad: #f2837b; --open: #dcae56; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
.subtitle, figcaption { color: var(--soft); font-size: .9rem; text-align: left; }
.subtitle { margin: .3rem 0 1.4rem; overflow-wrap: anywhere; }
.findings { list-style: none; margin: 0; padding: 0; }
.findings li { display: flex; gap: .7rem; padding: .4rem 0; border-bottom: 1px solid var(--line); }
.findings b { flex: none; width: 6.5rem; font-size: .8rem; line-height: 1.5rem; text-transform: uppercase; }
.good b { color: var(--good); } .bad b { color: var(--bad); } .open b { color: var(--open); }
.plain b { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 500; white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
td.prose { text-align: left; white-space: normal; overflow-wrap: anywhere; }
figure { margin: .8rem 0 1.2rem; }
.bar { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr minmax(4rem, auto); gap: .7rem;
  align-items: center; padding: .15rem 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
.bar > span:first-child { overflow-wrap: anywhere; }
.bar > span:last-child { text-align: right; }
svg { display: block; width: 100%; height: 1rem; background: var(--tint); }
.fa { fill: var(--a); } .fb { fill: var(--b); } .fc { fill: var(--c); }
.mark { stroke: var(--ink); stroke-dasharray: 2 2; } .whisker { stroke: var(--ink); }
.key { display: inline-block; width: .7rem; height: .7rem; margin: 0 .35rem 0 .9rem; }
.ka { background: var(--a); } .kb { background: var(--b); } .kc { background: var(--c); }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--tint); padding: .8rem; font-size: .82rem; }
@media (max-width: 34rem) { .bar { grid-template-columns: 1fr auto; } .bar svg { grid-column: 1 / -1; grid-row: 2; }
  .findings li, .findings b { display: block; } }
@media print { :root { --page: #fff; --ink: #000; --soft: #333; --line: #bbb; --tint: #eee; }
  h2, figure, tr, li { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; }
  details::details-content { content-visibility: visible; block-size: auto; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
TONES = {"good": "pass", "bad": "fail", "open": "undecided", "plain": "note"}
FILLS = ("a", "b", "c")
WIDTH = 1000
"""Units across a chart; it stretches to the page."""


def render(document: Document) -> str:
    """The whole page."""
    parts: list[str] = []
    for i, block in enumerate(document.blocks):
        if isinstance(block, Finding):
            before, after = document.blocks[i - 1 : i], document.blocks[i + 1 : i + 2]
            opening = "" if before and isinstance(before[0], Finding) else '<ul class="findings">'
            closing = "" if after and isinstance(after[0], Finding) else "</ul>"
            parts.append(opening + _block(block) + closing)
        else:
            parts.append(_block(block))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(document.title)}</h1>\n<p class="subtitle">{escape(document.subtitle)}</p>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Finding(tone, text):
            return f'<li class="{tone}"><b>{TONES[tone]}</b><span>{escape(text)}</span></li>'
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Table():
            return _table(block)
        case Bars():
            return _bars(block)
        case Stack():
            return _stack(block)
        case Details(title, lines, code, folded):
            inner = f"<pre>{escape(chr(10).join(lines))}</pre>" if code else _list(lines)
            return f"<details{'' if folded else ' open'}><summary>{escape(title)}</summary>{inner}</details>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    return (
        f'<figure><figcaption>{escape(table.caption)}</figcaption><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>"
    )


def _cells(row: tuple[str, ...]) -> str:
    """The first cell heads its row; long text is set as prose."""
    first = f'<th scope="row">{escape(row[0])}</th>'
    return first + "".join(f"<td{' class=prose' if len(cell) > 40 else ''}>{escape(cell)}</td>" for cell in row[1:])


def _bars(chart: Bars) -> str:
    ends = [bar.interval[1] if bar.interval else bar.value for bar in chart.bars]
    top = max([*ends, *(bar.value for bar in chart.bars), chart.mark or 0.0, 1e-12]) * 1.02
    rows: list[str] = []
    for bar in chart.bars:
        shapes = f'<rect class="fa" width="{_x(bar.value, top)}" height="10"/>'
        if bar.interval:
            lo, hi = (_x(end, top) for end in bar.interval)
            shapes += f'<path class="whisker" vector-effect="non-scaling-stroke" d="M{lo} 5H{hi}"/>'
        if chart.mark is not None:
            at = _x(chart.mark, top)
            shapes += f'<path class="mark" vector-effect="non-scaling-stroke" d="M{at} 0V10"/>'
        rows.append(_bar_row(bar.label, shapes, bar.text))
    return f"<figure><figcaption>{escape(chart.caption)}</figcaption>{''.join(rows)}</figure>"


def _stack(stack: Stack) -> str:
    keys = "".join(
        f'<span class="key k{fill}"></span>{escape(part)}' for part, fill in zip(stack.parts, FILLS, strict=False)
    )
    rows: list[str] = []
    for label, shares in stack.rows:
        at, shapes = 0.0, ""
        for share, fill in zip(shares, FILLS, strict=False):
            shapes += f'<rect class="f{fill}" x="{_x(at, 1)}" width="{_x(share, 1)}" height="10"/>'
            at += share
        rows.append(_bar_row(label, shapes, " / ".join(percent(share, 0) for share in shares)))
    return f"<figure><figcaption>{escape(stack.caption)}{keys}</figcaption>{''.join(rows)}</figure>"


def _bar_row(label: str, shapes: str, text: str) -> str:
    name = escape(f"{label}: {text}", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img" aria-label="{name}">{shapes}</svg>'
    return f'<div class="bar"><span>{escape(label)}</span>{svg}<span>{escape(text)}</span></div>'


def _x(value: float, top: float) -> str:
    """Position on the chart; values that are not finite or below zero are drawn at its edge."""
    share = value / top if value == value and value > 0 else 0.0
    return f"{WIDTH * min(1.0, share):.1f}"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
