"""Rewrites that must not change what a model computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.hf import open_trainable
from qspec.errors import RecipeError
from qspec.models.layers import keep_layers, truncate_layers
from qspec.nn.eager.decoder import Decoder
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.quantization.smooth import Rewrites, notes, transform
from qspec.records import LayerStats, LoadedModel
from qspec.schema.quantization import KVSpec, QuantSpec, SmoothingSpec
from qspec.schema.recipe import FusionSpec
from qspec.schemes.build import build_plan
from tests.observed import ROWS, load, observe
from tests.served import distance, logits, transformers_model
from tests.tiny import KINDS, NEWER_KINDS, tiny_model

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
SMOOTH = QuantSpec(scheme="W8A8", smoothing=SmoothingSpec(strength=0.6))


def run(
    folder: Path, spec: QuantSpec, fusion: FusionSpec, stats: LayerStats | None
) -> tuple[LoadedModel, LayerStats | None, Rewrites]:
    return transform(load(folder), stats, spec, fusion, build_plan(spec))


def float_logits(model: LoadedModel, folder: Path) -> Tensor:
    compressed.write_float(model, folder, torch.float32)
    return logits(transformers_model(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["smooth", "fold", "both"])
def test_the_function_stays(tmp_path: Path, kind: str, change: str) -> None:
    """Would catch a factor that one reader of a norm misses, GQA heads mixed up, a bias or Gemma's offset forgotten."""
    folder = tiny_model(kind, tmp_path / "source")
    smooth, fold = change != "fold", change != "smooth"
    spec = SMOOTH if smooth else QuantSpec(scheme="W8A8")
    fusion = FusionSpec(fold_norms=fold)
    model, _, done = run(folder, spec, fusion, observe(folder))
    original = load(folder).tensors
    assert any(not torch.equal(model.tensors[name], original[name]) for name in original)
    after = float_logits(model, tmp_path / "after")
    # Factors are applied in float64 and rounded once to float32: what is left is the noise of float32 sums.
    assert distance(after, logits(transformers_model(folder))) < 2e-5
    assert len(notes([done], spec, fusion)) == smooth + fold


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_statistics_follow_the_model(tmp_path: Path, kind: str) -> None:
    """Would catch static scales taken from inputs that the transformed model never sees."""
    folder = tiny_model(kind, tmp_path / "source")
    model, stats, _ = run(folder, SMOOTH, FusionSpec(fold_norms=True), observe(folder))
    compressed.write_float(model, tmp_path / "after", torch.float32)
    seen = observe(tmp_path / "after")
    assert stats is not None
    for layer, amax_K in seen.amax_K.items():
        assert torch.allclose(stats.amax_K[layer], amax_K, rtol=1e-4, atol=1e-5), layer  # float32 sums, as above
        assert torch.allclose(stats.inputs_TK[layer], seen.inputs_TK[layer], rtol=1e-3, atol=1e-4), layer


def test_smoothing_pays_on_outliers(tmp_path: Path) -> None:
    """Would catch a search that returns the wrong end of its grid, or factors applied upside down."""
    folder = tiny_model("llama", tmp_path / "source")
    model = load(folder)
    gain = model.tensors["model.layers.0.input_layernorm.weight"].clone()
    gain[::16] *= 60  # a few channels far above the rest, as in trained models
    spiked = replace(model, tensors={**model.tensors, "model.layers.0.input_layernorm.weight": gain})
    compressed.write_float(spiked, tmp_path / "spiked", torch.float32)
    exact = logits(transformers_model(tmp_path / "spiked"))
    stats = observe(tmp_path / "spiked")
    losses = {}
    for name, smoothing in {"plain": None, "auto": SmoothingSpec()}.items():
        spec = QuantSpec(scheme="W8A8", smoothing=smoothing)
        changed, after, done = transform(spiked, stats, spec, FusionSpec(), build_plan(spec))
        compressed.write(quantize(changed, after, build_plan(spec)), tmp_path / name, torch.float32)
        losses[name] = distance(logits(transformers_model(tmp_path / name)), exact)
    assert losses["auto"] < 0.6 * losses["plain"]
    assert notes([done], spec, FusionSpec())[0].startswith("Smoothing: ")


def test_auto_leaves_alone_what_gains_nothing(tmp_path: Path) -> None:
    """Would catch smoothing that must choose a strength even where every one loses."""
    folder = tiny_model("llama", tmp_path)
    stats = observe(folder)
    flat = {name: torch.ones_like(x) for name, x in stats.inputs_TK.items()}
    ones = {name: torch.ones_like(x) for name, x in stats.amax_K.items()}
    spec = QuantSpec(scheme="W8A8", smoothing=SmoothingSpec())
    even = {name: torch.sign(t) if t.dim() == 2 else t for name, t in load(folder).tensors.items()}
    model = replace(load(folder), tensors=even)  # weights ±1 and inputs 1 are exact in int8 as they are
    changed, _, done = transform(
        model, replace(stats, amax_K=ones, inputs_TK=flat), spec, FusionSpec(), build_plan(spec)
    )
    assert notes([done], spec, FusionSpec()) == ["Smoothing: no layer gained from it."]
    assert all(torch.equal(changed.tensors[name], even[name]) for name in even)


def test_static_kv_scales_keep_their_values(tmp_path: Path) -> None:
    """Would catch V smoothed after its range was measured: the stored scale would be wrong."""
    folder = tiny_model("llama", tmp_path)
    spec = SMOOTH.model_copy(update={"kv": KVSpec()})
    model, _, _ = run(folder, spec, FusionSpec(), observe(folder))
    name = "model.layers.0.self_attn.v_proj.weight"
    before = load(folder).tensors[name]
    ratio = model.tensors[name] / before
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4)  # columns moved (from the norm), rows did not


def test_originals_are_not_touched(tmp_path: Path) -> None:
    """Would catch a rewrite in place: the original is still needed as the baseline of every measurement."""
    folder = tiny_model("llama", tmp_path)
    model, stats = load(folder), observe(folder)
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    amax = {name: x.clone() for name, x in stats.amax_K.items()}
    transform(model, stats, SMOOTH, FusionSpec(fold_norms=True), build_plan(SMOOTH))
    assert all(torch.equal(model.tensors[name], before[name]) for name in before)
    assert all(torch.equal(stats.amax_K[name], amax[name]) for name in amax)


def test_smoothing_needs_data(tmp_path: Path) -> None:
    """Would catch smoothing that is asked for and silently left out."""
    with pytest.raises(RecipeError, match="smoothing: needs calibration data"):
        run(tiny_model("llama", tmp_path), SMOOTH, FusionSpec(), None)


def test_truncated_models_load(tmp_path: Path) -> None:
    """Would catch a config that still counts the removed layers, or tensors of theirs left behind."""
    model = load(tiny_model("qwen2", tmp_path / "source"))
    short = truncate_layers(model, 1)
    compressed.write_float(short, tmp_path / "short", torch.float32)
    served = transformers_model(tmp_path / "short")
    assert len(served.model.layers) == 1
    assert compressed.read(tmp_path / "short").arch == short.arch
    assert not any("layers.1." in name for name in short.tensors)
    assert torch.equal(short.tensors["model.norm.weight"], model.tensors["model.norm.weight"])


@pytest.mark.parametrize("n", [0, 3])
def test_truncation_has_limits(tmp_path: Path, n: int) -> None:
    """Would catch a draft with more layers than the target, or none."""
    with pytest.raises(RecipeError, match="the model has 2 layers"):
        truncate_layers(load(tiny_model("llama", tmp_path)), n)


@pytest.mark.parametrize("kind", NEWER_KINDS)
@pytest.mark.parametrize("change", ["smooth", "fold", "both"])
def test_the_function_of_newer_kinds_stays(tmp_path: Path, kind: str, change: str) -> None:
    """Would catch a post-norm folded into what it does not feed, and a router or an expert that a factor misses."""
    original = load(tiny_model(kind, tmp_path))
    spec = SMOOTH if change != "fold" else QuantSpec(scheme="W8A8")
    fusion = FusionSpec(fold_norms=change != "smooth")
    model, stats, done = transform(original, calibrate(original, ROWS), spec, fusion, build_plan(spec))
    after, before = (Decoder.from_float(m).forward(torch.tensor(ROWS[0])) for m in (model, original))
    # Factors are applied in float64 and rounded once to float32: what is left is the noise of float32 sums.
    assert distance(after, before) < 2e-5
    if change != "fold":
        assert f"model.layers.1.{original.arch.mlp_norm}" in done.strengths
    seen = calibrate(model, ROWS)
    assert stats is not None
    for layer, amax_K in seen.amax_K.items():
        if not layer.endswith((".q", ".k", ".v")):
            assert torch.allclose(stats.amax_K[layer], amax_K, rtol=1e-3, atol=1e-4), layer  # float32 sums, as above


@pytest.mark.parametrize("layers", [[0], [1], [0, 2], [1, 2]])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "qwen3_moe", "phi3", "mixtral"])
def test_chosen_layers_are_read_back(tmp_path: Path, kind: str, layers: list[int]) -> None:
    """Would catch numbers of removed layers left in the architecture, windows and dense layers that belong to others
    (the config's periods count from the whole model's first layer), and tensors under their old numbers.
    """
    own = {"num_hidden_layers": 3}
    if kind == "gemma3_text":
        own["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    short = keep_layers(load(tiny_model(kind, tmp_path / "source", **own)), layers)
    compressed.write_float(short, tmp_path / "short", torch.float32)
    assert compressed.read(tmp_path / "short").arch == short.arch
    tokens_T = torch.tensor(ROWS[0])
    with torch.no_grad():
        theirs_TV = open_trainable(tmp_path / "short", short.arch)(tokens_T[None]).logits[0]
    assert distance(Decoder.from_float(short).forward(tokens_T), theirs_TV) < 2e-5  # the noise of float32 sums


@pytest.mark.parametrize("layers", [[], [2, 1], [1, 1], [-1, 0], [0, 4]])
def test_layers_that_cannot_be_kept_are_refused(tmp_path: Path, layers: list[int]) -> None:
    """Would catch a layer twice, layers in another order than they learned in, and a negative number as the last."""
    with pytest.raises(RecipeError, match="must be different layers of 0 … 3 in rising order; give those"):
        keep_layers(load(tiny_model("llama", tmp_path, num_hidden_layers=4)), layers)
