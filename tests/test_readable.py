"""Sizes as people write them."""

import pytest

from qspec.errors import RecipeError
from qspec.readable import parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("200MB", 200_000_000), ("2 GiB", 2 << 30), ("1.5kb", 1500), ("1e9", 10**9), (7, 7), ("3 tib", 3 << 40)],
)
def test_sizes(text: str | int, count: int) -> None:
    """Catches MB for MiB, and the reverse."""
    assert parse_bytes(text, "limit") == count


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "2 GGB", "0", "nan", "0.1 B", "1 2 MB", "1e999", "1e30 TB"])
def test_anything_else_is_refused(text: str) -> None:
    """Catches a limit of nothing or of more than there can be, and a unit that is ignored."""
    with pytest.raises(RecipeError, match="is no size in memory"):
        parse_bytes(text, "limit")
