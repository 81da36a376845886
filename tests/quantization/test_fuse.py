"""What the runtime may merge."""

from dataclasses import replace
from pathlib import Path

import pytest

from qspec.quantization.job import kept_apart
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec, RuleSpec
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.tiny import tiny_model

QKV = tuple(f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


def quantized(folder: Path, spec: QuantSpec, share_scales: bool = True) -> QuantizedModel:
    return quantize(load(folder), observe(folder), build_plan(spec), share_scales)


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8_DYNAMIC", "none"])
def test_every_group_may_be_merged(folder: Path, scheme: str) -> None:
    """Would catch a group that is called separate although its members are alike."""
    assert kept_apart(quantized(folder, QuantSpec.model_validate({"scheme": scheme, "ignore": []}))) == []


def test_unequal_scales_stay_apart(folder: Path) -> None:
    """Would catch one matmul over codes that mean different things."""
    quant = quantized(folder, QuantSpec(scheme="FP8"), share_scales=False)
    notes = kept_apart(quant)
    assert len(notes) == 2 * quant.arch.n_layers
    assert any("weight scales differ" in note for note in notes)


def test_unequal_input_scales_stay_apart(folder: Path) -> None:
    """Would catch one input rounded under the scale of another layer."""
    quant = quantized(folder, QuantSpec(scheme="FP8"))
    scale = quant.linears[QKV[1]].input_scale
    assert scale is not None
    odd = replace(quant.linears[QKV[1]], input_scale=scale * 2)
    (note,) = kept_apart(replace(quant, linears={**quant.linears, QKV[1]: odd}))
    assert note.startswith(", ".join(QKV))
    assert "input scales differ" in note


def test_split_groups_stay_apart(folder: Path) -> None:
    """Would catch a merge of quantized and float members, or of two formats."""
    half = quantized(folder, QuantSpec(rules=(RuleSpec(match="v_proj", scheme="none"),)))
    mixed = quantized(folder, QuantSpec(rules=(RuleSpec(match="up_proj", scheme="FP8_DYNAMIC"),)))
    for quant, part in ((half, "q_proj"), (mixed, "gate_proj")):
        notes = kept_apart(quant)
        assert len(notes) == quant.arch.n_layers
        assert all(part in note for note in notes)
