"""A document for programs: every table and chart as CSV and JSON, with the numbers behind the text."""

import csv
import io
import json
import math
from typing import Any

from qspec.readable import Numeral, Range
from qspec.report.document import TONES, Document, Finding, tables


def as_csv(document: Document) -> str:
    """One line per cell: table, row, column, value, low, high (of an interval), text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("table", "row", "column", "value", "low", "high", "text"))
    for table in tables(document):
        for row in table.rows:
            for column, cell in zip(table.columns[1:], row[1:], strict=True):
                numbers = _numbers(cell)
                columns = (numbers.get(name, "") for name in ("value", "low", "high"))
                writer.writerow((table.caption, row[0], " ".join(column.split()), *columns, cell))
    return out.getvalue()


def as_json(document: Document) -> str:
    """Title, lead, findings, and tables whose cells have a text and, where there are any, numbers."""
    data: dict[str, Any] = {
        "title": document.title,
        "subtitle": document.subtitle,
        "lead": document.lead,
        "findings": [
            {"verdict": block.word or TONES[block.tone], "text": block.text}
            for block in document.blocks
            if isinstance(block, Finding)
        ],
        "tables": [
            {
                "caption": table.caption,
                "columns": [" ".join(column.split()) for column in table.columns],
                "rows": [[{"text": cell, **_numbers(cell)} for cell in row] for row in table.rows],
            }
            for table in tables(document)
        ],
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _numbers(cell: str) -> dict[str, float]:
    """`value` of a number, `low` and `high` of an interval; what is not finite stays text."""
    if isinstance(cell, Range):
        numbers = dict(zip(("low", "high"), cell.ends, strict=True))
    else:
        numbers = {"value": cell.value} if isinstance(cell, Numeral) else {}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
