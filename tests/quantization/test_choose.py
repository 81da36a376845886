"""Choices by measured output error: who wins, what is one decision, and that the result is stored and read."""

from dataclasses import replace
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.tensors import read_tensors
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.blocks import PerGroup
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FP8_E4M3, FP8_E5M2, INT4
from qspec.ops import reference
from qspec.plan import LayerScheme, QuantPlan, Rule, TensorScheme
from qspec.quantization.choose import (
    MARGIN,
    Decision,
    choice_notes,
    choose,
    compact,
    decide,
    decided,
    decode_scheme,
    encode_scheme,
)
from qspec.quantization.pieces import piece_plan, pieces
from qspec.quantization.rtn import quantize
from qspec.records import LayerStats, LoadedModel, QuantizedModel
from qspec.schema.quantization import ClipSpec, QuantSpec, RuleSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import build_plan, resolve_plan, scheme_label
from tests.observed import ROWS, load, observe
from tests.tiny import tiny_model

Q, K, V, OUT = (f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
GATE, UP, DOWN = (f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
AUTO = {name: QuantSpec(scheme=name, activation_scales="auto") for name in ("FP8", "FP8_DYNAMIC", "W8A8")}
ADAPTIVE = QuantSpec(scheme="FP8", fp8_format="adaptive")
TWINS = {"FP8": {"FP8", "FP8_DYNAMIC"}, "FP8_DYNAMIC": {"FP8_STATIC", "FP8_DYNAMIC"}, "W8A8": {"W8A8_STATIC", "W8A8"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def stats(folder: Path) -> LayerStats:
    return observe(folder)


def seen(stats: LayerStats, layers: tuple[str, ...], x_TK: Tensor) -> LayerStats:
    """`stats` with other inputs of some layers."""
    return replace(
        stats,
        inputs_TK={**stats.inputs_TK, **dict.fromkeys(layers, x_TK)},
        amax_K={**stats.amax_K, **dict.fromkeys(layers, x_TK.abs().amax(0))},
    )


def with_weight(model: LoadedModel, layer: str, w_NK: Tensor) -> LoadedModel:
    return replace(model, tensors={**model.tensors, f"{layer}.weight": w_NK})


def output_error(model: LoadedModel, stats: LayerStats, plan: QuantPlan, layer: str) -> float:
    """Squared error of a layer's outputs on all rows that calibration kept."""
    linear, x_TK = quantize(model, stats, plan).linears[layer], stats.inputs_TK[layer]
    got_TN = reference.linear(x_TK, linear.weight, linear.activation, linear.input_scale)
    return float((got_TN - x_TK @ model.tensors[f"{layer}.weight"].T).square().sum())


def flat_inputs(stats: LayerStats, layer: str) -> Tensor:
    """Rows of one size: a scale per token is the same for all of them."""
    x_TK = stats.inputs_TK[layer].sign()
    x_TK[:, 1:] *= torch.rand(x_TK[:, 1:].shape, generator=torch.Generator().manual_seed(0))
    return x_TK


@pytest.mark.parametrize("name", AUTO)
def test_the_choice_is_no_worse_than_the_margin(model: LoadedModel, stats: LayerStats, name: str) -> None:
    """Would catch an inverted comparison: on all rows the choice stays near the better of both."""
    spec = AUTO[name]
    plan, _ = choose(model, stats, build_plan(spec), spec)
    twins = [replace(build_plan(spec), default=SCHEMES[twin].layer()) for twin in sorted(TWINS[name])]
    for layer in (Q, OUT, GATE, DOWN):
        best = min(output_error(model, stats, twin, layer) for twin in twins)
        # The margin, and as much again because three quarters of these rows were not judged on.
        assert output_error(model, stats, plan, layer) <= MARGIN**2 * best, layer


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "W8A8"])
def test_a_tie_is_static(model: LoadedModel, stats: LayerStats, name: str) -> None:
    """Would catch dynamic scales that gain nothing: rows of one size have the same scale either way."""
    stats = seen(stats, (GATE, UP), flat_inputs(stats, GATE))
    spec = AUTO[name]
    found = {d.layers: d for d in decide(model, stats, build_plan(spec), spec)}
    assert found[GATE, UP].scheme.static_input
    assert found[GATE, UP].ratio == pytest.approx(1.0, abs=1e-6)  # equal scales, so equal codes


def test_dynamic_where_one_scale_loses_the_rest(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a static scale for INT8 rows of which one is far larger than all others."""
    x_TK = stats.inputs_TK[DOWN].clone()
    x_TK[1] *= 1000  # not held out, yet it sets the scale
    found = {d.layers: d for d in decide(model, seen(stats, (DOWN,), x_TK), build_plan(AUTO["W8A8"]), AUTO["W8A8"])}
    assert found[DOWN,].scheme == SCHEMES["W8A8"].layer()


def test_merged_layers_are_one_decision(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch q/k/v of two schemes, which no server can merge."""
    spec = QuantSpec(scheme="FP8", activation_scales="auto", fp8_format="adaptive")
    decisions = decide(model, stats, build_plan(spec), spec)
    assert [d.layers for d in decisions[:4]] == [(Q, K, V), (OUT,), (GATE, UP), (DOWN,)]
    plan = decided(build_plan(spec), model.arch, decisions)
    resolve_plan(plan, model.arch)  # raises for fused groups of several schemes
    assert all(rule.match in model.arch.linears() for rule in plan.rules)


def wide_weight(model: LoadedModel) -> Tensor:
    """A weight with one huge input channel; under its scale E4M3 loses all others."""
    w_NK = model.tensors[f"{DOWN}.weight"].clone()
    w_NK[:, 0] = 1e6
    return w_NK


def unread(stats: LayerStats) -> LayerStats:
    """Inputs of `DOWN` that never use its first channel."""
    x_TK = stats.inputs_TK[DOWN].clone()
    x_TK[:, 0] = 0
    return seen(stats, (DOWN,), x_TK)


def test_e5m2_wins_where_range_matters(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch E5M2 that is never measured, or one that is taken everywhere."""
    wide, stats = with_weight(model, DOWN, wide_weight(model)), unread(stats)
    decisions = {d.layers: d for d in decide(wide, stats, build_plan(ADAPTIVE), ADAPTIVE)}
    chosen = decisions[DOWN,]
    assert (chosen.scheme.weight.fmt, chosen.scheme.activation and chosen.scheme.activation.fmt) == (FP8_E5M2, FP8_E4M3)
    assert chosen.weight is not None
    assert chosen.weight.below > 0.9  # why: E4M3 would lose nearly everything
    assert chosen.ratio is not None
    assert chosen.ratio < 0.5
    assert all(d.scheme == SCHEMES["FP8"].layer() for layers, d in decisions.items() if layers != (DOWN,))


def test_e5m2_inputs(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a format of weights only: here the weights ignore what makes the input's range wide."""
    x_TK, w_NK = stats.inputs_TK[DOWN].clone(), model.tensors[f"{DOWN}.weight"].clone()
    x_TK[:, 0], w_NK[:, 0] = 1e6, 0
    found = decide(with_weight(model, DOWN, w_NK), seen(stats, (DOWN,), x_TK), build_plan(ADAPTIVE), ADAPTIVE)
    scheme = next(d.scheme for d in found if d.layers == (DOWN,))
    assert (scheme.weight.fmt, scheme.activation and scheme.activation.fmt) == (FP8_E4M3, FP8_E5M2)


def adapted(model: LoadedModel, stats: LayerStats) -> QuantizedModel:
    wide, stats = with_weight(model, DOWN, wide_weight(model)), unread(stats)
    plan, notes = choose(wide, stats, build_plan(ADAPTIVE), ADAPTIVE)
    return replace(quantize(wide, stats, compact(plan, model.arch)), notes=tuple(notes))


def test_e5m2_survives_the_files(model: LoadedModel, stats: LayerStats, tmp_path: Path) -> None:
    """Would catch E5M2 codes that are read back as E4M3: the same bits, other numbers."""
    made = adapted(model, stats)
    compressed.write(made, tmp_path, torch.float32)
    assert read_tensors(tmp_path)[f"{DOWN}.weight"].dtype == torch.float8_e5m2
    back = compressed.read(tmp_path)
    assert back.plan == made.plan
    assert torch.equal(back.linears[DOWN].weight.dequantize(), made.linears[DOWN].weight.dequantize())
    (tmp_path / "qspec.json").unlink()  # config.json alone says it, too
    assert compressed.read(tmp_path).linears[DOWN].weight.fmt == FP8_E5M2


def test_e5m2_runs(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a kernel that decodes E5M2 as E4M3, or rounds the inputs to the other format."""
    scheme = SCHEMES["FP8"].layer()
    assert scheme is not None
    assert scheme.activation is not None
    inputs = replace(scheme.activation, fmt=FP8_E5M2)
    wide = replace(scheme, weight=replace(scheme.weight, fmt=FP8_E5M2), activation=inputs)
    made = quantize(model, stats, QuantPlan(wide, (Rule("lm_head", None),)))
    fast, twin, plain = (
        decoder.forward(torch.tensor(ROWS[0]))
        for decoder in (
            Decoder.from_quantized(made),
            Decoder.from_quantized(made, kernels="reference"),
            Decoder.from_float(model),
        )
    )
    assert torch.allclose(fast, twin, atol=1e-4)  # the same numbers, summed in another order
    assert 0.01 < (fast - plain).norm() / plain.norm() < 0.3  # two bits: each factor is off by 6 % or so


def test_e5m2_stops_other_readers(model: LoadedModel, stats: LayerStats, tmp_path: Path) -> None:
    """Would catch a checkpoint that transformers loads as E4M3 without a word."""
    from transformers import AutoModelForCausalLM

    compressed.write(adapted(model, stats), tmp_path, torch.float32)
    with pytest.raises(ValueError, match="float8_e5m2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", AUTO)
def test_the_plan_survives_the_files(model: LoadedModel, stats: LayerStats, tmp_path: Path, name: str) -> None:
    """Would catch a rule by name, a twin's scheme or its clip that the sidecar loses."""
    spec = AUTO[name].model_copy(update={"clip": ClipSpec(method="kl" if name == "FP8" else "mse")})
    plan, _ = choose(model, stats, build_plan(spec), spec)
    for kept in (plan, compact(plan, model.arch)):
        made = quantize(model, stats, kept)
        compressed.write(made, tmp_path / str(len(kept.rules)), torch.float32)
        back = compressed.read(tmp_path / str(len(kept.rules)))
        assert back.plan.rules == made.plan.rules
        assert back.plan.resolve(back.arch.linears()) == plan.resolve(model.arch.linears())


def test_compact_says_the_same_in_few_rules(model: LoadedModel) -> None:
    """Would catch a file that grows with the model, and a pattern that takes in a neighbour."""
    static, rest = SCHEMES["W8A8_STATIC"].layer(), SCHEMES["W8A8"].layer()
    schemes: dict[str, LayerScheme | None] = dict.fromkeys(model.arch.linears(), rest)
    downs = [layer for layer in schemes if layer.endswith("down_proj")]
    schemes |= dict.fromkeys([OUT, *downs], static) | {"lm_head": None}
    plan = QuantPlan(None, tuple(Rule(layer, scheme) for layer, scheme in schemes.items()))
    found = compact(plan, model.arch)
    assert found.resolve(model.arch.linears()) == schemes
    assert len(found.rules) == 3


def test_pieces_choose_what_the_whole_does(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a choice that needs the whole model, or numbers the layers of a piece from 0."""
    spec = QuantSpec(scheme="FP8", activation_scales="auto", fp8_format="adaptive")
    plan = build_plan(spec)
    schemes = plan.resolve(model.arch.linears())
    whole = choose(model, stats, plan, spec)[0].resolve(model.arch.linears())
    found = {}
    for piece in pieces(model):
        chosen, _ = choose(piece, stats, piece_plan(schemes, plan, piece), spec)
        found |= chosen.resolve(piece.arch.linears())
    assert found == whole


def test_unseen_layers_keep_their_scheme(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a choice by no rows at all, where every error is 0, or rows of zeros."""
    inputs = {layer: x for layer, x in stats.inputs_TK.items() if layer != DOWN} | {OUT: torch.zeros(8, 64)}
    spec = AUTO["W8A8"]
    decisions = decide(model, replace(stats, inputs_TK=inputs), build_plan(spec), spec)
    unseen = {d.layers: d.scheme for d in decisions if d.ratio is None}
    assert unseen == {(DOWN,): SCHEMES["W8A8"].layer(), (OUT,): SCHEMES["W8A8"].layer()}
    assert any("2 layers were not seen" in note for note in choice_notes(decisions, spec))


def test_nothing_to_choose(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a plan that is rewritten where nothing was asked: files and digests must stay."""
    spec = QuantSpec(scheme="FP8")
    plan = build_plan(spec)
    assert choose(model, stats, plan, spec) == (plan, [])


def test_rules_are_respected(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a choice for a layer whose rule keeps it in float, or in INT4."""
    rules = (RuleSpec(match="down_proj", scheme="W4A16", group_size=32), RuleSpec(match="o_proj", scheme="none"))
    spec = QuantSpec(scheme="FP8_DYNAMIC", activation_scales="auto", rules=rules)
    chosen = choose(model, stats, build_plan(spec), spec)[0].resolve(model.arch.linears())
    assert scheme_label(chosen[DOWN]) == "W4A16 g32"
    assert chosen[OUT] is None
    assert chosen["lm_head"] is None


def test_outliers_stay_with_the_twin(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a dynamic twin that forgets what is kept apart."""
    spec = QuantSpec.model_validate({"scheme": "FP8", "activation_scales": "auto", "outliers": {"share": 0.5}})
    chosen = choose(model, stats, build_plan(spec), spec)[0].resolve(model.arch.linears())
    assert {scheme.outliers for scheme in chosen.values() if scheme} == {0.5}


def test_notes_and_log(model: LoadedModel, stats: LayerStats, caplog: pytest.LogCaptureFixture) -> None:
    """Would catch a report that does not say what was chosen, and a log without the layer's own numbers."""
    caplog.set_level(logging.INFO, logger="qspec")
    spec = QuantSpec(scheme="FP8", activation_scales="auto", fp8_format="adaptive")
    decisions = decide(model, stats, build_plan(spec), spec)
    static = sum(d.scheme.static_input for d in decisions)
    notes = choice_notes(decisions, spec)
    assert f"{static} of 8 decisions static" in notes[0]
    assert any("weights: E4M3 in 8 decisions (medians: kurtosis" in note for note in notes)
    lines = [record.getMessage() for record in caplog.records if record.name == "qspec"]
    assert len(lines) == 8
    assert all("held-out error" in line and "kurtosis" in line for line in lines)
    assert lines[0].startswith(f"{Q}, k_proj, v_proj: ")


def test_decisions_can_be_kept(model: LoadedModel, stats: LayerStats) -> None:
    """Would catch a killed run that goes on with other schemes, or with notes about fewer layers."""
    spec = QuantSpec(
        scheme="FP8", activation_scales="auto", fp8_format="adaptive", rules=(RuleSpec(match="o_proj", scheme="W8A8"),)
    )
    unseen = {layer: x for layer, x in stats.inputs_TK.items() if layer != DOWN}
    decisions = decide(model, replace(stats, inputs_TK=unseen), build_plan(spec), spec)
    kept = json.loads(json.dumps([decision.record() for decision in decisions]))
    assert [Decision.read(record) for record in kept] == decisions


def test_static_twins_take_the_kl_clip() -> None:
    """Would catch `kl` on channels, whose histograms are too thin, or none on the static input."""
    clip = Clip("kl")
    for name in ("FP8_STATIC", "W8A8_STATIC"):
        scheme = SCHEMES[name].layer(clip=clip)
        assert scheme is not None
        assert scheme.activation is not None
        assert (scheme.weight.clip, scheme.activation.clip) == (Clip(), clip)


NAMES = ("W8A8", "W8A8_STATIC", "FP8", "FP8_STATIC", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A8")
OWN = LayerScheme("OWN", TensorScheme(FP8_E5M2, PerGroup(32), clip=Clip("percentile", 99.5)), None, 0.25)
ZEROS = LayerScheme("ZEROS", TensorScheme(INT4, PerGroup(64), symmetric=False, clip=Clip("mse")))


@pytest.mark.parametrize("scheme", [*(SCHEMES[n].layer() for n in NAMES), OWN, ZEROS], ids=lambda scheme: scheme.name)
def test_schemes_survive_json(scheme: LayerScheme) -> None:
    """Would catch a field of a scheme that is lost or takes its default."""
    assert decode_scheme(json.loads(json.dumps(encode_scheme(scheme)))) == scheme
