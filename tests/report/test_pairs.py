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
    assert page.lead.startswith("close is the only pair that keeps its budgets and shows no loss: 2.38× its original's")
    assert "; fast is out: recovery budget 99.0 % missed: mmlu_pro keeps 84.4 %" in page.lead


def free(results: Results) -> Results:
    """Without budgets, which decide before speed does."""
    return results.model_copy(update={"recipe": {**results.recipe, "budget": {}}})


def uneven(results: Results, chosen: float, others: float) -> Results:
    """Its own speedup times `chosen` on the prompts that choose, times `others` on the rest."""
    assert results.speed is not None
    own = results.speed.ratios[2]
    values = tuple(
        value * (1 + 0.01 * (i % 5)) * part
        for i, (value, part) in enumerate(zip(own.per_prompt, (chosen, others) * 6, strict=True))
    )
    changed = own.model_copy(update={"per_prompt": values})
    return results.model_copy(
        update={"speed": results.speed.model_copy(update={"ratios": (*results.speed.ratios[:2], changed)})}
    )


def test_the_fastest_pair_is_faster_on_prompts_that_did_not_choose_it():
    """Would catch a crown for the pair that was luckiest on the prompts that crown it."""
    alone = {name: free(results) for name, results in pairs().items()}
    assert comparison(alone).lead.startswith(
        "fast is the fastest pair that keeps its budgets and shows no loss: 3.49× its original's speed (95 % CI 3.3"
    )
    close = alone["close"]
    lucky = {"lucky": uneven(close, 1.3, 1.0), "even": uneven(close, 1.0, 1.0)}
    assert comparison(lucky).lead.startswith("Nothing is called the fastest: lucky is not shown to beat even, at 1.00×")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"environment": {"cpu": "another"}}, "cpu <script>"),
        (
            {"environment": {"engine": "torch kernels, 2 threads"}},
            "engine C++ core (avx2) and torch kernels, 2 threads",
        ),
        ({"environment": {"instruction_sets": "avx2 avx512f"}}, "instruction_sets None and avx2 avx512f"),
        ({"environment": {"threads": "64"}}, "threads 2 and 64"),
        ({"recipe": {"target": {"model": "another"}}}, "original None and another"),
    ],
)
def test_nothing_is_crowned_across_machines_and_models(changed: dict[str, dict[str, object]], words: str):
    """Would catch a pair of another machine, engine or model called the fastest, and dominance that these explain."""
    alone = {name: free(results) for name, results in pairs(3).items()}
    for other in ("close", "neither"):  # also one that is not the first's neighbour
        (field, value), results = next(iter(changed.items())), alone[other]
        moved = results.model_copy(update={field: {**getattr(results, field), **value}})
        page = comparison({**alone, other: moved})
        assert page.lead.startswith(f"Nothing is called the fastest: fast and {other} were timed under different")
        assert words in page.lead
        assert not [f for f in blocks(page, Finding) if f.word == "front"]
        assert all(
            [series.name for series in plot.series] == ["pairs, not to be ranked"] for plot in blocks(page, Plot)
        )
        assert [row[0] for t in blocks(page, Table) if t.caption.startswith("Every pair") for row in t.rows] == [*alone]


def test_a_machine_that_nobody_knows_is_not_the_same():
    """Would catch results without an engine taken for results of one engine."""
    unknown = {
        name: free(results).model_copy(update={"environment": {"cpu": "x", "threads": "2"}})
        for name, results in pairs(2).items()
    }
    assert "engine None and None" in comparison(unknown).lead


def test_a_pair_without_accuracy_is_not_crowned():
    """Would catch a crown "that shows no loss" for a pair whose accuracy was not measured, or is chance."""
    alone = {name: free(results) for name, results in pairs(2).items()}
    fast = alone["fast"]
    guessed = task(0.1).model_copy(update={"original": task().original.model_copy(update={"value": 0.1})})
    for tasks in ((), (guessed,)):
        bare = fast.model_copy(update={"accuracy": fast.accuracy.model_copy(update={"tasks": tasks})})
        lead = comparison({"fast": bare, "close": alone["close"]}).lead
        assert lead.startswith("close is the only pair that keeps its budgets and shows no loss")
        assert lead.endswith("; fast has no accuracy measured on a task that could show a loss.")
    untimed = fast.model_copy(update={"speed": None})
    lead = comparison({"fast": untimed, "close": alone["close"]}).lead
    assert lead.startswith("close is the only pair")
    assert lead.endswith("; fast was not timed beside its original.")


def test_pairs_are_compared_on_the_same_windows():
    """Would catch intervals of single pairs set beside each other: text varies more than the pairs differ."""
    (table,) = [t for t in blocks(comparison(pairs()), Table) if t.caption.startswith("Quantized targets paired")]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["close: KL, nats/token"][0] == "-0.0300"
    assert rows["close: KL, nats/token"][-1] == "closer to the original"
    assert rows["neither: KL, nats/token"][-1] == "further from the original"
    assert rows["close: mmlu_pro"][-1] == "at chance"  # of the one question that both were asked


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
