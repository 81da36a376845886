"""llm-compressor on a tiny model, read back and run."""

from pathlib import Path

import pytest
import torch

from qspec.bridges import compressed, oneshot
from qspec.errors import RecipeError
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel
from qspec.schema.quantization import ClipSpec, KVSpec, QuantSpec, RuleSpec
from qspec.schemes.build import build_plan
from tests.observed import ROWS, load
from tests.served import distance, logits, transformers_model
from tests.tiny import tiny_model


def spec(scheme: str, method: str, **fields: object) -> QuantSpec:
    return QuantSpec.model_validate({"engine": "llmcompressor", "scheme": scheme, "method": method, **fields})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load(source)


def loss(source: Path, model: LoadedModel, chosen: QuantSpec, workdir: Path) -> float:
    """Distance of the logits to the original's once the method's result is written and served."""
    made = oneshot.quantize(model, chosen, build_plan(chosen), ROWS, workdir)
    assert list(workdir.iterdir()) == []  # no copy of the model is left behind
    compressed.write(made, workdir / "made", torch.float32)
    return distance(logits(transformers_model(workdir / "made")), logits(transformers_model(source)))


@pytest.mark.parametrize("method", ["gptq", "awq", "autoround"])
def test_4_bit_methods_beat_rounding(
    source: Path, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Would catch a method that ran on no data, on the wrong layers, or whose result was read back wrong."""
    monkeypatch.setattr(oneshot, "AUTOROUND_STEPS", 20)
    rounded = quantize(model, None, build_plan(spec("W4A16", "rtn", group_size=32)))
    compressed.write(rounded, tmp_path / "rtn", torch.float32)
    nearest = distance(logits(transformers_model(tmp_path / "rtn")), logits(transformers_model(source)))
    (tmp_path / "work").mkdir()
    assert loss(source, model, spec("W4A16", method, group_size=32), tmp_path / "work") < nearest


@pytest.mark.parametrize(("method", "group"), [("rtn", None), ("rtn", 32), ("gptq", None), ("smoothquant+gptq", None)])
def test_8_bit_methods(source: Path, model: LoadedModel, tmp_path: Path, method: str, group: int | None) -> None:
    """Would catch a smoothed norm that is dropped when the result is read back, or int8 scales off by a factor."""
    chosen = spec("W8A8", method, group_size=group)
    assert loss(source, model, chosen, tmp_path) < 0.1  # rounding to nearest: about 0.04


def test_rules_clip_and_kv_reach_the_library(model: LoadedModel, tmp_path: Path) -> None:
    """Would catch rules, ignored layers or KV scales that the library never hears of."""
    rules = (RuleSpec(match="down_proj", scheme="FP8"), RuleSpec(match="o_proj", scheme="none"))
    chosen = spec("W8A8", "rtn", rules=rules, clip=ClipSpec(method="mse"), kv=KVSpec(granularity="head"))
    plan = build_plan(chosen)
    made = oneshot.quantize(model, chosen, plan, ROWS, tmp_path)
    assert made.plan == plan
    assert set(made.linears) == {layer for layer, s in plan.resolve(model.arch.linears()).items() if s is not None}
    down = made.linears["model.layers.0.mlp.down_proj"]
    assert down.weight.fmt.name == "fp8_e4m3"
    assert down.input_scale is not None
    assert made.linears["model.layers.0.mlp.up_proj"].weight.fmt.name == "int8"
    assert made.k_scale["model.layers.1.self_attn"].shape == (model.arch.n_kv_heads,)
    assert not torch.equal(made.k_scale["model.layers.1.self_attn"], torch.ones(model.arch.n_kv_heads))


@pytest.mark.parametrize(
    ("chosen", "rows", "message"),
    [
        (spec("W4A16", "gptq", group_size=48), ROWS, "group_size 48: does not divide the width 64"),
        (spec("W8A8", "gptq"), [], "needs calibration data"),
        (spec("FP8", "rtn"), [], "needs calibration data"),
        (spec("W8A8", "rtn", kv=KVSpec()), [], "needs calibration data"),
        (spec("W8A8", "rtn", clip=ClipSpec(method="percentile")), ROWS, "has no such observer"),
        (spec("W8A8", "autoround"), ROWS, "is for 4-bit weights"),
        (spec("W4A16", "autoround", group_size=32, ignore=()), ROWS, "lm_head: is outside the blocks"),
        (spec("W8A8", "rtn", kv=KVSpec(scales="cast")), ROWS, "always calibrates"),
    ],
)
def test_refused_before_compute(
    model: LoadedModel, tmp_path: Path, chosen: QuantSpec, rows: list[list[int]], message: str
) -> None:
    """Would catch what the library refuses late, or takes and turns into NaN."""
    with pytest.raises(RecipeError, match=message):
        oneshot.quantize(model, chosen, build_plan(chosen), rows, tmp_path / "work")
    assert not (tmp_path / "work").exists()
