"""A whole search on a tiny model; times are what varies, so answers are compared on kept pieces."""

from dataclasses import replace
from itertools import product
import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec.errors import OutputError, RecipeError
from qspec.measure.arm import Run
from qspec.numerics.speculation.lowering import path
from qspec.planning.preview import preview
from qspec.planning.preview_text import render
from qspec.planning.tune_space import space_of
from qspec.report.document import Finding, Table
from qspec.schema.recipe import Recipe
from qspec.schema.tuning import LayersSpec
from qspec.speculation.types import Generation, Sampling
from qspec.tune import measure as tune_measure, search as tune_pair
from qspec.tune.answer import Predictions, pick
from qspec.tune.layers import Lowering, ladders
from qspec.tune.page import Confirmed, SearchResult, as_data, confirmed, document
from qspec.tune.pieces import bookkeeping
from qspec.tune.predict import DraftPiece, Rounds, SeparableModel, TargetPiece
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
        patch.setattr(tune_measure, "pass_times", killed)
        patch.setattr(tune_measure, "distributions", killed)
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
    text = render(preview(recipe))
    assert f"{space.combinations} combinations" in text
    assert all(line in text for line in ("target schemes       2", "draft lengths        2", "W4A8/float, W4A8/int8: "))
    with pytest.raises(RecipeError, match="h100"):
        tune_pair.tune(recipe, tmp_path / "out")


def toy(agrees: list[bool]) -> SeparableModel:
    """Given times: a target pass of r rows takes 10 + r, a draft's 2 (3 of two rows), its prompt 50.

    A round of d drafts costs 0.1 + d / 10, and the draft 0.2 d beside.
    """
    law = {"top": [[1] * len(agrees)], "probs": []}
    says = {"top": [[int(a) for a in agrees]], "probs": []}
    verify = {1: {r: (10.0 + r, 0.0) for r in range(1, 6)}, 8: {r: (80.0 * r, 0.0) for r in range(1, 6)}}
    passes = {1: {1: (2.0, 0.0), 2: (3.0, 0.0)}, 8: {1: (16.0, 0.0), 2: (24.0, 0.0)}}
    rounds = Rounds({d: 0.1 + d / 10 for d in range(7)}, {d: 0.2 * d for d in range(7)})
    return SeparableModel(
        {"t": TargetPiece(verify, 0.1, None, 1.0, 1.0, law)}, {"d": DraftPiece(passes, says, [50.0])}, rounds
    )


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_prediction_is_brute_force_where_times_are_given(gamma: int) -> None:
    """Steps charged to the wrong number of tokens; a draft that reads no prompt, and nothing twice; free rounds."""
    agrees = [True, True, False, True, True, True, True, False, True]
    at, read, seconds = 1, 0, 0.0
    while at < len(agrees):
        drafted = min(gamma, len(agrees) - 1 - at)
        stand = next((i for i in range(drafted) if not agrees[at + i]), drafted)
        seconds += 10.0 + drafted + 1 + 0.1 + drafted / 10 + 0.2 * drafted
        if drafted:
            seconds += (50.0 if not read else 1.0 + at - read) + 2.0 * (drafted - 1)
        read = at + min(stand, drafted - 1)
        at += stand + 1
    found = toy(agrees)
    assert found.seconds("t", "d", gamma) == pytest.approx(seconds / 8)
    assert found.seconds("t", "d", 0) == pytest.approx(11.1)
    assert found.schedule("t", "d", [1, 2, 4], [1, 8])[8] == 0


@pytest.mark.parametrize(("sampling", "greedy"), [(Sampling(), False), (Sampling(), True), (Sampling(0.8), False)])
def test_bookkeeping_grows_with_drafts_and_knows_no_model(sampling: Sampling, greedy: bool) -> None:
    """A piece that holds seconds of a pass, or none for a draft that chooses its tokens."""
    found = bookkeeping(64, (1, 3), 16, sampling, 5, greedy)
    assert set(found["engine"]) == {"0", "1", "3"}
    assert found["draft"]["0"] < found["draft"]["3"]
    assert all(seconds > 0 for seconds in found["engine"].values())


def test_intervals_hold_the_error_of_the_model(tmp_path: Path, model: Path) -> None:
    """A page whose intervals miss what it measured itself; the error of one widens the others, not its own."""
    found, recipe = toy([True] * 9), tuned(tmp_path, model)
    every = tuple(found.predict("t", "d", g, 1e6) for g in (0, 1, 2, 4))
    right = [Confirmed(p, 1 / p.seconds) for p in every]
    exact = SearchResult(Predictions(every, recipe.budget, {1: 0}), tuple(right), ())
    assert exact.coverage == 1.0
    assert exact.interval(every[0]) == pytest.approx((1 / every[0].seconds, 1 / every[0].seconds))
    off = SearchResult(exact.answer, (Confirmed(every[0], 1.2 / every[0].seconds), *right[1:]), ())
    assert off.interval(every[0]) == exact.interval(every[0])
    assert off.interval(every[1])[1] > 1.1 / every[1].seconds
    assert off.coverage == 0.75
    assert as_data(off)["error"]["coverage"] == 0.75


def run(prompt: int, seconds: float) -> Run:
    return Run("a", 0.0, 0, prompt, Generation([1] * 11, [], seconds=seconds))


def test_a_prediction_that_misses_is_a_warning(tmp_path: Path, model: Path) -> None:
    """A green PASS over a prediction that is 56 % off, and an answer on the terminal that does not say so."""
    found, recipe = toy([True] * 9), tuned(tmp_path, model)
    every = tuple(found.predict("t", "d", g, 1e6) for g in (1, 2, 4))
    answer = Predictions(every, recipe.budget, {1: 0})

    def outcome(*factors: float) -> SearchResult:
        pairs = zip(every, factors, strict=True)
        return SearchResult(answer, tuple(Confirmed(p, factor / p.seconds) for p, factor in pairs), ())

    sound, wrong = outcome(1.0, 1.2, 0.85), outcome(1.0, 0.64, 2.0)
    assert (sound.warning, document(sound, "x").blocks[0].tone) == ("", "good")
    assert "Warning" not in sound.why
    page = document(wrong, "x")
    assert [(block.tone, block.word) for block in page.blocks if isinstance(block, Finding)] == [
        ("open", ""),
        ("open", "off"),
    ]
    assert wrong.why.endswith(
        "Warning: 2 of 3 predictions miss by more than the tolerance of 25 %, so those of combinations that were not "
        "run may be as far off."
    )
    (table,) = [block for block in page.blocks if isinstance(block, Table) and block.columns[-1] == "within 25 %"]
    assert [row[-1] for row in table.rows] == ["yes", "no", "no"]
    assert as_data(wrong)["error"]["beyond_tolerance"] == 2


def test_the_choice_is_reported_on_prompts_that_did_not_make_it(tmp_path: Path, model: Path) -> None:
    """The luckiest of many combinations, at the speed that its luck made."""
    found, recipe = toy([True] * 9), tuned(tmp_path, model)
    lucky, steady = (found.predict("t", "d", g, 1e6) for g in (1, 2))
    runs = {
        lucky: [run(prompt, 1.0 if prompt % 2 == 0 else 5.0) for prompt in range(6)],
        steady: [run(prompt, 2.0) for prompt in range(6)],
    }
    outcome = SearchResult(
        Predictions((lucky, steady), recipe.budget, {1: 0}), tuple(confirmed(p, mine) for p, mine in runs.items()), ()
    )
    assert outcome.chosen.prediction == lucky
    assert "2.0 tokens/s measured on prompts that did not choose it" in outcome.why  # 10 on those that did
    kept = as_data(outcome)["chosen"]
    assert (kept["chosen_by_tok_s"], kept["reported_tok_s"]) == (pytest.approx(10.0), pytest.approx(2.0))
    assert confirmed(lucky, [run(3, 2.0)]).reported == (pytest.approx(5.0), None)


def test_an_interval_without_bounds_is_unknown(tmp_path: Path, model: Path) -> None:
    """A speed "0.00176 to 2,577,683" of a machine that stood still in one pass."""
    found, recipe = toy([True] * 9), tuned(tmp_path, model)
    wild = replace(found.predict("t", "d", 1, 1e6), ci=(1e-3, 1e3))
    outcome = SearchResult(
        Predictions((wild,), recipe.budget, {1: 0}), (Confirmed(wild, 1 / wild.seconds, (0.1, inf)),), ()
    )
    assert "the times spread too far" in outcome.why
    tables = [block for block in document(outcome, "x").blocks if isinstance(block, Table)]
    assert [row.count("unknown") for table in tables for row in table.rows] == [2, 1]


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


def test_gibberish_is_no_winner_without_a_budget(tmp_path: Path, model: Path) -> None:
    """A fast pair that writes nonsense, which `qspec run` then calls not ready."""
    found = toy([True] * 9)
    sound, broken = found.predict("t", "d", 2, 1e6), found.predict("t", "d", 4, 1e6)
    broken = replace(broken, kl=22.0, seconds=sound.seconds / 2)
    budget = tuned(tmp_path, model).budget.model_copy(update={"max_kl": None})
    assert pick([sound, broken], budget) == (sound, True)
    assert pick([broken], budget) == (broken, False)


SCHEMES = {"W8A8": {"scheme": "W8A8"}, "W4A16": {"scheme": "W4A16", "group_size": 32}}


@pytest.fixture
def lowering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lowering:
    """The search for a self draft of three layers, with given times: INT4 layers are faster, and so are lower heads."""
    three = tiny_model("llama", tmp_path / "model", num_hidden_layers=3)
    layers = {"floor": 0.0, "patience": 99}
    tune = {"draft_schemes": SCHEMES, "draft_heads": ["float", "W8A8", "W8A8/90"], "layers": layers}
    study = tune_pair.Study(tuned(tmp_path, three, tune=tune), tmp_path / "out")

    def given(lms: dict[str, Any], rows: list[int], batches: list[int], *_: Any) -> Any:
        def seconds(name: str) -> float:
            return 1.0 - 0.3 * ("W4A16" in name) - 0.2 * ("head W8A8" in name) - 0.1 * ("/90" in name)

        return {n: {str(b): {str(r): [seconds(n) * (1 + r / 9)] * 3 for r in rows} for b in batches} for n in lms}

    monkeypatch.setattr(tune_measure, "pass_times", given)
    model = study.pieces.model()
    (ladder,) = ladders(study.space)
    return Lowering(study.pieces, model, ladder, next(iter(study.space.targets)))


def test_a_float_head_is_the_finest_beside_a_tied_embedding(tmp_path: Path) -> None:
    """Forms ordered by memory: an INT8 head beside the embedding takes more than one shared with it, and is coarser."""
    tied = tiny_model("llama", tmp_path / "model", tie_word_embeddings=True)
    tune = {"draft_schemes": SCHEMES, "draft_heads": ["float", "W8A8"], "layers": {"floor": 0.0, "patience": 9}}
    study = tune_pair.Study(tuned(tmp_path, tied, tune=tune), tmp_path / "out")
    (ladder,) = ladders(study.space)
    assert [form.head for form in ladder.heads] == ["float", "W8A8"]


def test_layers_are_lowered_as_brute_force_would(lowering: Lowering) -> None:
    """Losses booked to the wrong layer, or codes taken from another one's form: all states of 3 layers and a head.

    Or a head of fewer ids that is no level of the search.
    """
    every = list(product(range(2), range(2), range(2), range(3)))
    counts = (2, 2, 2, 3)
    said = {levels: lowering._measured(levels) for levels in every}
    found = lowering.search(LayersSpec(floor=0.0, patience=99))
    assert [stop.levels for stop in found.stops] == path(
        [
            [said[0, 0, 0, 0][0] - said[tuple(at * (i == u) for i in range(4))][0] for at in range(counts[u])]
            for u in range(4)
        ],
        [[0.0, -0.1]] * 3 + [[0.0, -0.2, -0.3]],
    )
    assert all((stop.acceptance, stop.value) == said[stop.levels] for stop in found.stops)
    assert found.chosen.value == max(said[stop.levels][1] for stop in found.stops)
    assert found.chosen.value >= max(said[levels][1] for levels in [(0,) * 4, (1, 1, 1, 2)])
    assert found.stops[-1].levels[-1] == 2
    assert found.draft.draft_vocab == 90 * (found.chosen.levels[-1] == 2)
    assert found.sizes == tuple(sorted(found.sizes, reverse=True))


@pytest.mark.parametrize("levels", [(0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 1, 2)])
def test_a_mix_is_what_its_rules_make(lowering: Lowering, levels: tuple[int, ...]) -> None:
    """A searched draft that the chosen recipe does not reproduce: codes and answers must be those of its rules."""
    halves = lowering._halves
    mixed = lowering.mixed(levels)
    made = halves.made(halves.target, lowering.spec(levels), "rules", 90 * (levels[-1] == 2))
    assert set(mixed.linears) == set(made.linears)
    for name, linear in made.linears.items():
        assert torch.equal(mixed.linears[name].weight.codes, linear.weight.codes)
    tokens = torch.arange(9)
    assert torch.equal(halves.opened(mixed).forward(tokens), halves.opened(made).forward(tokens))


def test_a_search_by_layers_ends_in_rules_of_the_recipe(tmp_path: Path, model: Path) -> None:
    """A lowered draft that is not confirmed, or is lost when a killed search goes on."""
    tune = {"draft_schemes": SCHEMES, "layers": {"floor": 0.0, "patience": 99}}
    recipe, out = tuned(tmp_path, model, tune=tune), tmp_path / "out"
    first = tune_pair.tune(recipe, out)
    (lowered,) = first.lowered
    assert any(c.prediction.draft == lowered.ladder.name for c in first.confirmed)
    kept = json.loads((out / "tune.json").read_text())["layers"][0]
    assert len(kept["curve"]) == len(lowered.stops)
    assert lowered.ladder.name in (out / "tune.html").read_text()
    assert tune_pair.tune(recipe, out).why == first.why


def test_a_folder_of_a_run_is_left_alone(tmp_path: Path, model: Path) -> None:
    """A search in `runs/<name>`, where a run of that name lies: its recipe.yaml replaced, so that it cannot go on."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.log").touch()
    with pytest.raises(OutputError, match="holds a run, whose recipe"):
        tune_pair.tune(tuned(tmp_path, model), out)
