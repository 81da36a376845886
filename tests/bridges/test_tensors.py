"""safetensors files and folders."""

import json
import os
from pathlib import Path

import pytest
import safetensors
import torch

from qspec.bridges.tensors import (
    INDEX,
    SINGLE,
    LazyTensors,
    read_tensors,
    weight_files,
    weights_sha256,
    write_shards,
    write_tensors,
)
from qspec.errors import SourceError

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def sharded(folder: Path) -> Path:
    """Two shards and their index."""
    write_tensors(folder / "one.safetensors", {"a": A})
    write_tensors(folder / "two.safetensors", {"b": B})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """Would catch a changed dtype, shape or value, or a header that transformers refuses."""
    low = torch.tensor([[-448.0, 0.5]]).to(torch.float8_e4m3fn)
    write_tensors(tmp_path / SINGLE, {"a": A, "b": B, "low": low})
    back = read_tensors(tmp_path)
    assert set(back) == {"a", "b", "low"}
    assert torch.equal(back["a"], A)
    assert torch.equal(back["b"], B)
    assert torch.equal(back["low"].view(torch.uint8), low.view(torch.uint8))
    assert (back.shape("a"), back.dtype("b"), back.dtype("low")) == ((2, 3), "BF16", "F8_E4M3")
    with safetensors.safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_views_and_shared_memory_are_written_whole(tmp_path: Path) -> None:
    """Would catch a transposed or tied tensor that is refused, or written in its storage's order."""
    base = torch.arange(12.0).reshape(3, 4)
    given = {"base": base, "same": base, "turned": base.T, "rows": base[1:]}
    write_tensors(tmp_path / "x.safetensors", given)
    back = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], value) for name, value in given.items())


def test_tensors_that_were_read_can_be_written(tmp_path: Path) -> None:
    """Would catch a copy of a model that fails because mapped tensors share one file's memory."""
    write_tensors(tmp_path / "x.safetensors", {"a": A, "c": A + 1})
    write_tensors(tmp_path / "y.safetensors", read_tensors(tmp_path / "x.safetensors"))
    back = read_tensors(tmp_path / "y.safetensors")
    assert torch.equal(back["a"], A)
    assert torch.equal(back["c"], A + 1)


def test_shards_are_one_mapping(tmp_path: Path) -> None:
    """Would catch a shard that is read for the wrong names, and a file opened before it is needed."""
    tensors = read_tensors(sharded(tmp_path))
    assert (len(tensors), set(tensors)) == (2, {"a", "b"})
    assert torch.equal(tensors["b"], B)
    assert [path.name for path in weight_files(tmp_path)] == [INDEX, "one.safetensors", "two.safetensors"]
    assert set(tensors.without({"a"})) == {"b"}
    lazy = LazyTensors({"a": tmp_path / "absent.safetensors"})
    assert "a" in lazy
    with pytest.raises(SourceError, match=r"absent\.safetensors"):
        lazy["a"]


def test_digest_follows_weights(tmp_path: Path) -> None:
    """Would catch two different models recorded under one digest."""
    folder = sharded(tmp_path)
    first = weights_sha256(folder)
    assert first == weights_sha256(folder)
    write_tensors(folder / "two.safetensors", {"b": B + 1})  # of the same size, as in two fine-tunes of one model
    assert weights_sha256(folder) != first
    write_tensors(folder / "x.safetensors", {"a": A})
    one = weights_sha256(folder / "x.safetensors")
    write_tensors(folder / "x.safetensors", {"a": A + 1})
    assert weights_sha256(folder / "x.safetensors") != one


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "lists this shard, but it is missing"),
        ({"a": "../one.safetensors"}, "shards lie beside their index"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "puts this tensor here, but it is missing"),
        (["a"], "is not a safetensors index"),
    ],
)
def test_broken_index_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    """Would catch a half download that fails deep inside a run, and an index that reads outside its folder."""
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SourceError, match=message):
        read_tensors(folder)


def test_folder_without_usable_weights_is_refused(tmp_path: Path) -> None:
    """Would catch pickle files taken for weights, and a guess among several files."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(SourceError, match="no safetensors weights"):
        weight_files(tmp_path)
    write_tensors(tmp_path / "x.safetensors", {"a": A})
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]
    write_tensors(tmp_path / "y.safetensors", {"a": A})
    with pytest.raises(SourceError, match="no index"):
        weight_files(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"cut off")
    with pytest.raises(SourceError, match="not a readable safetensors file"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_get_the_modes_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    """Would catch weights that only their owner can read, beside a config that everybody can: the library's own way."""
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "one.safetensors", {"a": torch.zeros(2)})
        write_tensors(tmp_path / "one.safetensors", {"a": torch.ones(2)})
        write_shards(tmp_path, [("a", torch.zeros(2))])
        (tmp_path / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}
