"""Accuracy on two arms: against direct computation, and what the sentences claim."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from qspec.bridges import harness
from qspec.bridges.harness import Sample, TaskScores
from qspec.bridges.text import windows
from qspec.errors import SourceError
from qspec.measure import evaluate as stage
from qspec.progress import Progress
from qspec.schema.recipe import FidelitySpec, Recipe, TaskSpec
from qspec.schema.results import Accuracy, Fidelity
from tests.arms import HFModel, Letters
from tests.tiny import tiny_model

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} says {i * i} " * 9}) + "\n" for i in range(40)))
    return str(path)


def _fidelity(folder: Path, data: str, noise: float) -> Fidelity:
    spec = FidelitySpec(data=data, windows=5, length=200)
    (found,) = stage.measure_fidelity(HFModel(folder), HFModel(folder, noise=noise), Letters(), spec, QUIET)
    return found


def test_fidelity_equals_direct_computation(folder: Path, data: str):
    """Would catch targets shifted by one, positions lost between chunks, KL the wrong way round, arms swapped."""
    found = _fidelity(folder, data, noise=0.3)
    a, b = HFModel(folder).model, HFModel(folder, noise=0.3).model
    rows = torch.tensor(windows(data, 5, 200, Letters()))
    with torch.no_grad():
        p_WTV, q_WTV = (model(rows).logits[:, :-1].double() for model in (a, b))
    for logits_WTV, measured in ((p_WTV, found.original_perplexity), (q_WTV, found.quantized_perplexity)):
        nll = F.cross_entropy(logits_WTV.flatten(0, 1), rows[:, 1:].flatten())
        assert measured.value == pytest.approx(float(nll.exp()), rel=1e-4)  # float32 logits, other groups of rows
    kl = F.kl_div(q_WTV.log_softmax(-1), p_WTV.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    assert found.kl.value == pytest.approx(float(kl), rel=1e-3)
    same = (p_WTV.argmax(-1) == q_WTV.argmax(-1)).double().mean()
    assert found.top1_agreement.value == pytest.approx(float(same), abs=1e-3)  # 995 tokens, none flips
    ratio = found.quantized_perplexity.value / found.original_perplexity.value
    assert found.perplexity_ratio.value == pytest.approx(ratio)
    assert found.kl.n == 5
    assert found.kl.condition["tokens"] == 5 * 199
    for measured in found.measurements():
        assert measured.ci is not None
        assert measured.ci[0] <= measured.value <= measured.ci[1]
    assert found.perplexity_ratio.detectable is not None
    assert sum(window.kl for window in found.windows) / 5 == pytest.approx(found.kl.value)


def test_each_domain_is_measured_for_itself(folder: Path, data: str, tmp_path: Path):
    """Would catch domains that are pooled, in another order, or measured on the first text."""
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"{i} + {i} = {2 * i}, quite another text. " * 6 for i in range(60)), encoding="utf-8")
    spec = FidelitySpec(data=data, domains=(str(other),), windows=3, length=100)
    first, second = stage.measure_fidelity(HFModel(folder), HFModel(folder, noise=0.3), Letters(), spec, QUIET)
    assert [first.kl.condition["data"], second.kl.condition["data"]] == ["rows.jsonl", "other.txt"]
    alone = FidelitySpec(data=str(other), windows=3, length=100)
    (same,) = stage.measure_fidelity(HFModel(folder), HFModel(folder, noise=0.3), Letters(), alone, QUIET)
    assert same == second


def test_a_model_equals_itself(folder: Path, data: str):
    """Would catch state that leaks from one window or arm into the next."""
    found = _fidelity(folder, data, noise=0.0)
    assert (found.kl.value, found.top1_agreement.value, found.perplexity_ratio.value) == (0.0, 1.0, 1.0)


def _scores(scores: list[float], prompt: str = "p", cut: int = 0) -> TaskScores:
    samples = [
        Sample(f"t_{i % 2}", i // 2, f"d{i}", f"{prompt}{i}", score, i < cut, False) for i, score in enumerate(scores)
    ]
    return TaskScores("acc,none", samples, {"rows_available": 100})


def test_equal_scores_are_no_proof_of_equality():
    """Would catch "no loss" claimed from a handful of items: the detectable difference must be said."""
    result = stage.compare(TaskSpec(), "qspec", _scores([1, 0, 1, 1] * 5), _scores([1, 0, 1, 1] * 5))
    assert result.difference.value == 0
    assert result.difference.ci is not None
    assert result.difference.ci[0] < 0 < result.difference.ci[1]
    assert result.verdict.startswith("no difference detected, McNemar p = 1; a drop of ")
    assert result.verdict.endswith("points would have been (20 items, 80 % power)")
    assert result.detectable > 0.1
    assert result.difference.detectable == result.detectable
    assert result.recovery == 1.0
    assert result.recovery_ci is not None
    assert result.recovery_ci[0] < 0.95 < 1.05 < result.recovery_ci[1]
    few = stage.compare(TaskSpec(), "qspec", _scores([1, 1, 0]), _scores([1, 1, 0]))
    assert few.verdict.startswith("too few items to say: 3, need about ")


def test_guesses_are_no_evidence():
    """Would catch "a drop of 12 points would have been shown" by answers that are no better than chance."""
    scores = _scores([1.0] * 3 + [0.0] * 17)
    found = stage.compare(TaskSpec(), "qspec", scores, scores)
    assert found.verdict.startswith("at chance: 20 items are not answered better than by guessing (10 %)")
    stated = TaskScores("acc,none", scores.samples, {"chance": 0.25})
    assert "guessing (25 %)" in stage.compare(TaskSpec(name="arc"), "qspec", stated, stated).verdict
    free = TaskScores("acc,none", scores.samples, {"chance": 0.0})
    assert stage.compare(TaskSpec(), "qspec", free, free).verdict.startswith("too few items to say: 20, need about ")
    none = TaskScores("acc,none", _scores([0.0] * 20).samples, {"chance": 0.0})
    assert stage.compare(TaskSpec(), "qspec", none, none).verdict.startswith(
        "the original is right in none of 20 items"
    )


def test_a_clear_loss_is_called_one():
    """Would catch a sign error, and items paired by position instead of by identity."""
    original, quantized = _scores([1.0] * 40, cut=4), _scores([0.0] * 15 + [1.0] * 25)
    quantized.samples.reverse()
    result = stage.compare(TaskSpec(), "qspec", original, quantized)
    assert (result.only_original, result.only_quantized) == (15, 0)
    assert result.difference.value == pytest.approx(-15 / 40)
    assert result.p_value == pytest.approx(2 * 0.5**15)
    assert result.verdict.startswith("quantized is worse by 37.5 points")
    assert result.recovery == pytest.approx(25 / 40)
    assert (result.original_cut, result.quantized_cut) == (0.1, 0.0)
    assert [(s.task, s.n) for s in result.sub_tasks] == [("t_0", 20), ("t_1", 20)]
    assert sum(s.quantized * s.n for s in result.sub_tasks) == 25
    for sub_task in result.sub_tasks:
        assert sub_task.difference is not None
        assert sub_task.difference.value == pytest.approx(sub_task.quantized - sub_task.original)
        assert sub_task.p_value is not None
        assert sub_task.p_value >= stage.compare_items([1.0] * 8 + [1.0] * 12, [0.0] * 8 + [1.0] * 12).p_value


def test_scores_that_are_not_right_or_wrong():
    """Would catch McNemar's test on scores it is not made for."""
    result = stage.compare(TaskSpec(), "hf", _scores([0.5, 0.25, 0.75]), _scores([0.4, 0.2, 0.7]))
    assert result.p_value is None
    assert result.difference.value == pytest.approx(-0.2 / 3)
    assert "McNemar" not in result.verdict
    assert result.recovery_ci is not None
    assert result.recovery_ci[0] <= result.recovery <= result.recovery_ci[1]


@pytest.mark.parametrize("other", [_scores([1.0, 0.0], prompt="q"), _scores([1.0]), _scores([])])
def test_different_questions_are_refused(other: TaskScores):
    """Would catch scores compared across prompts (another template, few-shot count, tokenizer, subset)."""
    with pytest.raises(SourceError, match="not asked the same questions"):
        stage.compare(TaskSpec(), "qspec", _scores([1.0, 0.0]), other)


def test_different_conditions_are_refused():
    """Would catch arms served with another context, template or BOS, whose prompts' texts are equal."""
    other = TaskScores("acc,none", _scores([1.0, 0.0]).samples, {"rows_available": 100, "bos": True}, {"server": "b"})
    with pytest.raises(SourceError, match="bos None of task mmlu_pro: is True in the quantized arm"):
        stage.compare(TaskSpec(), "api", _scores([1.0, 0.0]), other)


def test_the_stage_runs_what_the_recipe_asks(folder: Path, data: str, monkeypatch: pytest.MonkeyPatch):
    """Would catch a switched-off part that runs, a backend that is skipped in silence, swapped arms."""
    asked: list[tuple[str, str]] = []

    def by_engine(lm: HFModel, tokenizer: object, task: TaskSpec, eos_ids: object, progress: object) -> TaskScores:
        asked.append((task.name, "qspec"))
        return _scores([1.0, 0.0] if lm is original else [0.0, 0.0])

    def by_folder(path: Path, task: TaskSpec) -> TaskScores:
        asked.append((task.name, path.name))
        return _scores([1.0, 1.0])

    monkeypatch.setattr(harness, "evaluate", by_engine)
    monkeypatch.setattr(harness, "evaluate_folder", by_folder)
    original, quantized = HFModel(folder), HFModel(folder)
    recipe = Recipe.model_validate(
        {
            "name": "t",
            "target": {"model": "m"},
            "draft": {"kind": "ngram"},
            "evaluation": {"fidelity": None, "tasks": [{"name": "a", "backends": ["qspec", "hf"]}]},
        }
    )
    found = stage.evaluate(original, quantized, Letters(), recipe, {"original": None}, QUIET, eos_ids=[2])
    assert asked == [("a", "qspec")] * 2
    assert found.skipped == ("a with backend hf: an arm has no transformers folder",)
    assert found.tasks[0].difference.value == -0.5
    folders = {"original": Path("x/one"), "quantized": Path("x/two")}
    found = stage.evaluate(original, quantized, Letters(), recipe, folders, QUIET, eos_ids=[2])
    assert asked[2:] == [("a", "qspec")] * 2 + [("a", "one"), ("a", "two")]
    assert [task.backend for task in found.tasks] == ["qspec", "hf"]
    assert Accuracy.model_validate_json(found.model_dump_json()) == found
