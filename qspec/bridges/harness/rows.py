"""Rows of the data sets of `eval/datasets.yaml` for the definitions in `eval/tasks`, which name these functions."""

from collections.abc import Iterator
import re
from typing import Any

from qspec.bridges.text import load_rows, table

_TITLE = re.compile(r"^ = [^=].*[^=] = \n?$")
"""The line above a page of WikiText; sections have more signs."""


def splits(test: str, train: str | None = None, **_: object) -> dict[str, Any]:
    """Whole data sets by the split that they serve as. The harness adds what it knows of the task."""
    names = {"test": test, "train": train}
    return {split: table(load_rows(name)) for split, name in names.items() if name is not None}


def wikitext_pages(**_: object) -> dict[str, Any]:
    """WikiText-2's test rows, which are lines, joined to pages."""
    lines = (str(row["text"]) for row in load_rows("wikitext2"))
    return {"test": table([{"page": page} for page in _pages(lines)])}


def _pages(lines: Iterator[str]) -> Iterator[str]:
    page, blank = "", True
    for line in lines:
        if blank and _TITLE.match(line) and page.strip():
            yield page
            page = ""
        page, blank = page + (line or "\n"), not line.strip()
    yield page
