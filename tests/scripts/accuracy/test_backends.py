"""Backends beside each other: what counts as the same."""

import pytest

from qspec.errors import QspecError
from scripts.accuracy.backends import Item, compare


def test_items_are_compared_one_by_one() -> None:
    """Would catch prompts that differ unseen, equal means that pass for equal items, items that one side lacks."""
    a = {("t", 0): Item("p0", 1.0, "x"), ("t", 1): Item("p1", 0.0, "y")}
    b = {("t", 0): Item("p0", 0.0, "x"), ("t", 1): Item("p1'", 1.0, "z")}
    assert compare(a, b) == {"items": 2, "same_prompt": 1, "scores": [0.5, 0.5], "same_score": 0, "same_answer": 1}
    one, other = ({("t", 0): Item("p", score, "")} for score in (0.1, 0.2))
    assert compare(one, other)["nats_per_word_apart"] == pytest.approx(0.693147)
    with pytest.raises(QspecError, match="not the same ones"):
        compare(a, one)
