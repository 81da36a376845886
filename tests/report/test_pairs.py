"""Several pairs on one page: dominance, paired differences, and what is not claimed."""

import json
from pathlib import Path
from typing import TypeVar

import pytest

from qspec import cli
from qspec.report.document import Document, Finding, Paragraph, Plot, Table
from qspec.report.pairs import comparison, front
from qspec.schema.results import Results, Window
from tests.example_results import example, measurement, speed, task

Capture = pytest.CaptureFixture[str]
T = TypeVar("T")


def pair(name: str, gain: float, score: float, kl: float) -> Results:
    """Its speed, task score and KL; KL differs in every window alike."""
    base = example()
    assert base.accuracy.fidelity is not None
    windows = tuple(w.model_copy(update={"kl": w.kl + kl - 0.0213}) for w in base.accuracy.fidelity.windows)
    found = measurement("KL", kl, (kl - 0.002, kl + 0.002))
    fidelity = base.accuracy.fidelity.model_copy(update={"kl": found, "windows": windows})
    accuracy = base.accuracy.model_copy(update={"fidelity": fidelity, "tasks": (task(score),)})
    return base.model_copy(update={"name": name, "speed": speed(gain), "accuracy": accuracy})


def pairs(count: int = 3) -> dict[str, Results]:
    made = [
        pair("fast", 1.9, 0.27, 0.04),
        pair("close", 1.3, 0.32, 0.01),
        pair("neither", 1.2, 0.25, 0.2),
        pair("middle", 1.5, 0.3, 0.02),
        pair("lost", 1.1, 0.2, 0.4),
    ]
    return {results.name: results for results in made[:count]}


def blocks(document: Document, kind: type[T]) -> list[T]:
    return [block for block in document.blocks if isinstance(block, kind)]


def test_the_front_holds_what_nothing_beats():
    """Would catch equals that push each other out, and a worse one that stays."""
    points = {"a": (1.0, 1.0), "b": (2.0, 0.5), "c": (1.0, 0.5), "d": (2.0, 0.5), "e": (0.5, 2.0)}
    assert front(points) == ["a", "b", "d", "e"]


def test_speed_stands_against_accuracy():
    """Would catch a front of the largest KL, axes that are swapped, and a pair that is not drawn."""
    page = comparison(pairs())
    recovery, kl = blocks(page, Plot)
    for plot in (recovery, kl):
        ahead, behind = plot.series
        assert [point.label for point in ahead.points] == ["close", "fast"]
        assert [point.label for point in behind.points] == ["neither"]
    assert "lower is better" in kl.y
    assert kl.series[0].points[0].y == 0.01
    (table,) = [t for t in blocks(page, Table) if t.caption.startswith("Every pair")]
    assert [row[0] for row in table.rows] == ["fast", "close", "neither"]
    assert (
        page.lead == "close is the fastest pair that keeps its budgets and shows no loss: 2.38× its original's speed."
    )


def test_pairs_are_compared_on_the_same_windows():
    """Would catch intervals of single pairs set beside each other: text varies more than the pairs differ."""
    (table,) = [t for t in blocks(comparison(pairs()), Table) if t.caption.startswith("Quantized targets paired")]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["close: KL, nats/token"][0] == "-0.0300"
    assert rows["close: KL, nats/token"][-1] == "closer to the original"
    assert rows["neither: KL, nats/token"][-1] == "further from the original"
    assert rows["close: mmlu_pro"][-1] == "no difference shown"


def test_other_text_is_not_paired():
    """Would catch windows of another tokenizer or another original that are subtracted from each other."""
    chosen = pairs(2)
    other = chosen["close"]
    assert other.accuracy.fidelity is not None
    shifted = tuple(
        Window.model_validate({**w.model_dump(), "original_nll": 9.0}) for w in other.accuracy.fidelity.windows
    )
    fidelity = other.accuracy.fidelity.model_copy(update={"windows": shifted})
    accuracy = other.accuracy.model_copy(update={"fidelity": fidelity, "tasks": ()})
    page = comparison({**chosen, "close": other.model_copy(update={"accuracy": accuracy})})
    assert "No questions or windows are common" in blocks(page, Paragraph)[0].text


def test_a_correlation_takes_enough_pairs():
    """Would catch a law read from two points."""
    assert "is not stated" in blocks(comparison(pairs()), Paragraph)[-1].text
    (table,) = [t for t in blocks(comparison(pairs(5)), Table) if t.caption.startswith("Rank correlation")]
    name, rho, p, count = table.rows[0]
    assert (name, float(rho), p, count) == ("KL, nats/token", -1, "0.017", "5")  # 2 of 120 orders
    assert table.rows[1][1] == "–"  # agreement is the same for all


def test_speeds_of_other_machines_are_marked():
    """Would catch a ranking that the machines explain."""
    chosen = pairs(2)
    environment = {**chosen["close"].environment, "threads": "64"}
    page = comparison({**chosen, "close": chosen["close"].model_copy(update={"environment": environment})})
    cautions = [finding.text for finding in blocks(page, Finding) if finding.word == "caution"]
    assert cautions == ["fast and close were timed under different conditions: threads 2 and 64"]


def test_folders_files_and_names(tmp_path: Path, capsys: Capture):
    """Would catch a run that is not found by its folder, and two runs of one name that become one."""
    for place, results in (("one/report", pair("same", 1.3, 0.3, 0.02)), ("two", pair("same", 1.2, 0.3, 0.03))):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "results.json").write_text(results.dump(), encoding="utf-8")
    out = tmp_path / "out"
    assert cli.main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--json", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["title"] == "2 speculative pairs"
    assert str(tmp_path / "one") in data["subtitle"]
    assert sorted(path.name for path in out.iterdir()) == ["report.csv", "report.html", "report.json", "report.md"]
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no results.json" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "two"), str(tmp_path / "two")]) == 2
