"""A document as plain text for a terminal: aligned tables, also in place of charts."""

from collections.abc import Iterator
import textwrap

from qspec.report.document import TONES, Block, Details, Document, Finding, Heading, Paragraph, Table, as_table

WIDTH = 110
"""Columns of prose; tables take what they need."""


def render(document: Document) -> str:
    """The whole page; findings stand together, everything else apart."""
    lines = [document.title, *textwrap.wrap(document.subtitle, WIDTH)]
    lines += ["", *textwrap.wrap(document.lead, WIDTH)] if document.lead else []
    for block, before in zip(document.blocks, [None, *document.blocks], strict=False):
        if not (isinstance(block, Finding) and isinstance(before, Finding)):
            lines.append("")
        lines += _block(block)
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """Header and rows: first column to the left, the others to the right. A line break in a column's name is kept."""
    names = [column.split("\n") for column in table.columns]
    height = max(map(len, names))
    stacked = [[""] * (height - len(name)) + name for name in names]
    head = [tuple(name[i] for name in stacked) for i in range(height)]
    widths = [max(map(len, cells)) for cells in zip(*head, *table.rows, strict=True)]
    return [_row(row, widths) for row in (*head, *table.rows)]


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    aligned = [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
    return "  ".join(aligned).rstrip()


def _block(block: Block) -> Iterator[str]:
    match block:
        case Heading(text):
            yield from (text, "-" * len(text))
        case Finding(tone, text, word):
            yield from textwrap.wrap(f"{word or TONES[tone]}: {text}", WIDTH, subsequent_indent="  ")
        case Paragraph(text):
            yield from textwrap.wrap(text, WIDTH)
        case Table(caption):
            yield from (*textwrap.wrap(caption, WIDTH), *table_lines(block))
        case Details(title, lines, code):
            yield title
            yield from lines if code else [f"- {line}" for line in lines]
        case _:
            yield from _block(as_table(block))
