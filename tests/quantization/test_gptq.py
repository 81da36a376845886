"""Error feedback over a whole model: what each layer is fitted to, what is accepted, what stays."""

from dataclasses import replace
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization import gptq
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.ops.reference import fake_quantize
from qspec.quantization import gptq as sequential
from qspec.quantization.gptq import HELD_OUT, notes, require_judge
from qspec.quantization.pieces import embedded, pieces
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import KVSpec, OutlierSpec, QuantSpec, RuleSpec
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.tiny import VOCAB_SIZE, tiny_model

GENERATOR = torch.Generator().manual_seed(3)
ROWS = [[1, *torch.randint(5, VOCAB_SIZE, (95,), generator=GENERATOR).tolist()] for _ in range(8)]
JUDGED = ROWS[HELD_OUT]
W4 = QuantSpec(scheme="W4A16", group_size=32)
DOWN = "model.layers.0.mlp.down_proj"
CHANNELS = {"residual": 16, "key": {"format": "int4", "granularity": "channel", "group": 8}}
factor = gptq.factor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("source")))


def refine(model: LoadedModel, rounded: QuantizedModel, rows: list[list[int]]) -> QuantizedModel:
    """All pieces of `model` in turn, as `quantization.stream` does it."""
    states = embedded(model, rows)
    linears, choices = dict(rounded.linears), []
    for piece in pieces(model):
        own = {layer: linear for layer, linear in rounded.linears.items() if layer in piece.arch.linears()}
        tensors = {name: tensor for name, tensor in piece.tensors.items() if name in rounded.tensors}
        part = replace(rounded, arch=piece.arch, linears=own, tensors=tensors)
        refined, chosen, states = sequential.refine(piece, part, states)
        linears |= refined.linears
        choices += chosen
    return replace(rounded, linears=linears, notes=(*rounded.notes, *notes(choices, len(rows))))


def output_error(w_NK: Tensor, weight: QTensor, moments_KK: Tensor) -> float:
    """Squared output error of a weight's rounding over the tokens behind the second moments."""
    delta_NK = w_NK - weight.dequantize()
    return float(((delta_NK @ moments_KK) * delta_NK).sum())


def moments(decoder: Decoder, quant: QuantizedModel, layer: str, rows: list[list[int]]) -> Tensor:
    """`X^T X` of what `layer` reads when the whole model runs."""
    inputs: list[Tensor] = []

    def keep(name: str, x: Tensor) -> None:
        if name == layer:
            activation = quant.linears[layer].activation
            inputs.append(x if activation is None else fake_quantize(x, activation, quant.linears[layer].input_scale))

    decoder.observer = keep
    for row in rows:
        decoder.truncate(0)
        decoder.forward(torch.tensor(row))
    x_TK = torch.cat(inputs)
    return x_TK.T @ x_TK


@pytest.mark.parametrize("kv", [None, KVSpec(format="int8", granularity="token_head")])
@pytest.mark.parametrize("spec", [QuantSpec(scheme="W8A8", ignore=()), QuantSpec(scheme="W4A16", group_size=32)])
def test_layers_are_fitted_to_their_quantized_predecessors(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, spec: QuantSpec, kv: KVSpec | None
) -> None:
    """Catches moments of the float model, of held-out rows, of activations before rounding, or of another layer."""
    seen: list[Tensor] = []
    monkeypatch.setattr(sequential, "DAMPING", 0.1)

    def watch(hessian_KK: Tensor, damping: float) -> gptq.Factor | None:
        seen.append(hessian_KK)
        return factor(hessian_KK, damping)

    monkeypatch.setattr(gptq, "factor", watch)
    plan = build_plan(spec.model_copy(update={"kv": kv}))
    quant = refine(model, quantize(model, None, plan), ROWS)
    fit = [row for row in ROWS if row not in JUDGED]
    last = Decoder.from_quantized(quant, max_length=96)
    for layer in ("model.layers.1.self_attn.q_proj", *(["lm_head"] if "lm_head" in quant.linears else [])):
        tried = [moments(last, quant, layer, rows) for rows in (fit, ROWS)]  # to choose by, then to fit
        for want in tried:
            # float32 sums over hundreds of tokens, in another order
            assert any(torch.allclose(found, want, rtol=1e-4, atol=1e-3) for found in seen if found.shape == want.shape)


def test_accepted_codes_are_better_on_held_out_rows(model: LoadedModel) -> None:
    """Catches a choice by the rows that were fitted, where feedback always looks good."""
    rounded = quantize(model, None, build_plan(W4))
    quant = refine(model, rounded, ROWS)
    decoder = Decoder.from_float(model, max_length=96)
    changed = 0
    for layer in (DOWN, "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"):
        held_out_KK = moments(decoder, quant, layer, JUDGED)  # nothing is quantized before the first layer
        w_NK = model.tensors[f"{layer}.weight"]
        errors = [output_error(w_NK, q.linears[layer].weight, held_out_KK) for q in (quant, rounded)]
        same = torch.equal(quant.linears[layer].weight.codes, rounded.linears[layer].weight.codes)
        assert errors[0] == errors[1] if same else errors[0] < errors[1]
        changed += not same
    assert changed > 0


def test_feedback_that_only_fits_its_text_is_refused(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches 4-bit weights that fit the calibration text and lose elsewhere, and a layer nobody hears of."""
    monkeypatch.setattr(sequential, "DAMPING", 1e-6)
    few = [row[:6] for row in ROWS[:4]]  # 18 tokens for 64 and more inputs: anything can be fitted
    rounded = quantize(model, None, build_plan(W4))
    with caplog.at_level(logging.INFO, logger="qspec"):
        quant = refine(model, rounded, few)
    lines = dict(line.split(": ", 1) for line in caplog.messages)
    assert lines.keys() == quant.linears.keys()
    kept = [layer for layer, line in lines.items() if line.startswith("rounding to nearest, no gain on held-out rows")]
    assert len(kept) >= 4
    for layer in quant.linears:
        same = torch.equal(quant.linears[layer].weight.codes, rounded.linears[layer].weight.codes)
        assert same == (layer in kept)
    judged = "chosen on 1 of 4 rows that the others were fitted to, then fitted to all"
    assert quant.notes[0] == f"GPTQ: {14 - len(kept)} of 14 layers, {judged}."
    assert any(note.startswith("GPTQ, rounding to nearest, no gain on held-out rows: ") for note in quant.notes)


def test_matrices_that_misbehave_are_noted(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a job that fails at a layer without a factor, and damping raised without a word."""
    rounded = quantize(model, None, build_plan(W4))
    monkeypatch.setattr(gptq, "factor", lambda h, damping: None)
    quant = refine(model, rounded, ROWS)
    assert all(quant.linears[layer].weight is rounded.linears[layer].weight for layer in rounded.linears)
    assert quant.notes[0].startswith("GPTQ: 0 of 14 layers")
    assert "no factor of the second moments: model.layers.0.self_attn.q_proj, " in quant.notes[1]
    assert quant.notes[1].endswith(" and 6 more.")
    monkeypatch.setattr(gptq, "factor", lambda h, damping: factor(h, 10 * damping))
    assert any(note.startswith("GPTQ, damping raised: ") for note in refine(model, rounded, ROWS).notes)


SPECS = {
    "llama": QuantSpec(scheme="FP8", ignore=(), kv=KVSpec(granularity="head")),
    "mistral": QuantSpec(scheme="W8A8", kv=KVSpec()),
    "qwen2": QuantSpec(scheme="W8A8", rules=(RuleSpec(match="o_proj", scheme="none"),)),
    "qwen3": QuantSpec(scheme="FP8_DYNAMIC"),
    "gemma": QuantSpec(scheme="W4A16", group_size=32),
}


@pytest.mark.parametrize("kind", SPECS)
def test_only_codes_change(tmp_path: Path, kind: str) -> None:
    """Catches scales that no longer fit their codes or their group, a bias or float layer lost, inputs changed."""
    folder = tiny_model(kind, tmp_path)
    model, plan = load(folder), build_plan(SPECS[kind])
    rounded = quantize(model, observe(folder), plan)
    codes = {layer: linear.weight.codes.clone() for layer, linear in rounded.linears.items()}
    quant = refine(model, rounded, ROWS)
    assert list(quant.linears) == list(rounded.linears)
    for layer, linear in quant.linears.items():
        before = rounded.linears[layer]
        assert linear.weight.scale is before.weight.scale
        assert replace(linear, weight=before.weight) == before
        assert torch.equal(before.weight.codes.view(torch.uint8), codes[layer].view(torch.uint8))
        assert linear.weight.codes.dtype == before.weight.codes.dtype
    assert replace(quant, linears=rounded.linears, notes=rounded.notes) == rounded
    changed = [layer for layer, linear in quant.linears.items() if linear.weight is not rounded.linears[layer].weight]
    assert len(changed) > len(codes) / 2
    assert Decoder.from_quantized(quant, max_length=96).forward(torch.tensor(ROWS[0])).isfinite().all()


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_text_is_needed(rows: list[list[int]]) -> None:
    """Catches feedback that is judged on nothing, or on what it was fitted to."""
    with pytest.raises(RecipeError, match="method gptq: needs two calibration texts"):
        require_judge(rows)


def test_the_whole_model_gains(model: LoadedModel) -> None:
    """Catches feedback that lowers the error of each layer and raises that of the model."""
    name, generator = "model.embed_tokens.weight", torch.Generator().manual_seed(4)
    low_rank = torch.randn(VOCAB_SIZE, 12, generator=generator) @ torch.randn(12, 64, generator=generator)
    correlated = replace(model, tensors={**model.tensors, name: low_rank})  # as the inputs of trained models are
    text = torch.randint(5, VOCAB_SIZE, (256,), generator=generator)
    exact = Decoder.from_float(correlated).forward(text)
    rounded = quantize(correlated, None, build_plan(W4))
    losses = [
        float(kl_divergence(exact, Decoder.from_quantized(q).forward(text)).mean())
        for q in (rounded, refine(correlated, rounded, ROWS))
    ]
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize("kv", [{"residual": 16}, CHANNELS])
def test_a_cache_window_that_cuts_rows(model: LoadedModel, kv: dict[str, object]) -> None:
    """Catches inputs of the last segment alone, where the cache takes rows longer than its window in segments."""
    spec = W4.model_copy(update={"kv": KVSpec.model_validate({"granularity": "token_head", **kv})})
    kept = refine(model, quantize(model, None, build_plan(spec)), ROWS)
    plain = refine(model, quantize(model, None, build_plan(W4)), ROWS)
    first = "model.layers.0.self_attn.q_proj"  # reads what no cache has touched
    assert torch.equal(kept.linears[first].weight.codes, plain.linears[first].weight.codes)


def test_feedback_leaves_outliers_alone(model: LoadedModel) -> None:
    """Catches codes fitted to the whole weight, so that what is kept apart would count twice."""
    spec = W4.model_copy(update={"outliers": OutlierSpec(share=2.0)})
    rounded = quantize(model, None, build_plan(spec))
    quant = refine(model, rounded, ROWS)
    changed = 0
    for layer, linear in quant.linears.items():
        before = rounded.linears[layer]
        assert linear.outliers is before.outliers
        assert linear.outliers is not None
        changed += not torch.equal(linear.weight.codes, before.weight.codes)
        delta_NK = linear.rounded_part(model.tensors[f"{layer}.weight"]) - linear.weight.dequantize()
        apart_NK = linear.outliers.dense()
        assert bool((delta_NK.abs()[apart_NK != 0] < apart_NK.abs()[apart_NK != 0] / 2).all())
    assert changed > 0
