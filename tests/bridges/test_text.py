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
    """Would catch windows that repeat text, which makes intervals too narrow."""
    rows = text.windows(numbered, 4, 450, Letters())
    words = [_words([row]) for row in rows]
    assert len(rows) == 4
    for i, first in enumerate(words):
        for second in words[i + 1 :]:
            assert not first & second


def _one_line(folder: Path, suffix: str, words: int) -> str:
    """A user's file of one row without an empty line: numbered words."""
    content = " ".join(f"w{i:05d}" for i in range(words))
    path = folder / f"long.{suffix}"
    path.write_text(content if suffix == "txt" else json.dumps({"text": content}) + "\n")
    return str(path)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_one_long_row_gives_as_many_windows_as_are_asked_for(tmp_path: Path, suffix: str):
    """Would catch a text without empty lines that is measured on one window, whatever the recipe asks for; halves of it
    that are the same text, so that a model is judged on what it was calibrated on; and windows that overlap.
    """
    name = _one_line(tmp_path, suffix, words=4000)  # 28,000 characters, 14,000 of them held out
    held_out = text.windows(name, 16, 512, Letters())
    assert [len(row) for row in held_out] == [512] * 16
    spec = CalibrationSpec(data=(DataSpec(name=name),), samples=16, length=512)
    calibration = text.calibration_rows(spec, Letters(), seed=0)
    assert len(calibration) == 16
    words = [set(Letters().decode(row).split()[1:-1]) for row in [*held_out, *calibration]]
    assert sum(map(len, words)) == len(set.union(*words)) > 16 * 2 * 60


def test_a_text_is_used_up_before_it_is_called_short(tmp_path: Path):
    """Would catch windows that are missed because they are spread: at most 27 of 512 fit into 14,000 characters."""
    name = _one_line(tmp_path, "txt", words=4000)
    with pytest.raises(SourceError) as refusal:
        text.windows(name, 28, 512, Letters())
    held = int(str(refusal.value).partition("holds ")[2].partition(" ")[0])
    assert 25 <= held < 28
    assert len(text.windows(name, held, 512, Letters())) == held


@pytest.mark.parametrize("template", [False, True])
def test_few_rows_are_refused_with_their_number(numbered: str, template: bool):
    """Would catch calibration on less text than the recipe says, without a word."""
    spec = CalibrationSpec(data=(DataSpec(name=numbered),), samples=64, length=100, chat_template=template)
    with pytest.raises(SourceError, match=r"first half holds \d\d (rows|conversations) .*, and 64 are asked for"):
        text.calibration_rows(spec, Letters(), seed=0)
    with pytest.raises(SourceError, match=r"holds 0 windows of 100000 tokens, and 2 are asked for"):
        text.windows(numbered, 2, 100_000, Letters())


def test_others_make_up_for_a_short_source(numbered: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Would catch a mix that gives fewer samples than were asked for because one of its texts is short."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"text": "zzzz " * 30}) + "\n" for _ in range(6)))
    sources = (DataSpec(name=numbered), DataSpec(name=str(short), weight=3))
    rows = text.calibration_rows(CalibrationSpec(data=sources, samples=12, length=100), Letters(), seed=0)
    own = sum("zzzz" in _words([row]) for row in rows)
    assert len(rows) == 12
    assert 0 < own <= 4
    assert f"short.jsonl is short: the 12 rows of 100 tokens are {12 - own} of" in caplog.text


@pytest.mark.parametrize(
    ("weights", "most", "total", "shares"),
    [((1, 1), (9, 9), 5, [3, 2]), ((1, 1, 1), (9, 1, 9), 9, [4, 1, 4]), ((1, 1, 2), (2, 1, 3), 9, [2, 1, 3])],
)
def test_shares_keep_to_limits(weights: tuple[int, ...], most: tuple[int, ...], total: int, shares: list[int]):
    """Would catch rows that are lost where a source is full, or asked of one that has no more."""
    assert text._shares(weights, most, total) == shares


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
    with pytest.raises(SourceError, match="holds 0 that fit the context, and 1 are asked for"):
        text.prompts("spec_bench", 1, ("rag",), lambda prompt: False)


def test_few_prompts_are_refused_with_their_number(data: Path):
    """Would catch a benchmark on 10 prompts where 80 were asked for, without a word; and no way to ask for all."""
    with pytest.raises(SourceError, match="category writing: holds 10 that fit the context, and 80 are asked for"):
        text.prompts("spec_bench", 80, ("qa", "writing"))
    assert len(text.prompts("spec_bench", None, ("qa", "writing"))) == 90
    with pytest.raises(SourceError, match="holds no prompt"):
        text.prompts("spec_bench", None, ("rag",), lambda prompt: False)


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


@pytest.mark.parametrize("name", ["own.jsonl", "own.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str):
    """Would catch a file that an editor marked as UTF-8: refused as no JSON, or its mark tokenised with the text."""
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + (b'{"text": "words"}' if name.endswith("jsonl") else b"words"))
    assert text.load_rows(str(path)) == [{"text": "words"}]
