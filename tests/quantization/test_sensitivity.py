"""Sensitivity of units of layers to the schemes they may get."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qspec.errors import RecipeError
from qspec.inspection.sensitivity import known
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.plan import QuantPlan, Rule
from qspec.quantization.rtn import quantize
from qspec.quantization.sensitivity import basis, sampled, sensitivity
from qspec.quantization.units import candidate_schemes
from qspec.records import LoadedModel
from qspec.schema.quantization import MixedSpec, QuantSpec, RuleSpec
from qspec.schema.scores import Scores
from tests.observed import ROWS, load
from tests.tiny import tiny_model

DOWN = "model.layers.1.mlp.down_proj"
SPEC = QuantSpec(group_size=32, mixed=MixedSpec(bits=6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("source")))


@pytest.fixture(scope="module")
def scores(model: LoadedModel) -> Scores:
    return sensitivity(model, ROWS, SPEC, width=2)


def by_layer(scores: Scores) -> dict[str, tuple[float, ...]]:
    return {layer: unit.errors for unit in scores.units for layer in unit.layers}


def test_units_are_what_servers_merge(scores: Scores) -> None:
    """Would catch q/k/v that are decided apart, an ignored head that is scored, and bytes without scales."""
    assert [len(unit.layers) for unit in scores.units] == [3, 1, 2, 1] * 2
    o_proj = scores.units[1]
    assert o_proj.weights == 64 * 64
    assert o_proj.bytes == (64 * 64 // 2 + 4 * 64 * 2, 64 * 64 + 4 * 64, 2 * 64 * 64)  # groups of 32; rows; bfloat16


def test_fewer_bits_hurt_more_and_float_not_at_all(scores: Scores) -> None:
    """Would catch candidates in another order than the recipe's, and rounding that is not applied."""
    for unit in scores.units:
        int4, int8, kept = unit.errors
        assert int4 > 3 * int8 > 0  # 16 times coarser weights, but INT8 rounds inputs too
        assert kept == 0


def test_error_is_the_relative_change_of_what_the_layer_hands_on(model: LoadedModel, scores: Scores) -> None:
    """Would catch errors of the unit's own output, and units that are quantized together."""
    scheme = candidate_schemes(SPEC)["W4A16"]
    down = quantize(model, None, QuantPlan(None, (Rule(DOWN, scheme),)))
    exact, rounded = Decoder.from_float(model), Decoder.from_quantized(down)
    size, change = [], []
    for row in sampled(ROWS, "output"):
        for decoder in (exact, rounded):
            decoder.truncate(0)
        x, y = (decoder.run_layers(decoder.embed(torch.tensor(row))) for decoder in (exact, rounded))
        size.append(x)
        change.append(y - x)
    squares = [torch.cat(x).square() for x in (change, size)]
    expected = sum(float((squares[0].sum(over) / squares[1].sum(over)).mean()) for over in (0, 1))
    # DOWN is in the last layer: its change is the model's. Other row lengths at once may round float32 otherwise.
    assert by_layer(scores)[DOWN][0] == pytest.approx(expected, rel=1e-4)


def test_kl_is_that_of_the_whole_model(model: LoadedModel) -> None:
    """Would catch a rest of the model that is skipped or run twice."""
    spec = QuantSpec(group_size=32, mixed=MixedSpec(bits=6, metric="kl"))
    layer = "model.layers.0.mlp.down_proj"
    found = by_layer(sensitivity(model, ROWS, spec, width=2))[layer]
    one = quantize(model, None, QuantPlan(None, (Rule(layer, candidate_schemes(spec)["W4A16"]),)))
    pairs = []
    for row in sampled(ROWS, "kl"):
        logits = [d.forward(torch.tensor(row)) for d in (Decoder.from_float(model), Decoder.from_quantized(one))]
        pairs.append(kl_divergence(*logits))
    assert found[0] == pytest.approx(float(torch.cat(pairs).mean()), rel=1e-3)  # float32, another order of sums
    assert found[2] == 0


def test_head_and_static_scales_can_be_scored(model: LoadedModel) -> None:
    """Would catch a head without its norm, and static schemes that lack ranges."""
    spec = QuantSpec(mixed=MixedSpec(bits=9, candidates=("FP8", "none")), ignore=("o_proj",))
    scores = sensitivity(model, ROWS, spec, width=2)
    assert scores.units[-1].layers == ("lm_head",)
    assert all(unit.errors[0] > 0 for unit in scores.units)


@pytest.mark.parametrize("kind", ["mixtral", "gemma2"])
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    """Would catch experts that are decided one by one, and a router that is scored."""
    model = load(tiny_model(kind, tmp_path))
    scores = sensitivity(model, ROWS[:1], SPEC, width=2)
    assert [len(unit.layers) for unit in scores.units] in ([3, 1, 12] * 2, [3, 1, 2, 1] * 2)
    # no order: one token that changes its expert can cost more than all rounding
    assert all(min(unit.errors[:2]) > 0 for unit in scores.units)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"mixed": {"bits": 2}}, "reach 5.000 to 16.000"),
        ({"mixed": {"bits": 6}, "group_size": 48}, "groups of 48"),
        ({"mixed": {"bits": 6}, "ignore": ["re:.*"]}, "rules and ignore name every linear layer"),
        ({"mixed": {"bits": 6}, "rules": [{"match": "q_proj", "scheme": "FP8"}]}, "merge these layers"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_measured(
    model: LoadedModel, fields: dict[str, object], part: str
) -> None:
    """Would catch a pass over the text whose plan nobody can have, and a division by no weights."""
    spec = QuantSpec.model_validate({"group_size": 32, **fields})
    with pytest.raises(RecipeError, match=part):
        sensitivity(model, [], spec, 2)


def test_a_head_of_its_own_is_scored(tmp_path: Path) -> None:
    """Would catch `qspec sensitivity` that refuses or forgets the head which `untie_head` frees."""
    from qspec.inspection.sensitivity import look
    from tests.jobs import NGRAM_DRAFT, job

    folder = tiny_model("qwen2", tmp_path / "model")
    quantization = {"group_size": 32, "untie_head": True, "ignore": [], "mixed": {"bits": 7}}
    recipe = job(tmp_path, folder, NGRAM_DRAFT, target={"model": str(folder), "quantization": quantization})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.dump(), encoding="utf-8")
    assert look(str(path)).scores.units[-1].layers == ("lm_head",)


def test_scores_of_another_basis_are_other_scores(model: LoadedModel) -> None:
    """Would catch a second pass for another budget, and stale scores that are believed."""
    own = basis(model, ROWS, SPEC, 2, 0)
    assert basis(model, ROWS, SPEC.model_copy(update={"mixed": MixedSpec(bits=5)}), 2, 0) == own
    renamed = replace(model, source={"sha256": "other"})
    ruled = SPEC.model_copy(update={"rules": (RuleSpec(match="down_proj", scheme="W8A8"),)})
    for stale in (
        (renamed, ROWS, SPEC, 2),
        (model, ROWS[2:], SPEC, 2),
        (model, ROWS, ruled, 2),
        (model, ROWS, SPEC, 4),
    ):
        assert basis(*stale, 0) != own


def test_a_file_of_scores_is_read_only_for_what_they_were_measured_on(scores: Scores, tmp_path: Path) -> None:
    """Would catch `qspec sensitivity --out` that believes damaged scores, or those of another model."""
    path = tmp_path / "sensitivity.json"
    assert known(path, scores.basis) is None
    path.write_text(scores.model_dump_json(), encoding="utf-8")
    assert known(path, scores.basis) == scores
    assert known(path, scores.basis.model_copy(update={"model": "other"})) is None
    path.write_text("{}", encoding="utf-8")
    assert known(path, scores.basis) is None
