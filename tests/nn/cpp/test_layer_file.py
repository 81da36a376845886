"""Weights that are packed once into a file."""

import logging
from pathlib import Path

import pytest

from qspec.errors import RecipeError, SourceError
from qspec.nn.cpp import layer_file
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.layer_file import BLOCK, ENDS, LayerFile, pack_once
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schemes.build import build_plan
from tests.observed import load
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> QuantizedModel:
    if reason := NativeDecoder.missing():
        pytest.skip(f"needs the C++ core: {reason}")
    plan = build_plan(QuantSpec(scheme="W8A8"))
    return quantize(load(tiny_model("llama", tmp_path_factory.mktemp("source"))), None, plan)


def test_parts_are_whole_blocks_that_follow_one_another(model: QuantizedModel, tmp_path: Path) -> None:
    """Catches parts that reads past the file cache cannot begin at, and ones that overlap."""
    pack_once(model, tmp_path / "a.layers")
    parts = LayerFile(tmp_path / "a.layers").parts
    assert list(parts) == [*model.arch.layers, ENDS]
    end = 0
    for part in parts.values():
        assert (part.start, part.start % BLOCK, part.size % BLOCK) == (end, 0, 0)
        end += part.size


def test_a_file_is_made_once(model: QuantizedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches packing at every start, and a file of another layout that is taken for this one's."""
    path = tmp_path / "folder" / "a.layers"
    pack_once(model, path)
    made = path.stat().st_ino
    pack_once(model, path)
    assert path.stat().st_ino == made
    monkeypatch.setattr(layer_file, "_layout", lambda: "tomorrow's")
    pack_once(model, path)
    assert path.stat().st_ino != made
    assert {file.name for file in path.parent.iterdir()} == {".lock", "a.layers"}


@pytest.mark.parametrize("place", [0, -1, -200])
def test_a_damaged_file_is_made_anew(
    model: QuantizedModel, tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches codes, an index or a digest with a bit of another value, and a file that ends too early."""
    path = tmp_path / "a.layers"
    pack_once(model, path)
    whole = path.read_bytes()
    bad = bytearray(whole)
    bad[place] ^= 1
    for content in (bytes(bad), whole[: place or 1000], b""):
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            pack_once(model, path)
        assert path.read_bytes() == whole
        assert f"{path} is damaged" in caplog.text


def test_a_model_that_the_core_does_not_run_is_one_line(tmp_path: Path) -> None:
    """Catches a file of weights that nothing reads as they are meant."""
    with pytest.raises(RecipeError, match=r"memory_limit: .* no code for head size 12, no multiple of 8; open"):
        pack_once(load(tiny_model("llama", tmp_path, head_dim=12)), tmp_path / "a.layers")
    assert not list(tmp_path.glob("*.layers"))


def test_reads_past_the_file_cache_are_refused_where_there_are_none(
    model: QuantizedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a disk that is said to be measured and is not."""
    pack_once(model, tmp_path / "a.layers")
    monkeypatch.delattr("os.O_DIRECT", raising=False)
    with pytest.raises(SourceError, match="direct_io: reads past the file cache as only Linux does"):
        LayerFile(tmp_path / "a.layers", direct=True)
