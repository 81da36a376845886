"""Cast or calibrated, float or codes: what measurement decides per layer."""

from collections.abc import Iterable
from dataclasses import replace
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError
import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.plan import KVScheme, QuantPlan
from qspec.quantization import kv_choice
from qspec.quantization.calibrate import calibrate
from qspec.quantization.kv_choice import LayerError, choose_kv, decide
from qspec.quantization.kv_scales import key_biases, kv_scales
from qspec.quantization.rtn import quantize
from qspec.records import LayerStats, LoadedModel
from qspec.schema.quantization import KVSpec
from qspec.schemes.build import kv_scheme
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
    tiny, _ = decide(AUTO, errors(*[(1e-9, 1e-9)] * 3, (4e-3, 1.0), (1e-9, 1e-9)))
    assert tiny.skip_layers == ()


@pytest.mark.parametrize(
    ("layers", "skipped"),
    [
        ([0.12, 0.023, 0.014, 0.002], (0,)),  # key biases of 200 in every layer: the worst is 6 medians away
        ([0.02] * 4, (0, 1)),  # all alike
        ([0.0021] * 40, tuple(range(17))),  # none is bad, all together are
        ([math.inf, math.inf], (0, 1)),  # logits that are no numbers
    ],
)
def test_layers_of_which_none_is_out_of_line_stay_in_float(layers: list[float], skipped: tuple[int, ...]) -> None:
    """Catches a rule by medians alone: where every layer is bad it keeps none in float, and the pair was published."""
    kv, notes = decide(AUTO, errors(*((error, math.inf) for error in layers)))
    assert kv.skip_layers == skipped
    assert sum(error for i, error in enumerate(layers) if i not in skipped) <= kv_choice.MOST
    assert "at most 0.05" in notes[1]


def biased(model: LoadedModel, channels: Iterable[int], size: float) -> LoadedModel:
    """The model with a key bias of `size` in `channels` of every layer."""
    tensors = dict(model.tensors)
    for layer in model.arch.layers:
        name = f"{layer}.self_attn.k_proj.bias"
        tensors[name] = tensors[name].index_fill(0, torch.tensor(list(channels)), size)
    return replace(model, tensors=tensors)


@pytest.mark.parametrize(
    ("channels", "size", "chosen"),
    [((), 0.0, "fp8_e4m3 tensor"), ((3,), 200.0, "fp8_e4m3 token_head"), (range(32), 200.0, None)],
)
@pytest.mark.parametrize("spec", [{"granularity": "auto"}, {"skip_layers": "auto"}])
def test_what_is_advised_against_key_biases_works(
    channels: Iterable[int], size: float, chosen: str | None, spec: dict[str, str], tmp_path: Path
) -> None:
    """Catches advice that changes nothing: with biases in all layers, neither a scale per head nor `skip_layers: auto`
    brought the KL down. And float layers, or scales made at run time, for a model that needs none.
    """
    model = load_folder(tiny_model("qwen2", tmp_path, num_hidden_layers=3))
    model = biased(model, channels, size) if channels else model
    stats = calibrate(model, ROWS)
    plan, _ = choose_kv(model, QuantPlan(None, kv=kv_scheme(KVSpec.model_validate(spec))), ROWS)
    assert plan.kv is not None
    assert not plan.kv.open
    if "granularity" in spec and chosen:
        assert plan.kv.label == chosen
    if not channels:
        assert plan.kv.skip_layers == ()
    kl = [divergence(model, stats, kv) for kv in (KVScheme(FP8_E4M3, "tensor"), plan.kv)]
    assert kl[1] < 2 * kv_choice.MOST  # errors add up, but for what they do to each other
    assert kl[1] < 0.4 * kl[0] or not channels


def divergence(model: LoadedModel, stats: LayerStats, kv: KVScheme) -> float:
    """KL of the model with that cache to the float one, nats per token of `ROWS`."""
    quantized = Decoder.from_quantized(quantize(model, stats, QuantPlan(None, kv=kv)), max_length=32)
    plain, found = Decoder.from_float(model, max_length=32), list[torch.Tensor]()
    for row in ROWS:
        for decoder in (plain, quantized):
            decoder.truncate(0)
        found.append(kl_divergence(*(decoder.forward(torch.tensor(row)) for decoder in (plain, quantized))))
    return float(torch.cat(found).mean())


def test_a_cache_that_nothing_holds_stays_in_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that is quantized in no layer and declared all the same."""
    model = biased(load_folder(tiny_model("qwen2", tmp_path)), range(32), 1e3)
    monkeypatch.setattr(kv_choice, "MOST", 0.0)
    plan, notes = choose_kv(model, QuantPlan(None, kv=kv_scheme(KVSpec(granularity="auto"))), ROWS)
    assert plan.kv is None
    assert any(note.startswith("KV granularity: ") for note in notes)
    assert any(note.startswith("KV in float: layers 0 (") for note in notes)


@pytest.mark.parametrize(
    "fields", [{"format": "int8"}, {"query": "tensor"}, {"key": {"format": "int8", "granularity": "token_head"}}]
)
def test_a_granularity_that_cannot_be_chosen_is_refused(fields: dict[str, Any]) -> None:
    """Catches a choice among granularities that leaves keys, or rounded queries, without what they need."""
    with pytest.raises(ValidationError):
        KVSpec.model_validate({"granularity": "auto", **fields})


def test_a_key_bias_is_found_and_reacted_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Qwen2's key outliers going unseen: the bias spoils one layer of the model, which must stay in float."""
    monkeypatch.setattr(kv_choice, "OUT_OF_LINE", 5.0)  # the KL median of four random layers is no steady one
    model = load_folder(tiny_model("qwen2", tmp_path, num_hidden_layers=4))
    name = "model.layers.2.self_attn.k_proj.bias"
    bias = model.tensors[name].clone()
    bias[3] = 1e3
    model = replace(model, tensors={**model.tensors, name: bias})
    stats = calibrate(model, ROWS)
    plan, notes = choose_kv(model, QuantPlan(None, kv=replace(AUTO, scales="calibrated")), ROWS)
    assert plan.kv is not None
    assert plan.kv.skip_layers == (2,)
    assert any(note.startswith("KV in float: layers 2 (") for note in notes)
    (note,) = key_biases(model, plan.kv, stats)
    assert "layer 2 (channels 3)" in note
    assert key_biases(model, replace(plan.kv, granularity="token_head"), stats) == ()
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
