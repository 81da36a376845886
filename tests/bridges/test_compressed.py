"""Checkpoints on disk, against transformers as it loads and runs them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import OutputError, RecipeError, SourceError
from qspec.numerics.quantization.blocks import PerGroup, PerTensor
from qspec.numerics.quantization.formats import INT4, SCALE_FLOOR
from qspec.numerics.quantization.outliers import same_matrix
from qspec.plan import LayerScheme, QuantPlan, Rule, TensorScheme
from qspec.quantization.rtn import quantize
from qspec.records import QLinear, QuantizedModel
from qspec.schema.quantization import ClipSpec, KVSpec, OutlierSpec, QuantSpec, RuleSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.served import distance, logits, reference_logits, transformers_model
from tests.tiny import tiny_model

MIXED = (RuleSpec(match="down_proj", scheme="FP8"), RuleSpec(match=r"re:.*layers\.1\.self_attn\.o_proj", scheme="none"))
SPECS = {
    "fp8_static": QuantSpec(scheme="FP8"),
    "fp8_dynamic": QuantSpec(scheme="FP8_DYNAMIC"),
    "fp8_block": QuantSpec(scheme="FP8_BLOCK"),
    "w8a8": QuantSpec(scheme="W8A8"),
    "w8a8_g32": QuantSpec(scheme="W8A8", group_size=32),
    "w4a16_g64": QuantSpec(scheme="W4A16", group_size=64),
    "w4a16_g32_head": QuantSpec(scheme="W4A16", group_size=32, ignore=()),
    "w4a8_g32_head": QuantSpec(scheme="W4A8", group_size=32, ignore=()),
    "mixed": QuantSpec(scheme="W8A8", rules=MIXED, clip=ClipSpec(method="mse")),
    "kv_tensor": QuantSpec(scheme="FP8", kv=KVSpec()),
    "kv_head": QuantSpec(scheme="W8A8", kv=KVSpec(granularity="head")),
    "kv_cast": QuantSpec(scheme="none", ignore=(), kv=KVSpec(scales="cast")),
    "kv_int8": QuantSpec(scheme="W8A8", kv=KVSpec(format="int8", granularity="token_head")),
    "none": QuantSpec(scheme="none", ignore=()),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose layers are wide enough for 128 x 128 tiles."""
    return tiny_model("llama", tmp_path_factory.mktemp("source"), hidden_size=128, intermediate_size=256)


def quantized(folder: Path, spec: QuantSpec) -> QuantizedModel:
    return quantize(load(folder), observe(folder), build_plan(spec))


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "name",
    [
        "fp8_static",
        "fp8_dynamic",
        "fp8_block",
        "w8a8",
        "w8a8_g32",
        "w4a16_g64",
        "w4a16_g32_head",
        "w4a8_g32_head",
        "mixed",
    ],
)
def test_transformers_computes_the_same(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch a wrong scale shape, packing order, target or status: all load, and compute something else."""
    model = quantized(source, SPECS[name])
    compressed.write(model, tmp_path, torch.float32)
    # Same codes, scales and arithmetic; a sum in another order may flip the rounding of a few inputs (FP8: 1 in 16).
    assert distance(logits(transformers_model(tmp_path)), reference_logits(source, model)) < 5e-3


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
def test_transformers_computes_static_beside_dynamic(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch a stored input scale that is ignored beside channel scales, or groups that swap their layers."""
    dynamic = SCHEMES[name].layer()
    assert dynamic is not None
    static = replace(dynamic, activation=TensorScheme(dynamic.weight.fmt, PerTensor()))
    plan = QuantPlan(dynamic, (Rule("lm_head", None), Rule("down_proj", static), Rule("o_proj", static)))
    model = quantize(load(source), observe(source), plan)
    compressed.write(model, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert [group["input_activations"]["dynamic"] for group in config["config_groups"].values()] == [True, False]
    # As above: the same numbers, and some inputs that round the other way.
    assert distance(logits(transformers_model(tmp_path)), reference_logits(source, model)) < 5e-3


@pytest.mark.parametrize("name", ["kv_tensor", "kv_head", "kv_cast"])
def test_transformers_reads_the_kv_scales(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch KV scales under a name, shape or scheme that a runtime ignores and replaces by 1.0."""
    model = quantized(source, SPECS[name])
    compressed.write(model, tmp_path, torch.float32)
    served = transformers_model(tmp_path)
    rounded = distance(logits(served), reference_logits(source, model))
    assert 1e-3 < rounded < 0.15  # FP8 keeps 4 significant bits of each key and value: an effect, and a small one
    for i, layer in enumerate(served.model.layers):
        assert torch.equal(layer.self_attn.k_scale.flatten(), model.k_scale[f"model.layers.{i}.self_attn"])
        assert torch.equal(layer.self_attn.v_scale.flatten(), model.v_scale[f"model.layers.{i}.self_attn"])


@pytest.mark.parametrize("name", SPECS)
def test_read_gives_back_what_was_written(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch a plan, scale, note or tensor that the files do not hold."""
    model = quantized(source, SPECS[name])
    compressed.write(model, tmp_path, torch.float32)
    back = compressed.read(tmp_path)
    assert back.plan.kv == model.plan.kv
    assert back.plan.rules == model.plan.rules
    assert back.plan.resolve(back.arch.linears()) == model.plan.resolve(model.arch.linears())
    assert (back.arch, back.source, back.notes) == (model.arch, model.source, model.notes)
    assert same_tensors(back.tensors, model.tensors)
    assert same_tensors(back.k_scale, model.k_scale)
    assert same_tensors(back.v_scale, model.v_scale)
    assert list(back.linears) == list(model.linears)
    for layer, linear in model.linears.items():
        assert same_tensors(parts(back.linears[layer]), parts(linear)), layer
        assert back.linears[layer].activation == linear.activation
    assert back.tokenizer.fingerprint() == model.tokenizer.fingerprint()


def parts(linear: QLinear) -> dict[str, Tensor]:
    found = {"codes": linear.weight.codes, "scale": linear.weight.scale, "zero": linear.weight.zero_point}
    found |= {"input": linear.input_scale, "bias": linear.bias}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("name", SPECS)
def test_the_library_accepts_the_config(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch a field or value that compressed-tensors does not know, which transformers itself passes over."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    compressed.write(quantized(source, SPECS[name]), tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    if name == "none":
        assert "quantization_config" not in config
        return
    known = QuantizationConfig.model_validate(config["quantization_config"])
    assert known.quantization_status == QuantizationStatus.COMPRESSED
    assert list(known.config_groups) == [f"group_{i}" for i in range(len(known.config_groups))]
    assert (known.kv_cache_scheme is None) == (name not in ("kv_tensor", "kv_head", "kv_cast"))


@pytest.mark.parametrize("name", ["fp8_static", "w8a8", "kv_head"])
def test_scales_are_float32_beside_bfloat16_weights(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch scales that are rounded with the rest: equal members of a merged layer would drift apart."""
    compressed.write(quantized(source, SPECS[name]), tmp_path, torch.bfloat16)
    stored = read_tensors(tmp_path)
    assert {stored[n].dtype for n in stored if n.endswith("_scale")} == {torch.float32}
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_zero_points(source: Path, tmp_path: Path) -> None:
    """Would catch zero points packed along the wrong axis, as llm-compressor's asymmetric checkpoints hold them."""
    weight = TensorScheme(INT4, PerGroup(32), symmetric=False)
    plan = QuantPlan(LayerScheme("W4A16_ASYM", weight), (Rule("lm_head", None),))
    model = quantize(load(source), None, plan)
    compressed.write(model, tmp_path, torch.float32)
    assert distance(logits(transformers_model(tmp_path)), reference_logits(source, model)) < 1e-4  # float32 sums only
    back = compressed.read(tmp_path)
    for layer, linear in model.linears.items():
        assert same_tensors(parts(back.linears[layer]), parts(linear)), layer


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_tied_embeddings_stay_tied(tmp_path: Path, kind: str) -> None:
    """Would catch a head that is written beside its embedding, or a tie flag that gets lost."""
    folder = tiny_model(kind, tmp_path / "source")
    model = quantized(folder, QuantSpec(scheme="W8A8"))
    compressed.write(model, tmp_path / "out", torch.float32)
    served = transformers_model(tmp_path / "out")
    assert served.lm_head.weight is served.model.embed_tokens.weight
    assert "lm_head.weight" not in read_tensors(tmp_path / "out")
    assert distance(logits(served), reference_logits(folder, model)) < 5e-3  # as above; biases (qwen2) included


def test_a_tied_head_is_not_quantized(tmp_path: Path) -> None:
    """Would catch codes for a head whose float weight the embedding still needs."""
    folder = tiny_model("qwen2", tmp_path / "source")
    with pytest.raises(RecipeError, match="lm_head: is tied"):
        quantized(folder, QuantSpec(scheme="W8A8", ignore=()))


def test_unknown_tensors_are_kept(source: Path, tmp_path: Path) -> None:
    """Would catch a writer that knows its tensors by name and drops the rest (extra heads, for example)."""
    model = quantized(source, SPECS["w8a8"])
    extra = torch.arange(6).reshape(2, 3)
    model = replace(model, tensors={**model.tensors, "extra.table": extra})
    compressed.write(model, tmp_path, torch.bfloat16)
    assert torch.equal(compressed.read(tmp_path).tensors["extra.table"], extra)


@pytest.mark.parametrize("value", [0.0, SCALE_FLOOR / 2, float("nan"), float("inf")])
def test_unusable_scales_are_not_written(source: Path, tmp_path: Path, value: float) -> None:
    """Would catch a scale that underflows or is NaN at run time, far from its cause."""
    model = quantized(source, SPECS["fp8_static"])
    layer = "model.layers.0.mlp.down_proj"
    bad = replace(model.linears[layer], input_scale=torch.tensor([value]))
    with pytest.raises(OutputError, match=f"{layer}.input_scale"):
        compressed.write(replace(model, linears={**model.linears, layer: bad}), tmp_path, torch.float32)


def test_a_missing_scale_is_named(source: Path, tmp_path: Path) -> None:
    """Would catch a truncated checkpoint that fails with a bare KeyError."""
    compressed.write(quantized(source, SPECS["fp8_static"]), tmp_path, torch.float32)
    stored = read_tensors(tmp_path)
    gone = "model.layers.1.mlp.up_proj.weight_scale"
    kept = {name: stored[name] for name in stored if name != gone}
    write_tensors(tmp_path / "model.safetensors", kept)
    with pytest.raises(SourceError, match=gone):
        compressed.read(tmp_path)


def test_a_draft_is_matched_below_a_prefix(source: Path, tmp_path: Path) -> None:
    """Would catch patterns anchored at `model.`: vLLM loads a draft below `draft_model.`, and would miss them all."""
    from compressed_tensors.utils.match import match_name

    compressed.write(quantized(source, SPECS["mixed"]), tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_1"]["targets"]
    assert any(match_name("draft_model.model.layers.1.mlp.down_proj", t) for t in group)
    assert any(match_name("draft_model.model.layers.1.self_attn.o_proj", t) for t in config["ignore"])
    assert any(match_name("draft_model.lm_head", t) for t in config["ignore"])
    assert not any(match_name("draft_model.model.layers.0.self_attn.o_proj", t) for t in config["ignore"])


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("quantization_config",), -1),
        ("config.json", ("quantization_config", "config_groups"), None),
        ("config.json", ("quantization_config", "config_groups", "group_0", "weights"), {}),
        ("config.json", ("quantization_config", "config_groups", "group_0", "targets"), "x"),
        ("config.json", ("quantization_config", "kv_cache_scheme"), {}),
        ("config.json", ("vocab_size",), 7),
        ("qspec.json", ("rules",), "x"),
        ("qspec.json", ("schemes", "group_0"), {}),
        ("qspec.json", ("default",), "group_9"),
    ],
    ids=str,
)
def test_malformed_metadata_is_refused(source: Path, tmp_path: Path, file: str, path: tuple[str, ...], value: object):
    """Would catch a KeyError from inside, and a checkpoint without a layer's weight that only the engine would miss."""
    compressed.write(quantized(source, SPECS["kv_tensor"]), tmp_path, torch.float32)
    content = json.loads((tmp_path / file).read_text(encoding="utf-8"))
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SourceError):
        compressed.read(tmp_path)


SPARSE = {
    "w8a8": QuantSpec(scheme="W8A8", outliers=OutlierSpec(share=1.0)),
    "w4a16": QuantSpec(scheme="W4A16", group_size=32, outliers=OutlierSpec(share=0.5)),
    "mixed": QuantSpec(scheme="W8A8", rules=MIXED, outliers=OutlierSpec(share=0.003)),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_are_read_back_exactly(source: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Would catch outliers that are rounded with the rest, lost when a layer has none, or read as another tensor."""
    model = quantized(source, SPARSE[name])
    compressed.write(model, tmp_path, dtype)
    back = compressed.read(tmp_path)
    assert back.plan.resolve(back.arch.linears()) == model.plan.resolve(model.arch.linears())
    assert back.tensors.keys() == model.tensors.keys()
    for layer, linear in model.linears.items():
        assert linear.outliers is not None
        assert same_matrix(back.linears[layer].outliers, linear.outliers), layer
    stored = read_tensors(tmp_path)
    part = f"{next(iter(model.linears))}.weight_outlier"
    assert [stored[f"{part}_{end}"].dtype for end in ("indptr", "indices", "values")] == [
        torch.int32,
        torch.int16,
        torch.float16,
    ]
    sidecar = json.loads((tmp_path / "qspec.json").read_text(encoding="utf-8"))
    assert {scheme["outliers"] for scheme in sidecar["schemes"].values()} == {SPARSE[name].outliers.share}


@pytest.mark.parametrize("name", SPARSE)
def test_other_readers_stop_at_outliers(source: Path, tmp_path: Path, name: str) -> None:
    """Would catch a checkpoint that transformers loads without a word, and runs without its largest weights."""
    compressed.write(quantized(source, SPARSE[name]), tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == "dense-and-sparse"
    with pytest.raises(ValueError, match="dense-and-sparse"):
        transformers_model(tmp_path)


def test_outliers_without_the_sidecar_still_count(source: Path, tmp_path: Path) -> None:
    """Would catch a reader that drops them when `qspec.json` is gone, which alone names the share."""
    model = quantized(source, SPARSE["w8a8"])
    compressed.write(model, tmp_path, torch.float32)
    (tmp_path / "qspec.json").unlink()
    back = compressed.read(tmp_path)
    assert all(same_matrix(back.linears[layer].outliers, linear.outliers) for layer, linear in model.linears.items())


@pytest.mark.parametrize("part", ["indptr", "indices", "values"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_outliers_are_named(source: Path, tmp_path: Path, part: str, damage: str) -> None:
    """Would catch a sparse part that is taken for none, or whose indices lead out of the input at run time."""
    compressed.write(quantized(source, SPARSE["w8a8"]), tmp_path, torch.float32)
    stored, name = read_tensors(tmp_path), f"model.layers.1.mlp.up_proj.weight_outlier_{part}"
    kept = {key: stored[key].clone() for key in stored if key != name or damage == "cut"}
    if damage == "cut":
        kept[name] = kept[name][:-1]
    write_tensors(tmp_path / "model.safetensors", kept)
    with pytest.raises(SourceError, match="weight_outlier"):
        compressed.read(tmp_path)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("mlp.up_proj.weight_scale", lambda x: x[:3]),
        ("mlp.up_proj.weight", lambda x: x.T),
        ("mlp.up_proj.weight", lambda x: x.float()),
        ("mlp.up_proj.weight", lambda x: x.view(torch.uint8)),
        ("mlp.up_proj.weight_outlier_values", lambda x: x[None]),
        ("mlp.up_proj.weight_outlier_indptr", lambda x: x.float()),
        ("self_attn.k_scale", lambda x: x.repeat(2)),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    source: Path, tmp_path: Path, part: str, damage: Callable[[Tensor], Tensor]
) -> None:
    """Would catch shapes and types that fail in a kernel, with a traceback and no name."""
    spec = QuantSpec(outliers=OutlierSpec(share=1.0), kv=KVSpec())
    compressed.write(quantized(source, spec), tmp_path, torch.float32)
    stored, name = read_tensors(tmp_path), f"model.layers.1.{part}"
    kept = {key: damage(stored[key]).clone().contiguous() if key == name else stored[key].clone() for key in stored}
    write_tensors(tmp_path / "model.safetensors", kept)
    with pytest.raises(SourceError, match=part.rpartition(".")[0]):
        compressed.read(tmp_path)


INT4_KV = {"format": "int4", "granularity": "token_head"}
OWN_KV = [
    {"granularity": "head", "query": "head", "skip_layers": (1,)},
    {"granularity": "tensor", "query": "tensor", "value": {"format": "int8", "granularity": "token_head"}},
    {"format": "fp8_e4m3", "residual": 64, "key": {"format": "int4", "granularity": "channel", "outliers": 1.0}},
    {"format": "int4", "granularity": "token_head", "value": {**INT4_KV, "outliers": 2.0}},
]


@pytest.mark.parametrize("kv", OWN_KV)
def test_kv_that_only_qspec_knows_reads_back(source: Path, tmp_path: Path, kv: dict[str, Any]) -> None:
    """Would catch a KV part, window, skipped layer or query scale that the files do not hold."""
    model = quantized(source, QuantSpec(scheme="W8A8", kv=KVSpec(**kv)))
    compressed.write(model, tmp_path, torch.float32)
    back = compressed.read(tmp_path)
    assert back.plan.kv == model.plan.kv
    for kind in ("k_scale", "v_scale", "q_scale"):
        assert same_tensors(getattr(back, kind), getattr(model, kind))
    assert not any("self_attn.q_scale" in name for name in back.tensors)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["kv_cache_scheme"] is None) is (model.plan.kv is not None and not model.plan.kv.declared)
