"""Tensors that are read instead of mapped."""

from pathlib import Path

import pytest
import torch

from qspec.bridges import staging
from qspec.bridges.staging import Staging
from qspec.bridges.tensors import read_tensors, write_index, write_tensors
from qspec.errors import SourceError

SHAPES = {"a.weight": (300, 40), "b.weight": (7,), "c.scale": (3, 1), "d.empty": (0,)}
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int64)


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Three layers over two files, dtypes mixed, and something of no layer."""
    made = {
        f"model.layers.{layer}.{name}": torch.arange(layer, layer + torch.Size(shape).numel()).reshape(shape).to(dtype)
        for layer in range(3)
        for (name, shape), dtype in zip(SHAPES.items(), DTYPES[layer:], strict=False)
    } | {"model.norm.weight": torch.rand(5000)}
    halves = {"one.safetensors": list(made)[::2], "two.safetensors": list(made)[1::2]}
    for file, names in halves.items():
        write_tensors(folder / file, {name: made[name] for name in names})
    write_index(folder, {name: file for file, names in halves.items() for name in names})
    return made


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.reshape(-1).tolist() == y.reshape(-1).tolist()


@pytest.mark.parametrize("direct", [False, True])
def test_every_tensor_is_what_it_is_in_a_mapped_file(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches offsets, ends of files and blocks that are off, alone and within a layer, in chunks of any size."""
    made = written(tmp_path)
    staged = Staging(tmp_path, direct)
    tensors = read_tensors(tmp_path, staged.opener)
    monkeypatch.setattr(staging, "_CHUNK", 8192)
    assert all(same(tensors[name], tensor) for name, tensor in made.items())
    assert all((tensors.shape(name), tensors.dtype(name)) for name in made)
    layers = [f"model.layers.{i}" for i in range(3)]
    buffer = staged.buffer(layers)
    for layer in layers * 2:
        staged.read(layer, buffer)
        staged.show(layer, buffer)
        own = {name for name in made if name.startswith(f"{layer}.")}
        assert set(staged._shown) == own
        assert all(same(tensors[name], tensor) for name, tensor in made.items())
        staged.hide()


def test_a_layer_is_read_in_few_runs(tmp_path: Path) -> None:
    """Catches a request for every tensor: a disk answers few large ones much faster."""
    tensors = {f"model.layers.{i}.{n}": torch.zeros(9000, dtype=torch.int8) for i in range(20) for n in "abcdefgh"}
    scales = {f"{name}_scale": torch.zeros(300) for name in tensors}
    write_tensors(tmp_path / "model.safetensors", tensors | scales)
    staged = Staging(tmp_path)
    assert [len(runs) for runs in staged._runs.values()] == [2] * 20
    assert all(staged.size(f"model.layers.{i}") < 9000 * 8 + 300 * 32 + 4 * staging.BLOCK for i in range(20))


def test_files_that_cannot_be_opened_are_one_line(tmp_path: Path) -> None:
    """Catches a traceback for a folder that is none, or a file that is no safetensors."""
    with pytest.raises(SourceError, match="holds no safetensors weights"):
        Staging(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x05" * 100)
    with pytest.raises(SourceError, match="not a readable safetensors file"):
        Staging(tmp_path)
