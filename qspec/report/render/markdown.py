"""A document as Markdown (GitHub flavour). All text is data: nothing in it can become markup."""

import re

from qspec.report.document import Block, Details, Document, Finding, Heading, Paragraph, Table, as_table

MARKS = {"good": "✔", "bad": "✘", "open": "?", "plain": "·", "danger": "⛔"}


def render(document: Document) -> str:
    """The whole page."""
    parts = [f"# {_text(document.title)}\n", f"{_text(document.subtitle)}\n"]
    parts += [f"**{_text(document.lead)}**\n"] if document.lead else []
    for block, following in zip(document.blocks, [*document.blocks[1:], None], strict=True):
        last_of_list = isinstance(block, Finding) and not isinstance(following, Finding)
        parts.append(_block(block) + "\n" * last_of_list)
    return "\n".join(parts)


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_text(text)}\n"
        case Finding(tone, text, word):
            lead = f"**{_text(word)}:** " if tone == "danger" and word else ""
            return f"- {MARKS[tone]} {lead}{_text(text)}"
        case Paragraph(text):
            return f"{_text(text)}\n"
        case Table(caption, columns, rows):
            return _table(caption, columns, rows)
        case Details(title, lines, code):
            return f"**{_text(title)}**\n\n{_code(lines) if code else _list(lines)}\n"
        case _:
            return _block(as_table(block))


def _table(caption: str, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    head = _row(columns) + _row(("---", *["---:"] * (len(columns) - 1)), raw=True)
    return f"**{_text(caption)}**\n\n{head}{''.join(_row(row) for row in rows)}"


def _row(cells: tuple[str, ...], raw: bool = False) -> str:
    return f"| {' | '.join(cell if raw else _text(cell) for cell in cells)} |\n"


def _list(lines: tuple[str, ...]) -> str:
    return "".join(f"- {_text(line)}\n" for line in lines)


def _code(lines: tuple[str, ...]) -> str:
    """A fenced block whose fence is longer than any run of backticks inside."""
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}\n"


def _text(text: str) -> str:
    """Escape what Markdown and inline HTML would interpret; line breaks become spaces."""
    line = " ".join(text.split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_\[\]|~#])", r"\\\1", line)
    return re.sub(r"^([-+]|\d+[.)])(?=\s|$)", r"\\\1", line)
