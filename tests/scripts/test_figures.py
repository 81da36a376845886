"""Numbers of the pages are those of the files that they name."""

import re

import pytest

from scripts.figures import BLOCK, BLOCKS, PAGES, ROOT

MEASURED = re.compile(r"\d(?:\.\d+)? ?×|\d+ tokens/s|(?<![\w./-])\.\d{2,}|\d (?:ms|GB/s|nats)")
"""How a measured number looks: a ratio, a rate, a share or a KL."""

FOUND = [(page, name, text) for page in PAGES for _, name, text, _ in BLOCK.findall((ROOT / page).read_text("utf-8"))]


@pytest.mark.parametrize(("page", "name", "text"), FOUND, ids=[f"{page}:{name}" for page, name, _ in FOUND])
def test_a_block_says_what_its_file_says(page: str, name: str, text: str) -> None:
    """Would catch a number that was typed, or a file measured anew under an old page; mend: `scripts/study figures`."""
    assert text == BLOCKS[name]()


def test_every_block_stands_in_a_page() -> None:
    """Would catch a table that nobody sees, and one that a page lost."""
    assert {name for _, name, _ in FOUND} == BLOCKS.keys()


def test_the_readme_has_no_number_that_no_file_holds() -> None:
    """Would catch a speedup or a KL in the README's prose."""
    prose = BLOCK.sub("", (ROOT / "README.md").read_text("utf-8"))
    assert [line for line in prose.splitlines() if MEASURED.search(line)] == []
