"""Rotations leave the function as it is, also composed with everything that comes after them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges import compressed, quant_config
from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError, SourceError
from qspec.nn.eager.decoder import Decoder
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rotate import rotate, rotated_arch
from qspec.quantization.rtn import quantize
from qspec.quantization.smooth import transform
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec, RotationSpec, SmoothingSpec
from qspec.schema.recipe import FusionSpec
from qspec.schemes.build import build_plan
from tests.observed import ROWS
from tests.served import IDS, distance, logits, reference_logits, transformers_model
from tests.tiny import tiny_model

R1, R2, R4 = (RotationSpec(r1=one == "r1", r2=one == "r2", r4=one == "r4") for one in ("r1", "r2", "r4"))
ALL = RotationSpec(r4=True)
ODD = {"hidden_size": 56, "head_dim": 14, "intermediate_size": 96, "num_key_value_heads": 1}
MODELS: list[tuple[str, dict[str, Any]]] = [
    *[(kind, {}) for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "qwen3_moe")],
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", ODD),  # 56 = 2 * 28, 14 has no Hadamard matrix, 96 = 8 * 12
]
# Rotations are folded in float64 and rounded once to float32: what is left is the noise of float32 sums.
ROUNDING = 5e-6


def tiny(kind: str, folder: Path, **overrides: Any) -> LoadedModel:
    return load_folder(tiny_model(kind, folder, **overrides))


def run(model: LoadedModel) -> Tensor:
    return Decoder.from_float(model, max_length=64).forward(IDS[0])


def made(model: LoadedModel, rotation: RotationSpec, spec: QuantSpec) -> QuantizedModel:
    """The whole way of one half, without its search for codes."""
    model, notes = rotate(model, rotation, seed=1)
    plan = build_plan(spec)
    stats = calibrate(model, ROWS)
    model, after, _ = transform(model, stats, spec, FusionSpec(), plan)
    return replace(quantize(model, after, plan), notes=tuple(notes))


@pytest.mark.parametrize("spec", [R1, R2, R4, ALL], ids=["r1", "r2", "r4", "all"])
@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_the_function_stays(kind: str, overrides: dict[str, Any], spec: RotationSpec, tmp_path: Path) -> None:
    """Catches a reader or writer that is missed, a bias, Gemma's offset or scale, or the heads of GQA mixed up."""
    model = tiny(kind, tmp_path, **overrides)
    rotated, notes = rotate(model, spec, seed=3)
    assert distance(run(rotated), run(model)) < ROUNDING
    names = [name for name in model.tensors if name.endswith(("down_proj.weight", "v_proj.weight"))]
    assert any(not torch.equal(rotated.tensors[name], model.tensors[name]) for name in names)
    assert notes


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_rotated_checkpoints_need_no_runtime_support(kind: str, tmp_path: Path) -> None:
    """Catches a head that is written tied, a config that ties it again, or gains that are not the identity on disk."""
    model = tiny(kind, tmp_path / "source")
    rotated, _ = rotate(model, RotationSpec(), seed=3)
    compressed.write_float(rotated, tmp_path / "rotated", torch.float32)
    assert distance(logits(transformers_model(tmp_path / "rotated")), run(model)) < 2e-5  # another attention kernel
    again = compressed.read(tmp_path / "rotated")
    assert not again.arch.tied
    assert (again.tensors["model.norm.weight"] + again.arch.norm_offset == 1).all()


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_the_whole_way(kind: str, tmp_path: Path) -> None:
    """Catches statistics of the unrotated model, smoothing that undoes a rotation, or codes that are read otherwise."""
    model = tiny(kind, tmp_path / "source")
    spec = QuantSpec(scheme="W4A16", group_size=32, smoothing=SmoothingSpec())
    quantized = made(model, RotationSpec(), spec)
    compressed.write(quantized, tmp_path / "made", torch.float32)
    read = compressed.read(tmp_path / "made")
    ours = Decoder.from_quantized(read, max_length=64, kernels="reference").forward(IDS[0])
    assert torch.equal(ours, Decoder.from_quantized(quantized, max_length=64, kernels="reference").forward(IDS[0]))
    assert distance(ours, run(model)) < 0.5  # 4 bits of random weights cost 0.35, another function 1.4
    assert distance(logits(transformers_model(tmp_path / "made")), ours) < 2e-5  # float32 sums
    assert read.notes[0].startswith("Residual stream rotated (r1)")


def test_served_activations_are_those_of_the_rotated_model(tmp_path: Path) -> None:
    """Catches weights that transformers rounds other inputs for than the rotated ones."""
    model = tiny("llama", tmp_path / "source")
    quantized = made(model, RotationSpec(), QuantSpec(scheme="W8A8"))
    compressed.write(quantized, tmp_path / "made", torch.float32)
    compressed.write_float(rotate(model, RotationSpec(), 1)[0], tmp_path / "rotated", torch.float32)
    want = reference_logits(tmp_path / "rotated", quantized)
    # one input on the edge of a rounding step may fall to either side; a wrong rotation gives about 1
    assert distance(logits(transformers_model(tmp_path / "made")), want) < 5e-3


def test_r4_is_written_and_read(tmp_path: Path) -> None:
    """Catches a checkpoint that forgets its transform, or says one that compressed-tensors would apply otherwise."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    model = tiny("llama", tmp_path / "source")
    quantized = made(model, ALL, QuantSpec(scheme="W4A16", group_size=32))
    compressed.write(quantized, tmp_path / "made", torch.float32)
    read = compressed.read(tmp_path / "made")
    assert read.arch.down_hadamard
    ours = Decoder.from_quantized(read, max_length=64, kernels="reference").forward(IDS[0])
    served = transformers_model(tmp_path / "made")
    assert distance(logits(served), ours) > 0.3  # transformers ignores it: `exports` says so
    written = compressed.quantization_config(read)
    assert written is not None
    config = TransformConfig.model_validate(written["transform_config"])
    config.config_groups["r4"].apply = config.config_groups["r4"].apply[:1]  # the weights have theirs already
    apply_transform_config(served, config)
    assert distance(logits(served), ours) < 2e-5  # float32 sums


def test_r4_of_a_float_half_is_read(tmp_path: Path) -> None:
    """Catches a half without `quantization_config` whose transform is lost."""
    model = tiny("llama", tmp_path / "source", **ODD)
    compressed.write_float(rotate(model, R4, 0)[0], tmp_path / "made", torch.float32)
    read = compressed.read(tmp_path / "made")
    assert distance(Decoder.from_quantized(read, max_length=64).forward(IDS[0]), run(model)) < ROUNDING


def test_other_transforms_are_refused() -> None:
    """Catches a foreign checkpoint with a transform at run time that would be left out silently."""
    mine = quant_config.encode_transforms(True)
    assert quant_config.decode_transforms(mine)
    assert not quant_config.decode_transforms({})
    scheme = mine["config_groups"]["r4"]
    offline = [args | {"location": "weight_output"} for args in scheme["apply"]]
    assert not quant_config.decode_transforms({"config_groups": {"R1": scheme | {"apply": offline}}})
    keys = [scheme["apply"][0] | {"location": "k_cache", "targets": ["re:.*self_attn$"]}]
    for other in ({"apply": keys}, {"type": "random-hadamard"}, {"head_dim": 64}, {"randomize": True}):
        with pytest.raises(SourceError, match="only the Hadamard transform of down_proj's input"):
            quant_config.decode_transforms({"config_groups": {"x": scheme | other}})


def test_a_tied_head_is_untied(tmp_path: Path) -> None:
    """Catches a head that keeps the embedding's weight: folding the last gain makes them differ."""
    model = tiny("gemma", tmp_path)
    rotated, notes = rotate(model, RotationSpec(), seed=0)
    assert model.arch.tied
    assert not rotated.arch.tied
    assert rotated.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in rotated.tensors
    assert "lm_head.weight" in list(rotated.tensors)
    assert len(rotated.tensors) == len(model.tensors) + 1 == len(list(rotated.tensors))
    assert not torch.equal(rotated.lm_head(), rotated.tensors["model.embed_tokens.weight"])
    assert any("no longer shares" in note for note in notes)
    values, _ = rotate(model, R2, seed=0)
    assert values.arch.tied
    assert "lm_head.weight" not in values.tensors


def test_the_view_keeps_nothing(tmp_path: Path) -> None:
    """Catches a cache (a large model would be in memory twice), and a tensor that differs when asked for again."""
    model = tiny("llama", tmp_path)
    asked: list[str] = []

    class Counting(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    rotated, _ = rotate(replace(model, tensors=Counting(model.tensors)), RotationSpec(), seed=0)
    assert not asked
    name = "model.layers.1.mlp.up_proj.weight"
    first, second = rotated.tensors[name], rotated.tensors[name]
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert asked == [name, "model.layers.1.post_attention_layernorm.weight"] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_piece_is_rotated_as_the_whole(tmp_path: Path, first: int) -> None:
    """Catches a rotation that is drawn anew, or a norm looked for that is not in the piece."""
    model = tiny("qwen2", tmp_path)
    whole, _ = rotate(model, ALL, seed=5)
    kept = {name: model.tensors[name] for name in model.tensors if name.startswith(f"model.layers.{first}.")}
    arch = replace(model.arch, first_layer=first, n_layers=1, has_head=False)
    piece, _ = rotate(replace(model, arch=arch, tensors=kept), ALL, seed=5)
    assert set(piece.tensors) == set(kept)
    assert all(torch.equal(piece.tensors[name], whole.tensors[name]) for name in kept)
    other, name = rotate(model, ALL, seed=6)[0], f"model.layers.{first}.mlp.up_proj.weight"
    assert not torch.equal(other.tensors[name], whole.tensors[name])


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    """Catches folds in the source's dtype: a gain times a weight in bfloat16 loses what rotation should keep."""
    model = tiny("llama", tmp_path)
    short = replace(model, tensors={name: model.tensors[name].bfloat16() for name in model.tensors})
    wide = replace(model, tensors={name: tensor.float() for name, tensor in short.tensors.items()})
    rotated, again = rotate(short, RotationSpec(), 0)[0], rotate(wide, RotationSpec(), 0)[0]
    assert all(torch.equal(rotated.tensors[name], again.tensors[name]) for name in rotated.tensors)
    assert distance(run(rotated), run(wide)) < ROUNDING


def test_outliers_are_spread(tmp_path: Path) -> None:
    """Catches a rotation that keeps the function and does nothing: spiked channels must cost less than before."""
    model = tiny("llama", tmp_path)
    spiked = dict(model.tensors)
    for name in [n for n in spiked if n.endswith("input_layernorm.weight")]:
        spiked[name] = spiked[name].clone()
        spiked[name][::16] *= 60  # a few channels far above the rest, as in trained models
    model = replace(model, tensors=spiked)
    spec, losses = QuantSpec(scheme="W8A8"), {}
    plan = build_plan(spec)
    for name, source in {"plain": model, "rotated": rotate(model, RotationSpec(), 0)[0]}.items():
        got = Decoder.from_quantized(quantize(source, None, plan), max_length=64).forward(IDS[0])
        losses[name] = distance(got, run(model))
    assert losses["rotated"] < 0.7 * losses["plain"]


def test_what_cannot_be_rotated_is_refused(tmp_path: Path) -> None:
    """Catches post-norms rotated all the same (another function), or R4 without a fast transform."""
    arch = tiny("llama", tmp_path).arch
    assert rotated_arch(arch, None) is arch
    with pytest.raises(RecipeError, match="r1 of llama: norms what attention and the MLP write"):
        rotated_arch(replace(arch, post_norms=True), R1)
    assert rotated_arch(replace(arch, post_norms=True), R2).post_norms
    with pytest.raises(RecipeError, match="r4 of 50 inputs: no Hadamard matrix"):
        rotated_arch(replace(arch, intermediate_size=50), R4)
