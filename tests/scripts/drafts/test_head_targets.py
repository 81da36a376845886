"""What is said of heads that were trained on different targets."""

from argparse import Namespace
from pathlib import Path

import pytest

from qspec.schema.drafts import MlpDraft
from scripts.drafts import head_targets as bench

ROOT = Path(__file__).resolve().parents[3]


def test_the_difference_is_of_the_same_answers() -> None:
    """Catches a difference of means with the interval of unpaired answers, and heads multiplied as if independent."""
    quantized, original = [[0.5, 0.5], [0.9, 0.5]], [[0.4, 0.5], [0.8, 0.5]]
    told = list(bench.rows_of({"quantized": quantized, "original": original, "quantized, as shipped": quantized}))
    assert [row["trained_on"] for row in told[:2]] == ["quantized", "original"]
    assert told[0]["tokens_per_step"] == pytest.approx(1 + (0.5 + 0.25 + 0.9 + 0.45) / 2)
    assert told[0]["per_head"] == pytest.approx([0.7, 0.5])
    assert told[-1]["tokens_per_step"] == pytest.approx(0.15)
    assert told[-1]["ci"] == pytest.approx([0.15, 0.15], abs=1e-4)


def test_both_learn_from_as_many_states() -> None:
    """Catches a budget in minutes, which a slower target would fill with fewer states."""
    options = Namespace(steps=1000, answers=384)
    for changes in bench.TARGETS.values():
        recipe = bench.read_recipe(options, changes)
        assert isinstance(recipe.draft, MlpDraft)
        assert recipe.draft.training is not None
        assert (recipe.draft.training.positions, recipe.draft.training.minutes) == (256_000, None)
    assert recipe.target.quantization.scheme == "none"
