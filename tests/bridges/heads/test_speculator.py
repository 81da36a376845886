"""Speculator heads on disk, qspec's own and those of ibm-ai-platform's accelerators."""

import json
from pathlib import Path

import pytest
import torch

from qspec.bridges.heads import speculator
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


@pytest.mark.parametrize(
    ("ids", "part"),
    [
        ([-1, 3, 4, 9], "reaches from -1 to 9, ids are 0 to 11"),
        ([0, 3, 4, 60_000], "reaches from 0 to 60000"),
        ([0, 3, 3, 9], "must rise"),
        ([9, 4, 3, 0], "must rise"),
        ([0, 3, 4], "has shape"),
        ([0.0, 3.0, 4.0, 9.0], "is torch.float32 in place of torch.int32"),
    ],
)
def test_ids_index_the_vocabulary(tmp_path, ids, part):
    """Would catch rows read outside of the embedding, and drafts of other tokens than the head has learned."""
    speculator.write(a_head(draft_vocab=4), tmp_path)
    tensors = dict(read_tensors(tmp_path))
    write_tensors(tmp_path / "model.safetensors", tensors | {"speculator.ids": torch.tensor(ids)})
    with pytest.raises(SourceError, match=rf"speculator\.ids:? {part}"):
        speculator.read(tmp_path, EMBEDDING, OUTPUT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_predict", 2**30), ("inner_dim", 2**40), ("inner_dim", "x"), ("tie_weights", 1), ("emb_dim", True)],
)
def test_sizes_are_those_of_the_file(tmp_path, field, value):
    """Would catch layers made as large as a number says, before anybody looks whether the file holds them."""
    speculator.write(a_head(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(SourceError, match=f"{field} {value!r}: must be"):
        speculator.read(tmp_path, EMBEDDING, OUTPUT)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("proj.0.weight", lambda x: x[:-1]),
        ("proj.0.weight", lambda x: x.float()),
        ("proj.0.weight_scale", lambda x: x[:-1]),
        ("head.1.weight_scale", lambda x: x.int()),
    ],
)
def test_codes_and_scales_fit_their_layer(tmp_path, name, change):
    """Would catch INT8 layers of other sizes than the core reads."""
    head = a_head()
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    speculator.write(head, tmp_path)
    tensors = dict(read_tensors(tmp_path))
    tensors[f"speculator.{name}"] = change(tensors[f"speculator.{name}"]).clone()
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(SourceError, match=f"{name}:? (has shape|is torch)"):
        speculator.read(tmp_path, EMBEDDING, OUTPUT)
