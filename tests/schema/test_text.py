"""YAML text: every string survives, and only the strict subset is read."""

from hypothesis import example, given, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.schema.text import dump_yaml, parse_yaml

characters = st.characters(exclude_categories=("Cs",))
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(characters, max_size=9))


@given(st.dictionaries(st.text(characters, max_size=5), values | st.lists(values, max_size=3), max_size=4))
@example({"line": "a\x85b\u2028c\r\n", "number": "1e5", "sexagesimal": "1:30", "octal": "010", "date": "2026-01-01"})
@example({"no": "no", "": "", "~": "~", "=": "=", "<<": "<", "bom": "\ufeff", "tab": "\t- x: y #z"})
def test_plain_data_survives(data: dict[str, object]):
    """Would catch a string that comes back as a number, a date or null, or loses a line break."""
    assert parse_yaml(dump_yaml(data), "test") == data


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("-2E+5", -200000.0), ("1e5x", "1e5x"), ("0x1e5", 485)])
def test_exponents_are_numbers(text: str, value: object):
    """Would catch YAML 1.1's reading of `1e-3` as text, which would refuse a valid recipe."""
    assert parse_yaml(text, "test") == value


def test_repeated_values_are_written_out():
    """Would catch anchors in a dump, which few people can read."""
    part = {"a": [1]}
    assert "&" not in dump_yaml({"x": part, "y": part})


def test_anchors_and_merge_keys_are_read():
    """Would catch the duplicate-key check refusing YAML's own way to share a section."""
    text = "base: &b {k: 1, v: 2}\nother: {<<: *b, k: 3}\n"
    assert parse_yaml(text, "test") == {"base": {"k": 1, "v": 2}, "other": {"k": 3, "v": 2}}


def test_syntax_errors_are_located():
    """Would catch a broken file refused without the place to look at."""
    with pytest.raises(RecipeError, match=r"table, line 1, column \d+: is not valid YAML"):
        parse_yaml("a: [", "table")
