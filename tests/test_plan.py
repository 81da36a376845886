"""Rules: first match wins, and a rule that decides nothing is an error."""

from hypothesis import given, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.plan import QuantPlan, Rule
from qspec.scheme_table import SCHEMES

INT8, FP8 = SCHEMES["W8A8"].layer(), SCHEMES["FP8"].layer()
LAYERS = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn.q_proj", "mlp.down_proj")] + ["lm_head"]


@pytest.mark.parametrize(
    ("match", "layer", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("down_proj", "model.layers.0.mlp.down_proj", True),
        ("proj", "model.layers.0.mlp.down_proj", False),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj", False),
        ("model.layers.1.mlp.down_proj", "model.layers.11.mlp.down_proj", False),
        (r"re:.*layers\.1\..*", "model.layers.1.mlp.down_proj", True),
        (r"re:.*layers\.1\..*", "model.layers.11.mlp.down_proj", False),
        ("re:mlp", "model.layers.0.mlp.down_proj", False),
    ],
)
def test_matching(match: str, layer: str, matches: bool):
    """Would catch substring matches, and patterns that are searched for anywhere instead of from the start."""
    assert Rule(match, None).matches(layer) is matches


def test_first_match_wins():
    """Would catch the last rule winning, or the default overriding a rule."""
    plan = QuantPlan(INT8, (Rule("lm_head", None), Rule("re:.*layers.0.*", FP8), Rule("down_proj", None)))
    resolved = plan.resolve(LAYERS)
    assert resolved["lm_head"] is None
    assert resolved["model.layers.0.mlp.down_proj"] is FP8
    assert resolved["model.layers.1.mlp.down_proj"] is None
    assert resolved["model.layers.1.self_attn.q_proj"] is INT8


def test_unmatched_and_shadowed_rules_are_refused():
    """Would catch a typo, or a rule behind a wider one, that silently leaves a layer under another scheme."""
    with pytest.raises(RecipeError, match="matches no linear layer"):
        QuantPlan(INT8, (Rule("down_porj", None),)).resolve(LAYERS)
    with pytest.raises(RecipeError, match="'lm_head' comes first"):
        QuantPlan(INT8, (Rule("lm_head", None), Rule("re:lm_.*", FP8))).resolve(LAYERS)


def test_two_rules_that_agree_may_overlap():
    """Would catch a refusal of harmless redundancy (`ignore: [lm_head, re:.*head]`)."""
    assert QuantPlan(INT8, (Rule("lm_head", None), Rule("re:.*head", None))).resolve(LAYERS)["lm_head"] is None


@given(st.lists(st.sampled_from([*LAYERS, "down_proj", "q_proj"]), unique=True))
def test_every_layer_is_resolved_once_in_order(matches: list[str]):
    """Would catch a layer lost or reordered by some order of rules; shadowed rules may refuse instead."""
    plan = QuantPlan(INT8, tuple(Rule(match, None) for match in matches))
    assert list(plan.resolve(LAYERS)) == LAYERS
