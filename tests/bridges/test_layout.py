"""Checkpoints of architectures with their own names on disk, against transformers as it writes and loads them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.hf import load_folder
from qspec.bridges.layout import tensor_shapes
from qspec.bridges.tensors import SINGLE, read_tensors, write_tensors
from qspec.errors import OutputError, SourceError
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.outliers import same_matrix
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import QLinear, QuantizedModel
from qspec.schema.quantization import KVSpec, OutlierSpec, QuantSpec, RuleSpec
from qspec.schemes.build import build_plan
from tests.observed import ROWS
from tests.served import distance
from tests.tiny import NEWER_KINDS, tiny_model

MIXTURES = ("mixtral", "qwen3_moe")
QKV = RuleSpec(match=r"re:.*(q|k|v)_proj", scheme="none")
SPECS = {
    "w8a8": QuantSpec(scheme="W8A8", kv=KVSpec()),
    "w4a16": QuantSpec(scheme="W4A16", group_size=32),
    "fp8_static": QuantSpec(scheme="FP8"),
    "outliers": QuantSpec(scheme="W8A8", outliers=OutlierSpec(share=1)),
    "some": QuantSpec(scheme="FP8_DYNAMIC", rules=(QKV,)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny_model(kind, tmp_path_factory.mktemp(kind)) for kind in NEWER_KINDS}


def quantized(folder: Path, spec: QuantSpec, share_scales: bool = True) -> QuantizedModel:
    model = load_folder(folder)
    return quantize(model, calibrate(model, ROWS), build_plan(spec), share_scales)


def parts(linear: QLinear) -> list[Tensor]:
    found = (linear.weight.codes.view(torch.uint8), linear.weight.scale, linear.weight.zero_point, linear.input_scale)
    return [part for part in found if part is not None]


def served_logits(folder: Path) -> Tensor:
    """By transformers, every tensor in its place; eager, because its other attention leaves out soft-capping."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ROWS[0]])).logits[0]
    return logits


@pytest.mark.parametrize("kind", NEWER_KINDS)
def test_float_checkpoints_keep_their_names(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Would catch a layer split at the wrong row, w2 taken for w3, or a name that only qspec knows."""
    model = load_folder(folders[kind])
    assert {name: tuple(tensor.shape) for name, tensor in model.tensors.items()} == tensor_shapes(model.arch)
    compressed.write_float(model, tmp_path, torch.float32)
    written, original = read_tensors(tmp_path), read_tensors(folders[kind])
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)


@pytest.mark.parametrize("kind", NEWER_KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_read_gives_back_what_was_written(folders: dict[str, Path], kind: str, name: str, tmp_path: Path) -> None:
    """Would catch codes, scales or input scales that are lost or mixed up where layers are stored as one."""
    model = quantized(folders[kind], SPECS[name])
    compressed.write(model, tmp_path, torch.float32)
    back = compressed.read(tmp_path)
    assert (back.arch, back.notes) == (model.arch, model.notes)
    assert back.plan.resolve(back.arch.linears()) == model.plan.resolve(model.arch.linears())
    assert list(back.linears) == list(model.linears)
    for layer, linear in model.linears.items():
        assert all(map(torch.equal, parts(back.linears[layer]), parts(linear))), layer
        assert same_matrix(back.linears[layer].outliers, linear.outliers), layer
    assert back.tensors.keys() == model.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in model.tensors.items())
    assert all(torch.equal(back.k_scale[layer], scale) for layer, scale in model.k_scale.items())


@pytest.mark.parametrize("kind", NEWER_KINDS)
def test_transformers_computes_the_same_w4a16(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Would catch scales, packed codes or experts that transformers puts elsewhere: it loads, and answers worse."""
    model = quantized(folders[kind], SPECS["w4a16"])
    compressed.write(model, tmp_path, torch.float32)
    want = Decoder.from_quantized(model, kernels="reference").forward(torch.tensor(ROWS[0]))
    assert distance(served_logits(tmp_path), want) < 1e-5  # float32, the same weights: only sums differ


@pytest.mark.parametrize("kind", [kind for kind in NEWER_KINDS if kind not in MIXTURES])
def test_transformers_computes_the_same_w8a8(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Would catch a target that misses a merged layer. transformers reads no INT8 experts: mixtures are not here."""
    model = quantized(folders[kind], QuantSpec(scheme="W8A8"))
    compressed.write(model, tmp_path, torch.float32)
    want = Decoder.from_quantized(model, kernels="reference").forward(torch.tensor(ROWS[0]))
    # Inputs are rounded otherwise (their maximum maps to 127.5 there, 127 here); a wrong scale is off by about 1.
    assert distance(served_logits(tmp_path), want) < 0.1


@pytest.mark.parametrize("kind", MIXTURES)
def test_transformers_loads_fp8_experts(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Would catch FP8 experts under names or shapes of scales that transformers does not dequantize."""
    model = quantized(folders[kind], QuantSpec(scheme="FP8_DYNAMIC"))
    compressed.write(model, tmp_path, torch.float32)
    want = Decoder.from_quantized(model, kernels="reference").forward(torch.tensor(ROWS[0]))
    # It runs experts on unrounded inputs and bfloat16 weights, which may move a token to another expert.
    assert distance(served_logits(tmp_path), want) < 0.2


@pytest.mark.parametrize("kind", MIXTURES)
def test_stacked_experts_are_read(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Would catch experts saved as transformers holds them being refused, or gate taken for up."""
    model, arch = load_folder(folders[kind]), load_folder(folders[kind]).arch
    tensors = {name: tensor for name, tensor in model.tensors.items() if ".experts." not in name}
    for layer in filter(arch.router, arch.layers):
        gate, up, down = (
            torch.stack([model.tensors[f"{mlp}.{part}_proj.weight"] for mlp in arch.mlps(layer)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{layer}.mlp.experts.gate_up_proj": torch.cat((gate, up), 1)}
        tensors |= {f"{layer}.mlp.experts.down_proj": down}
    compressed.write_float(model, tmp_path, torch.float32)
    write_tensors(tmp_path / SINGLE, tensors)
    back = load_folder(tmp_path)
    assert back.tensors.keys() == model.tensors.keys()
    assert all(torch.equal(back.tensors[name], model.tensors[name]) for name in model.tensors)


def test_a_merged_layer_of_the_wrong_size_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Would catch rows that are left over where q/k/v are cut apart."""
    compressed.write_float(load_folder(folders["phi3"]), tmp_path, torch.float32)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(tmp_path).items()}
    tensors["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(129, 64)
    write_tensors(tmp_path / SINGLE, tensors)
    with pytest.raises(SourceError, match=r"v_proj.weight: has shape \[33, 64\]"):
        load_folder(tmp_path)


def test_layers_stored_as_one_must_share_their_scale(folders: dict[str, Path], tmp_path: Path) -> None:
    """Would catch three scales of which a checkpoint of Phi-3 has room for one."""
    model = quantized(folders["phi3"], SPECS["fp8_static"], share_scales=False)
    with pytest.raises(OutputError, match=r"qkv_proj.*weight scales differ.*share_scales"):
        compressed.write(model, tmp_path, torch.float32)


def test_routers_are_ignored_by_name(folders: dict[str, Path]) -> None:
    """Would catch a server that looks for codes of a router, which has none."""
    names = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
    for kind, block in names.items():
        config = compressed.quantization_config(quantized(folders[kind], SPECS["w4a16"]))
        assert config is not None
        assert rf"re:.*layers\.\d+\.{block}\.gate$" in config["ignore"]
