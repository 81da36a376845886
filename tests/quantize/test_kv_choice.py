"""Cast or calibrated, float or codes: what measurement decides per layer."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.plan import KVScheme, QuantPlan
from qspec.quantize import kv_choice
from qspec.quantize.calibrate import calibrate
from qspec.quantize.kv_choice import LayerError, choose_kv, decide
from qspec.quantize.kv_scales import key_biases, kv_scales
from tests.tiny import VOCAB_SIZE, tiny_model

ROWS = torch.randint(5, VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
AUTO = KVScheme(FP8_E4M3, "tensor", "auto", skip_layers="auto")


def errors(*pairs: tuple[float, float]) -> list[LayerError]:
    return [
        LayerError(f"model.layers.{i}", {"calibrated": a, "cast": b}, (3,) if i == 1 else ())
        for i, (a, b) in enumerate(pairs)
    ]


def test_each_layer_gets_the_scales_of_less_error() -> None:
    """Catches one choice for all layers, ties that cast, and a choice that stays open."""
    kv, notes = decide(replace(AUTO, skip_layers=()), errors((1.0, 2.0), (2.0, 1.0), (1.0, 1.0)))
    assert (kv.cast_layers, kv.scales, kv.open) == ((1,), "calibrated", False)
    assert any("1 of 3 layers" in note for note in notes)
    assert any("layer 1 (channels 3)" in note for note in notes)


@pytest.mark.parametrize(("worst", "skipped"), [(0.9e-2, ()), (1.1e-2, (3,))])
def test_layers_out_of_line_stay_in_float(worst: float, skipped: tuple[int, ...]) -> None:
    """Catches a layer skipped for being the worst by a little, or for an error that nobody would see."""
    kv, _ = decide(AUTO, errors(*[(1e-3, 1e-3)] * 3, (worst, 1.0), (1e-3, 1e-3)))
    assert kv.skip_layers == skipped
    tiny, _ = decide(AUTO, errors(*[(1e-9, 1e-9)] * 3, (9e-5, 1.0), (1e-9, 1e-9)))
    assert tiny.skip_layers == ()


@pytest.mark.parametrize(("metric", "factor"), [("kl", 5.0), ("output", 10.0)])
def test_a_key_bias_is_found_and_reacted_to(
    metric: Literal["kl", "output"], factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches Qwen2's key outliers going unseen: the bias spoils one layer of the model, which must stay in float."""
    monkeypatch.setattr(kv_choice, "OUT_OF_LINE", factor)  # the KL median of four random layers is no steady one
    model = load_folder(tiny_model("qwen2", tmp_path, num_hidden_layers=4))
    name = "model.layers.2.self_attn.k_proj.bias"
    bias = model.tensors[name].clone()
    bias[3] = 1e3
    model = replace(model, tensors={**model.tensors, name: bias})
    stats = calibrate(model, ROWS)
    plan, notes = choose_kv(model, QuantPlan(None, kv=replace(AUTO, scales="calibrated")), ROWS, stats, metric)
    assert plan.kv is not None
    assert plan.kv.skip_layers == (2,)
    assert any(note.startswith("KV in float: layers 2 (") for note in notes)
    (note,) = key_biases(model, plan.kv, stats)
    assert "layer 2 (channels 3)" in note
    assert key_biases(model, replace(plan.kv, granularity="head"), stats) == ()
    scales = kv_scales(model.arch, plan.kv, stats, [])
    assert [layer for layer in model.arch.layers if f"{layer}.self_attn" not in scales.k] == ["model.layers.2"]


def test_what_is_decided_is_left_alone(tmp_path: Path) -> None:
    """Catches measurements, and notes, of a recipe that leaves nothing open."""
    model = load_folder(tiny_model("llama", tmp_path))
    plan = QuantPlan(None, kv=KVScheme(FP8_E4M3, "tensor"))
    assert choose_kv(model, plan, ROWS) == (plan, ())
    assert choose_kv(model, QuantPlan(None), ROWS) == (QuantPlan(None), ())


def test_scales_of_queries_and_cast_layers(tmp_path: Path) -> None:
    """Catches query scales of KV heads, and cast layers that are calibrated."""
    model = load_folder(tiny_model("llama", tmp_path))
    stats, name = calibrate(model, ROWS), "model.layers.0.self_attn"
    scales = kv_scales(model.arch, KVScheme(FP8_E4M3, "head", query="head", cast_layers=(1,)), stats, [])
    assert torch.allclose(scales.q[name], stats.q_amax_H[name] / 448)
    assert len(scales.q[name]) == model.arch.n_heads
    ones = [side["model.layers.1.self_attn"] for side in (scales.k, scales.v, scales.q)]
    assert all(bool((scale == 1).all()) for scale in ones)
