"""YAML text: every string survives, and only the strict subset is read."""

from pathlib import Path

from hypothesis import example, given, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.schema import text as yaml_text
from qspec.schema.overrides import set_value
from qspec.schema.text import dump_yaml, parse_yaml, read_text

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


def nested(values: str, link: str) -> str:
    """Twelve lists, or mappings, each of which names the one before nine times."""
    lines = [f"a0: &a0 {values}"]
    lines += [f"a{i}: &a{i} {link.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        nested("[x, x, x]", "[{}]"),
        nested("{k: 1}", "{{<<: [{}]}}"),
        f"a: &a {'x' * 5000}\nb: [{', '.join(['*a'] * 100)}]",
        "a: &a {b: [*a]}",
    ],
    ids=["lists", "merged mappings", "one long text", "within itself"],
)
def test_aliases_that_stand_for_much_are_refused(text: str):
    """Would catch half a kilobyte that becomes gigabytes where it is written out, from a file or from `--set`."""
    with pytest.raises(RecipeError, match=r"test, line \d+.*alias"):
        parse_yaml(text, "test")
    if "\n" not in text:
        with pytest.raises(RecipeError, match="alias"):
            set_value({}, f"key={text.removeprefix('a: ')}")


def test_files_are_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a device that is read until the memory ends, and a byte order mark taken for part of a key."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x")
    assert parse_yaml(read_text(path, "recipe"), "test") == {"name": "x"}
    monkeypatch.setattr(yaml_text, "MOST_BYTES", 4)
    for large in (path, Path("/dev/zero")):
        with pytest.raises(RecipeError, match="is larger than 4 bytes"):
            read_text(large, "recipe")


def test_syntax_errors_are_located():
    """Would catch a broken file refused without the place to look at."""
    with pytest.raises(RecipeError, match=r"table, line 1, column \d+: is not valid YAML"):
        parse_yaml("a: [", "table")
