"""Data sets: what is read, how it becomes tokens, and that calibration and evaluation never share a row."""

import json
from pathlib import Path

import pytest

from qspec.bridges import text
from qspec.errors import RecipeError, SourceError
from qspec.schema.datasets import read_datasets
from qspec.schema.recipe import CalibrationSpec, DataSpec
from tests.arms import Letters


@pytest.fixture
def data(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    return data_dir


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """A user's file of 40 rows that can be told apart by their words."""
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{i:03d} " * 30}) + "\n" for i in range(40)))
    return str(path)


def _words(rows: list[list[int]]) -> set[str]:
    return {word for row in rows for word in Letters().decode(row).split() if len(word) == 4}


@pytest.mark.parametrize("name", sorted(read_datasets()))
def test_every_named_set_has_its_text(name: str, data: Path):
    """Would catch a field or file name in datasets.yaml that the rows do not have."""
    rows = text.load_rows(name, limit=3)
    assert len(rows) == 3
    entry = read_datasets()[name]
    fields = [field for field in (*entry.text, *entry.prompt, *entry.answer) if "input" not in field]
    for field in fields:
        assert any(text._text(row, [field]) for row in text.load_rows(name, limit=20)), field
    if entry.category:
        assert all(row[entry.category] for row in rows)


def test_calibration_and_fidelity_share_no_row(numbered: str):
    """Would catch a model judged on the text that it was calibrated on."""
    spec = CalibrationSpec(data=(DataSpec(name=numbered),), samples=6, length=200)
    calibration = _words(text.calibration_rows(spec, Letters(), seed=0))
    held_out = _words(text.windows(numbered, 6, 200, Letters()))
    assert calibration
    assert held_out
    assert not calibration & held_out


def test_rows_are_tokenised_as_served(numbered: str):
    """Would catch calibration without BOS, or rows of another length than asked for."""
    spec = CalibrationSpec(data=(DataSpec(name=numbered),), samples=5, length=64)
    rows = text.calibration_rows(spec, Letters(), seed=0)
    assert [(row[0], len(row)) for row in rows] == [(1, 64)] * 5
    assert rows == text.calibration_rows(spec, Letters(), seed=0)
    assert rows != text.calibration_rows(spec, Letters(), seed=1)


def test_windows_do_not_overlap(numbered: str):
    """Would catch windows that repeat text, which makes intervals too narrow; a short text gives fewer windows."""
    rows = text.windows(numbered, 100, 450, Letters())
    words = [_words([row]) for row in rows]
    assert 1 < len(rows) < 100
    for i, first in enumerate(words):
        for second in words[i + 1 :]:
            assert not first & second
    with pytest.raises(SourceError, match="no window"):
        text.windows(numbered, 2, 100_000, Letters())


def test_chat_rows_hold_prompt_and_answer(data: Path):
    """Would catch a chat calibration that shows the model only prompts, or no template at all."""
    spec = CalibrationSpec(data=(DataSpec(name="gsm8k"),), samples=2, length=2000, chat_template=True)
    for row in text.calibration_rows(spec, Letters(), seed=0):
        words = Letters().decode(row)
        assert words.startswith("user:")
        assert "assistant:" in words
        assert "####" in words.partition("assistant:")[2]


def test_samples_are_shared_by_weight(numbered: str, tmp_path: Path):
    """Would catch weights that are ignored, or rounding that loses a sample."""
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join("zzzz " * 40 for _ in range(40)))
    sources = (DataSpec(name=numbered, weight=3), DataSpec(name=str(other), weight=1))
    rows = text.calibration_rows(CalibrationSpec(data=sources, samples=7, length=50), Letters(), seed=0)
    assert sum("zzzz" in _words([row]) for row in rows) == 2
    assert len(rows) == 7


def test_spec_bench_prompts_by_group(data: Path):
    """Would catch categories that differ from the benchmark's own six, or a first turn that is not the prompt."""
    chosen = text.prompts("spec_bench", 2)
    assert [p.category for p in chosen[::2]] == [
        "multi_turn",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
    ]
    assert chosen[0].text.startswith("Compose an engaging travel blog")
    assert {p.category for p in text.prompts("spec_bench", 1, ("coding", "qa"))} == {"coding", "qa"}
    with pytest.raises(RecipeError, match="did you mean 'qa'"):
        text.prompts("spec_bench", 1, ("qaa",))


def test_prompts_that_do_not_fit_are_passed_over(data: Path):
    """Would catch a benchmark that dies on (or cuts) one long document instead of taking the next prompt."""
    short = text.prompts("spec_bench", 1, ("rag",), lambda prompt: len(prompt) < 3000)
    assert len(short[0].text) < 3000
    with pytest.raises(SourceError, match="fits the context"):
        text.prompts("spec_bench", 1, ("rag",), lambda prompt: False)


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a typo that ends in a stack trace, and a missing network that does."""
    with pytest.raises(RecipeError, match="did you mean 'wikitext2'"):
        text.load_rows("wikitext")
    with pytest.raises(SourceError, match="does not exist"):
        text.load_rows(str(tmp_path / "none.jsonl"))
    broken = tmp_path / "broken.jsonl"
    for line in ("nonsense", "[" * 100_000):  # the last one is too deep for the parser
        broken.write_text('{"text": "a"}\n' + line)
        with pytest.raises(SourceError, match="line 2"):
            text.load_rows(str(broken))
    monkeypatch.setenv("QSPEC_DATA", str(tmp_path))

    reasons = ["", "no\nroute"]

    def offline(*_args: object, **_options: object) -> None:
        raise ConnectionError(reasons.pop())

    monkeypatch.setattr(text, "_load_dataset", offline)
    while reasons:
        with pytest.raises(SourceError, match="set QSPEC_DATA") as refusal:
            text.load_rows("wikitext2")
        assert "\n" not in str(refusal.value)


def test_parquet_and_text_files(data: Path, tmp_path: Path):
    """Would catch a parquet reader that drops list columns, and paragraphs split at single line ends."""
    row = text.load_rows(str(data / "mmlu_pro" / "validation.parquet"), limit=1)[0]
    assert len(row["options"]) == 10
    path = tmp_path / "a.txt"
    path.write_text("one\nstill one\n\n\n\ntwo\n")
    assert [r["text"].split() for r in text.load_rows(str(path))] == [["one", "still", "one"], ["two"]]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", b"\xff\xfe"), ("a.jsonl", b'{"text": "\xff"}'), ("a.parquet", b"x")]
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes):
    """Would catch a decoder's or Parquet's own error, which names no file."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{name}: cannot be read"):
        text.load_rows(str(tmp_path / name))
