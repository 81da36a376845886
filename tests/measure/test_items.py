"""Likelihoods of right answers: against counts by hand, and what a real model's damage does to them."""

from dataclasses import replace
import os
from pathlib import Path
import random

import pytest

from qspec.bridges import harness
from qspec.bridges.harness import Sample, TaskScores
from qspec.measure.evaluate import compare
from qspec.measure.items import FALL, compare_likelihoods, task_loss, task_verdict
from qspec.models import load as models
from qspec.nn.engines import open_decoder
from qspec.numerics.statistics.fidelity import wilson_interval
from qspec.progress import Progress
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe, TaskSpec
from qspec.schema.results import TaskResult
from qspec.schemes.build import build_plan
from scripts.engines.convert_llama2c import convert
from tests.observed import load

QUIET = Progress(quiet=True)
ROOT = Path(__file__).resolve().parents[2]
LONG = os.environ.get("QSPEC_LONG") == "1"
TASK = TaskSpec(name="last_words", num_fewshot=0, limit=150)


def scores(likelihoods: list[float | None], right: float = 1.0, chance: float = 0.0) -> TaskScores:
    samples = [
        Sample("t", i, f"d{i}", f"p{i}", right if i % 4 else 0.0, False, False, likelihood=x)
        for i, x in enumerate(likelihoods)
    ]
    return TaskScores("acc,none", samples, {"chance": chance})


def result(original: list[float | None], quantized: list[float | None], chance: float = 0.0) -> TaskResult:
    return compare(TaskSpec(name="t"), "qspec", scores(original, chance=chance), scores(quantized, chance=chance))


def test_changes_are_paired_and_of_students_law():
    """Would catch arms that are swapped, a share in place of nats, and an interval of unpaired items."""
    found = compare_likelihoods([-1.0, -20.0, -3.0], [-1.1, -20.3, -3.2])
    assert found is not None
    assert (found.value, found.n, found.unit) == (pytest.approx(-0.2), 3, "nats/item")
    half = 4.302653 * 0.1 / 3**0.5  # Student's t with two degrees of freedom; the changes' standard deviation is .1
    assert found.ci == pytest.approx((-0.2 - half, -0.2 + half))
    assert found.detectable is not None
    assert found.detectable > half


def test_items_without_a_likelihood_have_no_change():
    """Would catch a mean over some of the items, and results of written answers that say 0 nats."""
    assert compare_likelihoods([-1.0, None, -2.0], [-1.0, -1.0, -2.0]) is None
    assert compare_likelihoods([-1.0], [-1.5]) is None
    assert result([None] * 40, [None] * 40).likelihood is None


def moved(by: float, spread: float = 0.001) -> list[float | None]:
    return [-1.0 - 0.1 * (i % 7) + by + spread * (-1) ** i for i in range(40)]


def test_a_fall_that_flips_nothing_is_a_loss():
    """Would catch "no difference detected" as the last word, where every right answer has become less likely."""
    found = result(moved(0.0), moved(-0.05))
    assert found.only_original == found.only_quantized == 0
    assert task_verdict(found).endswith(
        "; likelihood of right answers: -0.050 nats per item (95 % CI -0.050 to -0.050)"
    )
    assert task_loss(found) == "0.050 nats of the likelihood of right answers"
    assert TaskResult.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("by", [0.0, 0.05, -FALL / 2])
def test_gains_and_falls_of_no_weight_are_no_loss(by: float):
    """Would catch INT8 as it should be called a loss, because many items show how little it loses; a wrong sign."""
    assert task_loss(result(moved(0.0), moved(by))) == ""


def test_long_answers_may_lose_more_nats():
    """Would catch INT8 accused by whole sentences, which lose as many nats as they have tokens to lose them in."""
    short, long = result(moved(0.0), moved(-0.05)), result(moved(-26.0), moved(-26.05))
    assert (task_loss(short) != "", task_loss(long)) == (True, "")


def test_a_wide_interval_is_no_loss():
    """Would catch a loss by the mean alone."""
    wide = [x + (3.0 if i % 2 else -3.1) for i, x in enumerate(moved(0.0)) if x is not None]
    assert task_loss(result(moved(0.0), list(wide))) == ""


def test_at_chance_nothing_is_said():
    """Would catch a verdict by the likelihoods of answers that the original does not know."""
    found = result(moved(0.0), moved(-0.05), chance=0.75)
    assert task_verdict(found).startswith("at chance: 40 items are not answered better than by guessing (75 %)")
    assert "likelihood" not in task_verdict(found)
    assert task_loss(found) == ""


def test_points_come_before_nats():
    """Would catch a loss of right answers that is told in nats alone."""
    lost = compare(TaskSpec(name="t"), "qspec", scores(moved(0.0)), scores(moved(-0.05), right=0.0))
    assert task_loss(lost) == "75.0 points"


def scaled(model: LoadedModel, layer: int, factor: float) -> LoadedModel:
    """One layer's matrices times a factor, as a wrong scale would do."""
    part = f"layers.{layer}."
    tensors = {n: t * factor if part in n and t.ndim == 2 else t for n, t in model.tensors.items()}
    return replace(model, tensors=tensors)


def asked(decoder: object, model: LoadedModel, task: TaskSpec) -> TaskScores:
    return harness.evaluate(decoder, model.tokenizer, task, model.arch.eos_ids, QUIET)  # type: ignore[arg-type]


def paired(original: TaskScores, other: TaskScores, chosen: list[int]) -> TaskResult:
    arms = [TaskScores(arm.metric, [arm.samples[i] for i in chosen], arm.condition) for arm in (original, other)]
    return compare(TASK, "qspec", *arms)


def test_a_damaged_layer_is_caught_by_last_words(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a task that a trained model of 260,000 weights does not answer, and a wrong scale that passes it."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    source = data_dir / "models/stories260K"
    model = load(convert(source / "stories260K.bin", source / "tok512.bin", tmp_path / "stories"))
    original = asked(open_decoder(model), model, TASK)
    right = round(sum(sample.score for sample in original.samples))
    assert wilson_interval(right, 150)[0] > 0.1
    broken = asked(open_decoder(scaled(model, 2, 1.3)), model, TASK)
    assert task_loss(paired(original, broken, list(range(150)))) != ""
    sound = asked(open_decoder(quantize(model, None, build_plan(QuantSpec(scheme="W8A8")))), model, TASK)
    assert task_loss(paired(original, sound, list(range(150)))) == ""


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return models.load(Recipe.read(ROOT / "recipes/smollm2-135m-int8-cpu.yaml").target)


@pytest.mark.skipif(not LONG, reason="asks SmolLM2 1,350 items: set QSPEC_LONG=1")
@pytest.mark.parametrize("name", ["last_words", "next_sentence"])
def test_smollm2_damaged_is_caught_and_sound_is_not_accused(
    name: str, data_dir: Path, smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """Would catch a task at chance, one that a wrong scale of one layer of thirty passes, and one that accuses INT8: of
    20 samples of 150 of the items none may."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    task = TaskSpec(name=name, num_fewshot=0, limit=300)
    original = asked(open_decoder(smollm2, max_length=512), smollm2, task)
    right = round(sum(sample.score for sample in original.samples))
    assert wilson_interval(right, 300)[0] > float(str(original.condition["chance"]))
    broken = asked(open_decoder(scaled(smollm2, 15, 1.3), max_length=512), smollm2, task)
    plan = build_plan(QuantSpec(scheme="W8A8", group_size=64))
    sound = asked(open_decoder(quantize(smollm2, None, plan), max_length=512), smollm2, task)
    assert task_loss(paired(original, broken, list(range(150)))) != ""
    samples = [sorted(random.Random(seed).sample(range(300), 150)) for seed in range(20)]
    assert [task_loss(paired(original, sound, chosen)) for chosen in samples] == [""] * 20
