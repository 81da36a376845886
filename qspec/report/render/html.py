"""A document as one self-contained HTML page: inline style, SVG and script, light and dark, phone and print.

The script sorts and filters tables and shows what a point of a plot is; the page says the same without it.
"""

from collections.abc import Sequence
from itertools import groupby
import math
from pathlib import Path
import re

from qspec.readable import Numeral, Range
from qspec.report.document import TONES, Block, Document, Heading, as_table
from qspec.report.render.plots import Drawn, svg

TEMPLATES = Path(__file__).with_name("templates")


def render(document: Document, beside: Sequence[str] = ()) -> str:
    """The whole page. beside: names of files that lie beside it and hold its numbers, for programs."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"slug": _slug, "sorted_by": _sorted_by}
    environment.filters |= {"svg": svg, "as_table": as_table}
    sections = [block.text for block in document.blocks if isinstance(block, Heading)]
    runs = [(kind, list(run)) for kind, run in groupby(document.blocks, _kind)]
    page = environment.get_template("page.html.jinja")
    return page.render(page=document, beside=beside, sections=sections, runs=runs, tones=TONES) + "\n"


def _kind(block: Block) -> str:
    """Neighbours of one kind stand together: findings in a list, charts side by side."""
    return "charts" if isinstance(block, Drawn) else type(block).__name__.lower()


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _sorted_by(cell: str) -> str:
    """The number by which a cell is sorted; empty for text."""
    value = cell.value if isinstance(cell, Numeral) else cell.ends[0] if isinstance(cell, Range) else math.nan
    return f"{value:.10g}" if math.isfinite(value) else ""
