"""Rounding a model under its plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qspec.errors import RecipeError, SourceError
from qspec.numerics.formats import FP8_E4M3, SCALE_FLOOR
from qspec.records import LayerStats, LoadedModel
from qspec.schema.recipe import ClipSpec, KVSpec, QuantSpec, RuleSpec
from qspec.stages.build_plan import build_plan
from qspec.stages.quantize import quantize
from tests.observed import load, observe
from tests.tiny import tiny_model

Q, K, V = (f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj"))
GATE, UP, DOWN = (f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
ATTN = "model.layers.0.self_attn"
STATIC = build_plan(QuantSpec(scheme="FP8", kv=KVSpec()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def stats(folder: Path) -> LayerStats:
    return observe(folder)


def test_merged_layers_share_scales_before_rounding(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch codes that were rounded under a member's own scale and are then read under the shared one."""
    quant = quantize(model, stats, STATIC)
    for group in ((Q, K, V), (GATE, UP)):
        members = [quant.linears[layer] for layer in group]
        assert len({float(m.weight.scale) for m in members}) == 1
        assert len({float(m.input_scale) for m in members if m.input_scale is not None}) == 1
        largest = max(float(model.tensors[f"{layer}.weight"].abs().max()) for layer in group)
        assert float(members[0].weight.scale) == pytest.approx(largest / FP8_E4M3.qmax)
        for layer, member in zip(group, members, strict=True):
            error = (member.weight.dequantize() - model.tensors[f"{layer}.weight"]).abs().max()
            assert error <= largest / 16  # E4M3 has three bits after the leading one: half a step is 1/16
    assert float(quant.linears[DOWN].weight.scale) != float(quant.linears[UP].weight.scale)


def test_scales_are_apart_when_asked(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch `share_scales: false` that is ignored."""
    quant = quantize(model, stats, STATIC, share_scales=False)
    assert len({float(quant.linears[layer].weight.scale) for layer in (Q, K, V)}) == 3


def test_input_scale_is_the_calibrated_range(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a scale from a sample of the inputs, or from another layer."""
    quant = quantize(model, stats, STATIC)
    scale = quant.linears[DOWN].input_scale
    assert scale is not None
    assert float(scale) == pytest.approx(float(stats.amax_K[DOWN].max()) / 448)


def test_kv_scales(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch K and V mixed up, heads that share a scale, and `cast` that calibrates."""
    per_head = quantize(model, stats, build_plan(QuantSpec(scheme="none", ignore=(), kv=KVSpec(granularity="head"))))
    assert torch.allclose(per_head.k_scale[ATTN], stats.k_amax_H[ATTN] / 448)
    assert torch.allclose(per_head.v_scale[ATTN], stats.v_amax_H[ATTN] / 448)
    whole = quantize(model, stats, STATIC)
    assert torch.allclose(whole.k_scale[ATTN], stats.k_amax_H[ATTN].max().reshape(1) / 448)
    cast = quantize(model, None, build_plan(QuantSpec(scheme="none", ignore=(), kv=KVSpec(scales="cast"))))
    assert torch.equal(cast.v_scale[ATTN], torch.ones(1))
    dynamic = KVSpec(format="int8", granularity="token_head")
    assert quantize(model, None, build_plan(QuantSpec(kv=dynamic))).k_scale == {}


@pytest.mark.parametrize("spec", [QuantSpec(scheme="FP8"), QuantSpec(scheme="W8A8", kv=KVSpec())])
def test_static_scales_need_data(model: LoadedModel, spec: QuantSpec) -> None:
    """Would catch static scales that silently come from nowhere."""
    with pytest.raises(RecipeError, match="which need calibration data"):
        quantize(model, None, build_plan(spec))


@pytest.mark.parametrize("seen", ["zero", "absent"])
def test_a_layer_that_calibration_never_excited(model: LoadedModel, stats: LayerStats, seen: str) -> None:
    """Would catch a scale at the floor, or zero, that saturates everything the layer later reads."""
    amax = dict(stats.amax_K)
    if seen == "zero":
        amax[DOWN] = torch.zeros_like(amax[DOWN])
    else:
        del amax[DOWN]
    quant = quantize(model, replace(stats, amax_K=amax), STATIC)
    other = float(stats.amax_K["model.layers.1.mlp.down_proj"].max())
    scale = quant.linears[DOWN].input_scale
    assert scale is not None
    assert float(scale) == pytest.approx(other / 448)
    assert [note for note in quant.notes if DOWN in note and "largest of all down_proj" in note] != []


def test_a_silent_kv_head(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a floor scale for a head whose values were all zero in calibration."""
    silent = dict(stats.v_amax_H) | {ATTN: torch.tensor([0.0, 3.0])}
    plan = build_plan(QuantSpec(scheme="none", ignore=(), kv=KVSpec(granularity="head")))
    quant = quantize(model, replace(stats, v_amax_H=silent), plan)
    assert torch.allclose(quant.v_scale[ATTN], torch.tensor([3.0, 3.0]) / 448)
    assert any(ATTN in note and "value heads" in note for note in quant.notes)


def test_all_zero_rows_get_the_floor(model: LoadedModel) -> None:
    """Would catch a division by a zero scale, and codes other than zero for a dead row."""
    weight = model.tensors[f"{DOWN}.weight"].clone()
    weight[3] = 0
    quant = quantize(replace(model, tensors={**model.tensors, f"{DOWN}.weight": weight}), None, build_plan(QuantSpec()))
    linear = quant.linears[DOWN]
    assert float(linear.weight.scale[3]) == pytest.approx(SCALE_FLOOR)
    assert int(linear.weight.codes[3].abs().max()) == 0


def test_broken_weights_are_named(model: LoadedModel) -> None:
    """Would catch NaN that turns into the integer 0 without a word."""
    weight = model.tensors[f"{UP}.weight"].clone()
    weight[0, 0] = float("nan")
    broken = replace(model, tensors={**model.tensors, f"{UP}.weight": weight})
    with pytest.raises(SourceError, match=f"{UP}.weight: holds NaN"):
        quantize(broken, None, build_plan(QuantSpec()))


def test_rules_and_the_rest(model: LoadedModel) -> None:
    """Would catch a float layer that is lost, kept twice, or quantized against its rule."""
    rules = (RuleSpec(match="o_proj", scheme="none"), RuleSpec(match="down_proj", scheme="W4A16", group_size=32))
    quant = quantize(model, None, build_plan(QuantSpec(scheme="W8A8", rules=rules, clip=ClipSpec(method="mse"))))
    assert f"{ATTN}.o_proj.weight" in quant.tensors
    assert f"{ATTN}.q_proj.weight" not in quant.tensors
    assert quant.linears[DOWN].weight.fmt.name == "int4"
    assert quant.linears[DOWN].activation is None
    assert quant.linears[UP].weight.scale.shape == (model.arch.intermediate_size, 1)
    float_names = {name for name in model.tensors if name.removesuffix(".weight") not in quant.linears}
    assert quant.tensors.keys() == float_names


def test_biases_go_with_their_layer(tmp_path: Path) -> None:
    """Would catch a q/k/v bias (Qwen2) that is left behind among the float tensors."""
    model = load(tiny_model("qwen2", tmp_path))
    quant = quantize(model, None, build_plan(QuantSpec()))
    bias = quant.linears[Q].bias
    assert bias is not None
    assert torch.equal(bias, model.tensors[f"{Q}.bias"])
    assert f"{Q}.bias" not in quant.tensors
