"""Gates against a small model that was really trained: a damaged quantization is caught, an undamaged one passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qspec.bridges.harness import Sample, TaskScores
from qspec.bridges.text import windows
from qspec.measure.evaluate import compare
from qspec.measure.fidelity import measure_fidelity
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.affine import QTensor
from qspec.progress import Progress
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel, QuantizedModel
from qspec.report.gate import GateOutcome, judge, parse
from qspec.report.quality import quality_obstacles
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import FidelitySpec, TaskSpec
from qspec.schema.results import Accuracy, Results
from qspec.schemes.build import build_plan
from scripts.engines.convert_llama2c import convert
from tests.observed import load

TEXT = FidelitySpec(data="tinystories", windows=12, length=128)
GATES = ("recovery<0.99", "kl>0.01", "top1<0.93", "perplexity_ratio>1.01")
LAYER = "model.layers.2.mlp.down_proj"
Damage = Callable[[QTensor], QTensor]


@pytest.fixture(scope="module")
def model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    source = data_dir / "models/stories260K"
    return load(convert(source / "stories260K.bin", source / "tok512.bin", tmp_path_factory.mktemp("m") / "stories"))


def damaged(quantized: QuantizedModel, damage: Damage) -> QuantizedModel:
    """One layer's codes and scales changed, as a wrong export or kernel would."""
    linear = quantized.linears[LAYER]
    return replace(quantized, linears={**quantized.linears, LAYER: replace(linear, weight=damage(linear.weight))})


def double_scales(weight: QTensor) -> QTensor:
    return QTensor(weight.codes, 2 * weight.scale, weight.zero_point, weight.fmt, weight.granularity)


def two_bits(weight: QTensor) -> QTensor:
    codes = weight.codes.clamp(-1, 1)
    return QTensor(codes, 64 * weight.scale, weight.zero_point, weight.fmt, weight.granularity)


def results(model: LoadedModel, quantized: QuantizedModel, name: str) -> Results:
    """Fidelity, and a task with a question for each of some hundred tokens: which one comes next?"""
    arms = [Decoder.from_float(model), Decoder.from_quantized(quantized)]
    (fidelity,) = measure_fidelity(*arms, model.tokenizer, TEXT, Progress(quiet=True))
    rows = windows(TEXT.data, TEXT.windows, TEXT.length, model.tokenizer)
    task = compare(TaskSpec(name="next"), "qspec", *(_next_tokens(arm, rows) for arm in arms))
    accuracy = Accuracy(fidelity=fidelity, tasks=(task,))
    return Results(name=name, recipe={}, environment={}, accuracy=accuracy)


def _next_tokens(lm: Decoder, rows: list[list[int]]) -> TaskScores:
    samples: list[Sample] = []
    for i, row in enumerate(rows):
        lm.truncate(0)
        right_T = lm.forward(torch.tensor(row[:-1])).argmax(-1) == torch.tensor(row[1:])
        for t, right in enumerate(right_T.tolist()):
            samples.append(Sample("next", 1000 * i + t, str(i), str(t), float(right), False, False))
    return TaskScores("acc", samples, {})


@pytest.fixture(scope="module")
def sound(model: LoadedModel) -> QuantizedModel:
    return quantize(model, None, build_plan(QuantSpec(scheme="W8A8")))


def judged(results: Results) -> dict[str, GateOutcome]:
    return {outcome.gate.metric: outcome for outcome in judge([parse(gate) for gate in GATES], results)}


def test_an_undamaged_quantization_passes(model: LoadedModel, sound: QuantizedModel):
    """Would catch gates that cry at INT8 as it should be."""
    outcomes = judged(results(model, sound, "sound"))
    assert [metric for metric, outcome in outcomes.items() if outcome.missed] == []


@pytest.mark.parametrize("damage", [double_scales, two_bits])
def test_a_damaged_quantization_is_caught(model: LoadedModel, sound: QuantizedModel, damage: Damage):
    """Would catch gates that one broken layer slips through, or that call such a loss noise."""
    broken = results(model, damaged(sound, damage), "broken")
    assert {(o.missed, o.noise) for o in judged(broken).values()} == {(True, "noise does not explain it")}
    assert broken.accuracy.tasks[0].verdict.startswith("quantized is worse by")


def test_inputs_that_one_channel_fills_are_not_ready(model: LoadedModel, sound: QuantizedModel):
    """Would catch INT8 that rounds all inputs but one to 0, KL 20 and "time time time", called ready and published."""
    tensors, arch = dict(model.tensors), model.arch
    for layer in arch.layers:
        parts = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
        parts["post_attention_layernorm"] = ("mlp.gate_proj", "mlp.up_proj")
        for norm, linears in parts.items():
            scale = torch.ones(arch.hidden_size).index_fill(0, torch.tensor([7]), 2e4)
            tensors[f"{layer}.{norm}.weight"] = tensors[f"{layer}.{norm}.weight"] * scale
            for linear in linears:
                tensors[f"{layer}.{linear}.weight"] = tensors[f"{layer}.{linear}.weight"] / scale
    same = replace(model, tensors=tensors)
    broken = quantize(same, None, build_plan(QuantSpec(scheme="W8A8")))
    assert quality_obstacles(results(model, sound, "sound")) == []
    kl, agreement = quality_obstacles(results(same, broken, "broken"))
    assert "not at most 0.2" in kl
    assert "not at least 60 %" in agreement
