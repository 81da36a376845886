"""A whole search on a tiny model; times are what varies, so answers are compared on kept pieces."""

import json
from pathlib import Path
from typing import Any

import pytest

from qspec import tune_pair
from qspec.errors import RecipeError
from qspec.schema.recipe import Recipe
from qspec.stages.tune_predict import DraftPiece, Model, TargetPiece, pick
from qspec.stages.tune_space import space_of
from tests.jobs import job
from tests.tiny import tiny_model

TUNE: dict[str, Any] = {
    "targets": {"W8A8": {"scheme": "W8A8"}},
    "target_kv": {"float": None},
    "draft_schemes": {"W4A16": {"scheme": "W4A16", "group_size": 32}},
    "draft_heads": ["float"],
    "lengths": [1, 3],
    "batches": [1, 2],
    "tokens": 12,
    "context": 16,
    "repeats": 3,
    "confirm": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tune") / "model")


def tuned(folder: Path, model: Path, **sections: Any) -> Recipe:
    return job(folder, model, tune=TUNE | sections.pop("tune", {}), **sections)


def test_a_killed_search_goes_on_to_the_same_answer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that are measured again after a kill would give another choice, and hours twice."""
    recipe, out = tuned(tmp_path, model), tmp_path / "out"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tune_pair.Study, "confirm", killed)
        with pytest.raises(KeyboardInterrupt):
            tune_pair.tune(recipe, out)
    with monkeypatch.context() as patch:
        patch.setattr(tune_pair, "pass_times", killed)
        patch.setattr(tune_pair, "laws", killed)
        first = tune_pair.tune(recipe, out)
        again = tune_pair.tune(recipe, out)
    assert first.why == again.why
    kept = json.loads((out / "tune.json").read_text())
    assert len(kept["confirmed"]) == 2
    assert Recipe.read(out / "recipe.yaml").tune is None
    assert (out / "tune.html").exists()


def test_what_cannot_run_is_pruned_with_its_reason(tmp_path: Path, model: Path) -> None:
    """A combination that the device refuses, measured for an hour and then not served."""
    kv = {"float": None, "int8": {"format": "int8", "granularity": "token_head"}}
    schemes = {"W4A8": {"scheme": "W4A8", "group_size": 32}, "W8A8": {"scheme": "W8A8"}}
    recipe = tuned(tmp_path, model, tune={"targets": schemes, "target_kv": kv}, device="h100")
    space = space_of(recipe)
    assert all("W4A8" not in name for name in space.targets)
    assert any("W4A8" in name and "INT4" in reason for name, reason in space.pruned)
    with pytest.raises(RecipeError, match="h100"):
        tune_pair.tune(recipe, tmp_path / "out")


def toy(agrees: list[bool]) -> Model:
    """Given times: a target pass of r rows takes 10 + r, a draft's 2."""
    law = {"top": [[1] * len(agrees)], "laws": []}
    says = {"top": [[int(a) for a in agrees]], "laws": []}
    verify = {1: {r: (10.0 + r, 0.0) for r in range(1, 6)}, 8: {r: (80.0 * r, 0.0) for r in range(1, 6)}}
    drafts = {"d": DraftPiece({1: {1: (2.0, 0.0)}, 8: {1: (16.0, 0.0)}}, says)}
    return Model({"t": TargetPiece(verify, 0.1, 1.0, 1.0, law)}, drafts)


def test_prediction_is_brute_force_where_times_are_given() -> None:
    """Steps that are charged to the wrong number of tokens."""
    agrees = [True, True, False, True, True, True, True, False, True]
    at, seconds = 1, 0.0
    while at < len(agrees):
        seconds += 2 * 2.0 + 13.0
        stand = 0
        while stand < 2 and at + stand < len(agrees) and agrees[at + stand]:
            stand += 1
        at += stand + 1
    found = toy(agrees)
    assert found.seconds("t", "d", 2) == pytest.approx(seconds / 8)
    assert found.seconds("t", "d", 0) == 11.0
    assert found.schedule("t", "d", [1, 2, 4], [1, 8])[8] == 0


def test_budgets_exclude_and_the_nearest_is_named(tmp_path: Path, model: Path) -> None:
    """A fast choice over the KL budget, or an empty answer where no choice fits."""
    found = toy([True] * 9)
    every = [found.predict("t", "d", g, 1e6) for g in (0, 2, 4)]
    recipe = tuned(tmp_path, model)
    tight = recipe.budget.model_copy(update={"max_kl": 0.01})
    assert pick(every, recipe.budget)[1]
    chosen, fits = pick(every, tight)
    assert not fits
    assert chosen.seconds == min(p.seconds for p in every)
