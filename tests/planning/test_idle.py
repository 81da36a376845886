"""Fields that are set and change nothing: each is told, and no field that does something is."""

import json
from pathlib import Path
from typing import Any

import pytest

from qspec.planning.idle import idle_findings
from qspec.planning.planned import resolve
from qspec.schema.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
STATIC_FP8: dict[str, Any] = {"format": "fp8_e4m3"}
PER_TOKEN = {"format": "int8", "granularity": "token_head"}
CHANNEL = {"format": "int4", "granularity": "channel"}
OWN_TEXT = {"samples": 4}


def told(folder: Path, spec: dict[str, Any], tied: bool = False, **sections: Any) -> list[str]:
    """Fields that are called idle, in a recipe of one half."""
    (folder / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": tied}), encoding="utf-8")
    fields = {"name": "t", "target": {"model": str(folder), "quantization": spec}, "draft": {"kind": "ngram"}}
    found = list(idle_findings(resolve(Recipe.model_validate(fields | sections))))
    assert all(finding.level == "warning" and finding.rule and finding.fix for finding in found)
    return [finding.value.removeprefix("target.quantization.") for finding in found]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"scheme": "W4A16", "group_size": 32, "mixed": {"bits": 9}}, "scheme W4A16"),
        ({"scheme": "FP8_DYNAMIC", "group_size": 32}, "group_size 32"),
        ({"rules": [{"match": "o_proj", "scheme": "none", "group_size": 32}]}, "rules: group_size 32 of o_proj"),
        ({"clip": {"method": "mse", "percentile": 99}}, "clip.percentile 99"),
        ({"scheme": "none", "method": "gptq"}, "method gptq"),
        ({"scheme": "none", "smoothing": {}}, "smoothing"),
        ({"scheme": "none", "clip": {"method": "mse"}}, "clip.method mse"),
        ({"scheme": "none", "random_rows": 2}, "random_rows 2"),
        ({"untie_head": True}, "untie_head"),
        ({"kv": PER_TOKEN | {"scales": "cast"}}, "kv.scales cast"),
        ({"kv": {"key": PER_TOKEN | {"group": 64}}}, "kv.key.group 64"),
        (
            {"kv": PER_TOKEN | {"key": CHANNEL, "value": {**STATIC_FP8, "granularity": "token_head"}, "residual": 64}},
            "kv.format and granularity",
        ),
    ],
)
def test_what_a_half_says_in_vain_is_told(tmp_path: Path, spec: dict[str, Any], field: str) -> None:
    """Would catch a setting that a recipe asks for, that plan and run accept, and that nothing reads."""
    assert told(tmp_path, spec) == [field]


@pytest.mark.parametrize(
    ("spec", "sections", "field"),
    [
        ({}, {"calibration": OWN_TEXT}, "calibration"),
        (
            {"kv": STATIC_FP8},
            {"calibration": {"data": [{"name": "code", "weight": 2}]}},
            "calibration.data[0].weight 2",
        ),
        ({}, {"fusion": {"share_scales": False}}, "fusion.share_scales false"),
        ({"rotation": {}}, {"fusion": {"fold_norms": True}}, "fusion.fold_norms"),
        (
            {"engine": "llmcompressor", "method": "gptq"},
            {"fusion": {"fold_norms": True}},
            "fusion.fold_norms",
        ),
        (
            {},
            {"speculation": {"draft_length": {"policy": "fixed", "max_k": 8}}},
            "speculation.draft_length.max_k 8",
        ),
        ({}, {"evaluation": {"fidelity": None}, "budget": {"max_kl": 0.1}}, "budget.max_kl"),
        ({}, {"evaluation": {"tasks": []}, "budget": {"min_recovery": 0.9}}, "budget.min_recovery"),
    ],
)
def test_what_a_recipe_says_in_vain_is_told(
    tmp_path: Path, spec: dict[str, Any], sections: dict[str, Any], field: str
) -> None:
    """Would catch calibration text that nothing reads, a scale that nothing shares, a budget that nothing measures."""
    assert told(tmp_path, spec, **sections) == [field]


def test_a_head_is_untied_for_a_reason(tmp_path: Path) -> None:
    """Would catch a head that is stored twice in float without a word, or a warning where it is quantized."""
    assert told(tmp_path, {"untie_head": True}, tied=True) == ["untie_head"]
    assert told(tmp_path, {"untie_head": True, "rotation": {}}, tied=True) == ["untie_head"]
    assert told(tmp_path, {"untie_head": True, "ignore": []}, tied=True) == []


@pytest.mark.parametrize(
    ("spec", "sections"),
    [
        ({"scheme": "W4A16", "group_size": 32, "method": "gptq"}, {"calibration": OWN_TEXT}),
        ({"group_size": 32, "mixed": {"bits": 9}}, {"calibration": OWN_TEXT}),
        ({"smoothing": {}, "clip": {"method": "percentile", "percentile": 99}}, {}),
        ({"scheme": "FP8"}, {"fusion": {"share_scales": False, "fold_norms": True}}),
        ({"scheme": "none", "kv": STATIC_FP8 | {"scales": "cast"}}, {}),
        ({"kv": STATIC_FP8 | {"key": CHANNEL | {"group": 64}, "residual": 64}}, {}),
        ({}, {"speculation": {"draft_length": {"policy": "heuristic", "max_k": 8}}, "budget": {"max_kl": 0.1}}),
    ],
)
def test_what_does_something_is_not_told(tmp_path: Path, spec: dict[str, Any], sections: dict[str, Any]) -> None:
    """Would catch a warning that sends people to remove what they need."""
    assert told(tmp_path, spec, **sections) == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*h100.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_say_nothing_in_vain(path: Path) -> None:
    """Would catch an example whose lines people copy and that do nothing."""
    assert list(idle_findings(resolve(Recipe.read(path)))) == []
