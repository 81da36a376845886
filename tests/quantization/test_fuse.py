"""What the runtime may merge."""

from dataclasses import replace
from pathlib import Path

import pytest

from qspec.quantization.job import fuse
from qspec.quantization.rtn import quantize
from qspec.quantization.smooth import transform
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec, RuleSpec
from qspec.schema.recipe import FusionSpec
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.tiny import tiny_model

QKV = tuple(f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj"))
GATE_UP = tuple(f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


def quantized(folder: Path, spec: QuantSpec, share_scales: bool = True) -> QuantizedModel:
    return fuse(quantize(load(folder), observe(folder), build_plan(spec), share_scales))


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8_DYNAMIC", "none"])
def test_every_group_is_merged(folder: Path, scheme: str) -> None:
    """Would catch a group that is left apart although its members are alike."""
    quant = quantized(folder, QuantSpec.model_validate({"scheme": scheme, "ignore": []}))
    assert len(quant.fusion.merged) == 2 * quant.arch.n_layers
    assert quant.fusion.merged[:2] == (QKV, GATE_UP)
    assert quant.notes == ()


def test_unequal_scales_stay_apart(folder: Path) -> None:
    """Would catch one matmul over codes that mean different things."""
    quant = quantized(folder, QuantSpec(scheme="FP8"), share_scales=False)
    assert quant.fusion.merged == ()
    assert any("weight scales differ" in note for note in quant.notes)


def test_unequal_input_scales_stay_apart(folder: Path) -> None:
    """Would catch one input rounded under the scale of another layer."""
    quant = quantized(folder, QuantSpec(scheme="FP8"))
    scale = quant.linears[QKV[1]].input_scale
    assert scale is not None
    odd = replace(quant.linears[QKV[1]], input_scale=scale * 2)
    again = fuse(replace(quant, linears={**quant.linears, QKV[1]: odd}, notes=()))
    assert QKV not in again.fusion.merged
    assert GATE_UP in again.fusion.merged
    assert "input scales differ" in again.notes[0]


def test_split_groups_stay_apart(folder: Path) -> None:
    """Would catch a merge of quantized and float members, or of two formats."""
    half = quantized(folder, QuantSpec(rules=(RuleSpec(match="v_proj", scheme="none"),)))
    mixed = quantized(folder, QuantSpec(rules=(RuleSpec(match="up_proj", scheme="FP8_DYNAMIC"),)))
    assert QKV not in half.fusion.merged
    assert GATE_UP not in mixed.fusion.merged


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_folded_norms_are_found(tmp_path: Path, kind: str) -> None:
    """Would catch a runtime that skips a norm's gain which was never folded (or, with Gemma's offset, none at all)."""
    folder = tiny_model(kind, tmp_path)
    spec, fusion = QuantSpec(), FusionSpec(fold_norms=True)
    plan = build_plan(spec)
    folded, _, _ = transform(load(folder), None, spec, fusion, plan)
    assert quantized(folder, spec).fusion.folded_norms == ()
    names = fuse(quantize(folded, None, plan)).fusion.folded_norms
    expected = 2 * folded.arch.n_layers + (0 if folded.arch.tied else 1)  # a tied head cannot take the last gain
    assert len(names) == expected
