"""Gates: what fails, what is an error, and what noise could explain."""

from pathlib import Path
from typing import Any

import pytest

from qspec import cli
from qspec.errors import RecipeError, SourceError
from qspec.report.gate import judge, parse, sentence
from qspec.report.measured import METRICS, measured
from qspec.schema.results import Mismatch, Results, TaskRow
from tests.example_results import example, speed

Capture = pytest.CaptureFixture[str]


def outcome(condition: str, results: Results | None = None) -> tuple[bool, str]:
    (found,) = judge([parse(condition)], results or example())
    return found.missed, found.noise


def with_rows(results: Results, quantized: list[float]) -> Results:
    """The same task, answered item by item as said."""
    rows = tuple(
        TaskRow(task="t", doc_id=i, doc_hash=f"d{i}", prompt_hash=f"p{i}", original=1.0, quantized=score)
        for i, score in enumerate(quantized)
    )
    task = results.accuracy.tasks[0].model_copy(update={"rows": rows})
    return results.model_copy(update={"accuracy": results.accuracy.model_copy(update={"tasks": (task,)})})


@pytest.mark.parametrize(
    ("condition", "missed", "noise"),
    [
        ("recovery<0.99", True, "noise could explain it"),  # 0.94, interval 0.79 to 1.03
        ("recovery<70%", False, "beyond noise"),
        ("recovery.high<1.05", True, "noise does not explain it"),
        ("recovery.low < 0.8", True, "noise could explain it"),
        ("kl>0.02", True, "noise could explain it"),
        ("kl>0.05", False, "beyond noise"),
        ("alpha<0.6", False, "beyond noise"),
        ("alpha[coding]<0.79", False, "but noise could hide a miss"),
        ("speedup<2.5", False, "but noise could hide a miss"),
        ("speedup[quantized]<1.9", True, "noise could explain it"),
        ("speculation<=1", False, "beyond noise"),
        ("lossless<1", False, "but noise could hide a miss"),
        ("tokens_s<100", True, "no interval, so noise cannot be judged"),
        ("ttft_ms>=85", True, "no interval, so noise cannot be judged"),
        ("top1<0.9", False, "beyond noise"),
    ],
)
def test_a_gate_is_judged_by_its_value_and_told_with_its_noise(condition: str, missed: bool, noise: str):
    """Would catch a comparison turned round, another label or interval end, and a miss that hides how sure it is."""
    assert outcome(condition) == (missed, noise)


def test_a_sentence_has_value_interval_and_gate():
    """Would catch a gate that only says no."""
    (found,) = judge([parse("alpha[coding]<0.85")], example())
    said = sentence(found, "pair")
    assert said.text == (
        "pair: alpha[coding] = 0.8000 (95 % CI 0.7700 to 0.8300, n = 986); noise does not explain it; "
        "fails if alpha[coding]<0.85"
    )
    assert (said.tone, said.word) == ("bad", "missed")


def test_a_changed_output_is_a_miss():
    """Would catch near ties counted as faults, or faults as ties."""
    tie = Mismatch(prompt=0, category="qa", position=9, margin=0.004, near_tie=True)
    fault = Mismatch(prompt=1, category="qa", position=3, margin=2.5, near_tie=False)
    for mismatches, missed in (((tie,), False), ((tie, fault), True)):
        results = example().model_copy(update={"speed": speed(mismatches=mismatches)})
        assert outcome("lossless<1", results)[0] is missed


@pytest.mark.parametrize(
    ("condition", "part"),
    [
        ("recovery", "is no condition"),
        ("recovery<", "is no condition"),
        ("recovery<nan", "is no condition"),
        ("recovery==0.9", "is no condition"),
        ("recovry<0.9", "did you mean 'recovery'"),
        ("accuracy<0.9", "use one of: recovery"),
    ],
)
def test_a_condition_that_is_none_is_refused(condition: str, part: str):
    """Would catch a typing error that passes as a gate that is met."""
    with pytest.raises(RecipeError, match=part):
        parse(condition)


@pytest.mark.parametrize("metric", METRICS)
def test_what_was_not_measured_is_no_pass(metric: str):
    """Would catch a gate on a switched-off evaluation or benchmark that lets everything through."""
    assert measured(example(), metric)
    bare = Results(name="bare", recipe={}, environment={})
    with pytest.raises(SourceError, match=f"{metric} was not measured"):
        judge([parse(f"{metric}<0")], bare)
    with pytest.raises(SourceError, match=r"'codng' was not measured; (did you mean|measured:)"):
        judge([parse(f"{metric}[codng]<0")], example())


def test_an_end_needs_an_interval():
    """Would catch `.low` of a value without one taken as minus infinity, which misses or meets every gate."""
    with pytest.raises(SourceError, match="has no interval"):
        judge([parse("tokens_s.low<50")], example())


def test_against_a_baseline_recovery_is_paired_item_by_item():
    """Would catch scores divided without pairing, the original in place of the baseline, a ratio upside down."""
    base, worse = with_rows(example(), [1.0] * 40), with_rows(example(), [0.0] * 15 + [1.0] * 25)
    (found,) = judge([parse("recovery<0.99")], worse, base)
    assert found.value.value == pytest.approx(25 / 40)
    assert (found.missed, found.noise, found.value.n) == (True, "noise does not explain it", 40)
    (same,) = judge([parse("recovery<0.99")], base, base)
    assert (same.missed, same.noise) == (False, "but noise could hide a miss")


def test_against_a_baseline_speed_is_over_the_same_original():
    """Would catch the machine's load on that day counted as a loss: each gain is over an original timed in turns."""
    slower = example().model_copy(update={"speed": speed(1.42 * 0.9)})
    (found,) = judge([parse("speedup<1")], slower, example())
    assert found.value.value == pytest.approx(0.9, rel=1e-3)
    assert found.missed
    assert found.value.n == 12


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"environment": {"cpu": "another", "threads": "2"}}, "cpu another"),
        ({"recipe": {"target": {"model": "another"}}}, "original another"),
        ({"speed": speed().model_copy(update={"condition": {"prompts": 3}})}, "prompts 3"),
    ],
)
def test_speeds_under_other_conditions_are_not_compared(change: dict[str, Any], part: str):
    """Would catch a faster machine, shorter prompts or another model passing for progress."""
    other = example().model_copy(update={"name": "other", **change})
    with pytest.raises(SourceError, match=f"other: has {part}"):
        judge([parse("speedup<1")], example(), other)


def test_other_questions_are_not_compared():
    """Would catch the recovery of one subset over another."""
    base, other = with_rows(example(), [1.0] * 4), with_rows(example(), [1.0] * 3)
    with pytest.raises(SourceError, match=r"was not asked the same questions there \(3 of 3 are\)"):
        judge([parse("recovery<1")], other, base)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "results.json"
    path.write_text(example().dump(), encoding="utf-8")
    return str(path)


def test_the_command_line_tells_pass_miss_and_error_apart(file: str, capsys: Capture):
    """Would catch a CI that goes on after a missed gate, or takes a misspelt one for a miss."""
    assert cli.main(["report", file]) == 0
    assert cli.main(["report", file, "--fail-if", "alpha<0.6", "--fail-if", "kl>0.05"]) == 0
    printed = capsys.readouterr().out
    assert "met: alpha[all] = 0.7100" in printed
    assert cli.main(["report", file, "--fail-if", "alpha<0.6", "--fail-if", "recovery<0.99"]) == 3
    gates = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("missed:", "met:"))]
    assert [line.partition(" ")[0] for line in gates] == ["missed:", "met:"]  # what was missed comes first
    assert cli.main(["report", file, "--fail-if", "alpa<0.6"]) == 2
    assert cli.main(["report", file, "--fail-if", "alpha[prose]<0.6"]) == 2
    assert cli.main(["report", file, "--against", file]) == 2
    assert "changes nothing without a gate" in capsys.readouterr().err
    assert cli.main(["report", file, "--against", file, "--fail-if", "speedup<0.99"]) == 0
