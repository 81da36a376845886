"""Speculator heads on disk, qspec's own and those of ibm-ai-platform's accelerators."""

import json
from pathlib import Path

import pytest
import torch

from qspec.bridges import speculator
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, swap_linears

H, V = 8, 12
EMBEDDING, OUTPUT = torch.randn(2, V, H, generator=torch.Generator().manual_seed(0))
HIDDEN, TOKENS = torch.randn(3, H, generator=torch.Generator().manual_seed(1)), torch.tensor([[1, 2], [3, 4], [11, 0]])


def a_head(**fields) -> MLPSpeculator:
    shape = SpeculatorShape(H, V, 2, 16, **fields)
    head = MLPSpeculator(shape, torch.tensor([0, 3, 4, 9]) if shape.draft_vocab else None, EMBEDDING, OUTPUT)
    initialize(head, torch.Generator().manual_seed(2))
    return head.requires_grad_(False)


@pytest.mark.parametrize("fields", [{}, {"tie_weights": True, "scale_input": True}, {"shared": True, "draft_vocab": 4}])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_head_reads_back_as_it_was_written(tmp_path, fields, rounded):
    """Would catch a switch that is not stored, tied layers read apart, codes without scales, ids out of order."""
    head = a_head(**fields)
    if rounded:
        swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    speculator.write(head, tmp_path, {"seed": 3})
    back = speculator.read(tmp_path, EMBEDDING, OUTPUT)
    if rounded:  # rows of the target are not stored; whoever opens the head rounds them
        swap_linears(back, lambda linear: Int8Map.rounded(linear.weight))
    assert back.shape == head.shape
    assert speculator.read_config(tmp_path)["qspec"]["seed"] == 3
    for mine, its in zip(back(HIDDEN, TOKENS), head(HIDDEN, TOKENS), strict=True):
        assert torch.equal(mine, its)


def test_accelerators_are_read(tmp_path):
    """Would catch other tensor names than the published ones, and a config.json without qspec's own fields refused."""
    head = a_head()
    names = [f"{part}.{i}" for i in range(2) for part in ("emb", "proj", "head", "ln")]
    tensors = {f"speculator.{name}.weight": head.get_submodule(name).weight for name in names}
    tensors |= {f"speculator.ln.{i}.bias": head.ln[i].bias for i in range(2)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "inner_dim": 16,
        "vocab_size": V,
        "n_predict": 2,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4],
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = speculator.read(tmp_path, EMBEDDING, OUTPUT)
    for mine, its in zip(back(HIDDEN, TOKENS), head(HIDDEN, TOKENS), strict=True):
        assert torch.equal(mine, its)
    speculator.write(head, tmp_path / "ours")
    assert read_tensors(tmp_path / "ours").keys() == tensors.keys()


def test_heads_that_do_not_fit_are_refused(tmp_path):
    """Would catch a head of another target, another file, or a damaged one that fails in the middle of a request."""
    speculator.write(a_head(), tmp_path / "head")
    with pytest.raises(PairError, match="trained for this target"):
        speculator.read(tmp_path / "head", EMBEDDING[:, :6], OUTPUT[:, :6])
    tensors = dict(read_tensors(tmp_path / "head"))
    tensors["speculator.proj.1.weight"] = torch.zeros(2, 2)
    write_tensors(tmp_path / "head/model.safetensors", tensors)
    with pytest.raises(SourceError, match=r"proj.1.weight: has shape \(2, 2\)"):
        speculator.read(tmp_path / "head", EMBEDDING, OUTPUT)
    del tensors["speculator.ln.0.bias"]
    write_tensors(tmp_path / "head/model.safetensors", tensors)
    with pytest.raises(SourceError, match=r"ln.0.bias: is missing"):
        speculator.read(tmp_path / "head", EMBEDDING, OUTPUT)
    (tmp_path / "head/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SourceError, match="model_type 'llama'"):
        speculator.read_shape(Path(tmp_path / "head"))
