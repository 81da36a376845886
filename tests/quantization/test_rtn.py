"""Rounding a model under its plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qspec.errors import RecipeError, SourceError
from qspec.numerics.quantization.blocks import PerTensor
from qspec.numerics.quantization.formats import FP8_E4M3, SCALE_FLOOR
from qspec.plan import TensorScheme
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize, unseen_experts, unseen_notes
from qspec.records import LayerStats, LoadedModel
from qspec.schema.quantization import ClipSpec, KVSpec, OutlierSpec, QuantSpec, RuleSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import build_plan
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


def test_outliers_that_float16_cannot_hold_are_refused(model: LoadedModel) -> None:
    """Would catch infinity in a checkpoint, which every answer then computes with."""
    weight = model.tensors[f"{UP}.weight"].clone()
    weight[0, 0] = 1e6
    large = replace(model, tensors={**model.tensors, f"{UP}.weight": weight})
    with pytest.raises(RecipeError, match=f"{UP}.weight: holds 1e\\+06.*float16"):
        quantize(large, None, build_plan(QuantSpec(outliers=OutlierSpec(share=1.0))))


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


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "W4A16"])
def test_outliers_stay_in_float_and_shrink_the_error(model: LoadedModel, stats: LayerStats, scheme: str) -> None:
    """Would catch outliers that are also rounded, or chosen without a look at the layer's inputs."""
    plain = QuantSpec(scheme=scheme, group_size=32)
    apart = plain.model_copy(update={"outliers": OutlierSpec(share=2.0)})
    without, quant, blind = (
        quantize(model, s, build_plan(p)) if s or scheme != "FP8" else None
        for s, p in ((stats, plain), (stats, apart), (None, apart))
    )
    errors = dict.fromkeys(("without", "quant", "blind"), 0.0)
    for name, found in (("without", without), ("quant", quant), ("blind", blind)):
        for layer, linear in found.linears.items() if found else ():
            delta_NK = linear.rounded_part(model.tensors[f"{layer}.weight"]) - linear.weight.dequantize()
            errors[name] += float((stats.inputs_TK[layer].float() @ delta_NK.T).square().sum())
    assert errors["quant"] < 0.95 * errors["without"]
    assert scheme == "FP8" or errors["quant"] < errors["blind"]
    assert quant is not None
    for linear in quant.linears.values():
        assert linear.outliers is not None
        assert linear.outliers.values.numel() == linear.weight.codes.numel() * 2 // 100
        assert (linear.weight.dequantize()[linear.outliers.dense() != 0] == 0).all()


def uneven_inputs(stats: LayerStats, layers: tuple[str, ...]) -> LayerStats:
    """Inputs whose channels lie three decades apart, as outlier channels do."""
    x_TK = stats.inputs_TK[layers[0]]
    x_TK = x_TK * 10 ** (3 * torch.rand(x_TK.shape[1], generator=torch.Generator().manual_seed(0)))
    return replace(stats, inputs_TK={**stats.inputs_TK, **dict.fromkeys(layers, x_TK)})


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "W8A8", "W4A16"])
def test_mse_serves_the_output_where_inputs_are_known(model: LoadedModel, stats: LayerStats, scheme: str) -> None:
    """Would catch statistics that do not reach the clip, or those of another layer."""
    plan = build_plan(QuantSpec(scheme=scheme, group_size=32, clip=ClipSpec(method="mse")))
    stats = uneven_inputs(stats, (GATE, UP))
    without = replace(stats, inputs_TK={})  # static scales still need their ranges
    error = {"weighted": 0.0, "plain": 0.0}
    for layer in (GATE, UP):
        for name, seen in (("weighted", stats), ("plain", without)):
            weight = quantize(model, seen, plan).linears[layer].weight.dequantize()
            difference = stats.inputs_TK[layer] @ (weight - model.tensors[f"{layer}.weight"]).T
            error[name] += float(difference.square().sum())
    assert error["weighted"] < error["plain"] or scheme == "FP8"
    assert error["weighted"] <= 1.01 * error["plain"]  # one scale for a whole float tensor leaves nearly no choice


def test_mse_without_statistics_is_as_it_was(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a data-free scheme that starts to depend on data, and inputs of zeros that stop the search."""
    plan = build_plan(QuantSpec(scheme="W4A16", group_size=32, clip=ClipSpec(method="mse")))
    silent = replace(stats, inputs_TK={name: torch.zeros_like(x) for name, x in stats.inputs_TK.items()})
    plain, zeros = (quantize(model, seen, plan).linears[DOWN].weight for seen in (None, silent))
    assert torch.equal(plain.codes, zeros.codes)
    assert torch.equal(plain.scale, zeros.scale)


@pytest.mark.parametrize("scheme", ["FP8", "W8A8", "W4A16"])
def test_absmax_does_not_depend_on_inputs(model: LoadedModel, stats: LayerStats, scheme: str) -> None:
    """Would catch codes that change for settings that have no error to weigh."""
    plan = build_plan(QuantSpec(scheme=scheme, group_size=32))
    weights = [quantize(model, s, plan).linears[UP].weight for s in (stats, uneven_inputs(stats, (GATE, UP)))]
    assert torch.equal(weights[0].codes.view(torch.uint8), weights[1].codes.view(torch.uint8))


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
def test_static_inputs_beside_channel_scales(model: LoadedModel, stats: LayerStats, name: str) -> None:
    """Would catch members of a merged layer whose stored input scales differ, or weight scales that become one."""
    dynamic = SCHEMES[name].layer()
    assert dynamic is not None
    fmt = dynamic.weight.fmt
    plan = replace(build_plan(QuantSpec()), default=replace(dynamic, activation=TensorScheme(fmt, PerTensor())))
    quant = quantize(model, stats, plan)
    expected = float(stats.amax_K[Q].max()) / fmt.qmax
    for layer in (Q, K, V):
        linear = quant.linears[layer]
        assert linear.input_scale is not None
        assert float(linear.input_scale) == pytest.approx(expected)
        assert linear.weight.scale.shape == (linear.weight.shape[0], 1)


@pytest.mark.parametrize("scheme", ["FP8", "W4A16"])
def test_experts_that_calibration_never_reached(tmp_path: Path, scheme: str) -> None:
    """Would catch an expert without an input range that stops the run, gets scale 1, or is not counted."""
    model = load(tiny_model("qwen3_moe", tmp_path))
    stats = calibrate(model, [[5]])  # one token: two experts of six
    quantized = quantize(model, stats, build_plan(QuantSpec.model_validate({"scheme": scheme, "group_size": 32})))
    for layer in ("model.layers.1", "model.layers.2"):
        for part in ("gate_proj", "down_proj"):
            mlps = model.arch.mlps(layer)
            seen = [stats.amax_K[f"{mlp}.{part}"].amax() for mlp in mlps if f"{mlp}.{part}" in stats.amax_K]
            assert len(seen) == 2
            if scheme == "FP8":
                scales = [quantized.linears[f"{mlp}.{part}"].input_scale for mlp in mlps]
                assert all(scale is not None for scale in scales)
                assert max(scale.item() for scale in scales if scale is not None) == pytest.approx(max(seen) / 448)
    unseen = unseen_experts(model.arch, quantized.linears, stats)
    assert unseen == {"model.layers.1": 4, "model.layers.2": 4}
    (note,) = unseen_notes(model.arch, {**unseen, "model.layers.2": 5})
    assert note.startswith("9 of 12 experts saw no calibration token (most in layer 2: 5 of 6)")
    assert quantized.notes == ()
    assert unseen_notes(model.arch, {}) == []
    assert set(model.arch.routers()).isdisjoint(quantized.linears)
