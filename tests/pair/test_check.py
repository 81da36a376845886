"""Pairs that were damaged, tampered with, or never fitted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
import hashlib
import json
from pathlib import Path
import shutil
from typing import Any

import pytest
import torch

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import IntegrityError, PairError
from qspec.models.vocab import check_tokenizers
from qspec.pair.check import check, lint, read_manifest
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.schema.manifest import FileEntry
from tests.pairs import halves, recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return package(*halves(folder / "source"), recipe(), folder)


@pytest.fixture
def pair(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "pair"))


def test_an_intact_pair(whole: Path) -> None:
    """Would catch a check that says nothing, or that only looks at files."""
    files, target, draft, tokenizer = check(whole)
    assert "sizes and sha256 match pair.json" in files
    assert target.startswith("target: 14 x W8A8, 1 x none")
    assert draft.startswith("draft: 7 x W4A16, 1 x none")
    assert "300 tokens" in tokenizer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("name", ["q_proj.weight_scale", "k_scale"])
@pytest.mark.parametrize("half", ["target", "draft"])
def test_a_damaged_scale_does_not_open(pair: Path, half: str, name: str, value: float) -> None:
    """Would catch a pair that answers in garbage, or in a stack trace, where its checksums were not asked for."""
    file = pair / half / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in read_tensors(file).items()}
    scale = tensors[f"model.layers.0.self_attn.{name}"]
    scale.view(-1)[0] = value
    write_tensors(file, tensors)
    with pytest.raises(IntegrityError, match=rf"{half}: model\.layers\.0.*{name}: scales are finite.*intact copy"):
        open_pair(pair)


def test_any_changed_byte_is_found(pair: Path) -> None:
    """Would catch a file, the manifest included, that no digest covers."""
    paths = sorted(path for path in pair.rglob("*") if path.is_file())
    assert len(paths) > 10
    for path in paths:
        content = path.read_bytes()
        for position in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            with pytest.raises(IntegrityError, match=path.relative_to(pair).as_posix()):
                check(pair)
        path.write_bytes(content)
    check(pair)


def test_missing_files(pair: Path) -> None:
    """Would catch a download that stopped early."""
    (pair / "draft" / "tokenizer.json").unlink()
    with pytest.raises(IntegrityError, match=r"draft/tokenizer\.json: is missing"):
        check(pair)


def test_extra_files(pair: Path) -> None:
    """Would catch code or weights slipped into a pair that somebody trusts."""
    (pair / "target" / "modeling.py").write_text("", encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"target/modeling\.py: is not listed"):
        check(pair)


def test_cut_files(pair: Path) -> None:
    """Would catch a file that was truncated."""
    path = pair / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"target/model\.safetensors: has \d+ bytes instead of"):
        check(pair)


def test_links_lead_out(pair: Path) -> None:
    """Would catch a pair whose bytes lie, and change, elsewhere."""
    path = pair / "target" / "config.json"
    moved = pair.parent / "elsewhere.json"
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(IntegrityError, match=r"target/config\.json: is a link"):
        check(pair)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "target/../../outside", "target//config.json"])
def test_paths_stay_inside(pair: Path, path: str) -> None:
    """Would catch a manifest that makes a reader hash, or trust, files outside the pair."""

    def lead_out(body: dict[str, Any]) -> None:
        body["files"][0]["path"] = path

    rewrite(pair, lead_out)
    with pytest.raises(IntegrityError, match=r"pair\.json"):
        check(pair)


def test_halves_stay_inside(pair: Path) -> None:
    """Would catch a manifest whose half is a folder outside the pair, which no digest covers."""

    def lead_out(body: dict[str, Any]) -> None:
        body["draft"]["folder"] = "../source"

    rewrite(pair, lead_out)
    with pytest.raises(IntegrityError, match=r"pair\.json: draft\.folder"):
        check(pair)


def rewrite(pair: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change `pair.json` as an attacker who knows its digest would."""
    body = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    del body["digest"]
    change(body)
    text = json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    body["digest"] = hashlib.sha256(text.encode()).hexdigest()
    text = json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (pair / "pair.json").write_text(text, encoding="utf-8")


def list_again(pair: Path) -> None:
    """Bring sizes and digests of the manifest up to date, so that only the content is wrong."""
    entries = []
    for entry in read_manifest(pair).files:
        content = (pair / entry.path).read_bytes()
        entries.append(FileEntry(path=entry.path, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
    manifest = read_manifest(pair).model_copy(update={"files": tuple(entries)})
    (pair / "pair.json").write_bytes(manifest.dump())


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", float("nan")),
        ("model.layers.1.self_attn.k_scale", float("inf")),
        ("model.norm.weight", float("nan")),
    ],
)
def test_unusable_numbers_are_found(pair: Path, tensor: str, value: float) -> None:
    """Would catch NaN that was sealed with a correct digest."""
    path = pair / "target" / "model.safetensors"
    stored = read_tensors(path)
    tensors = {name: stored[name].clone() for name in stored}
    tensors[tensor].fill_(value)
    write_tensors(path, tensors)
    list_again(pair)
    with pytest.raises(IntegrityError, match=tensor):
        check(pair)


def test_kv_scales_that_were_never_calibrated(tmp_path: Path) -> None:
    """Would catch an export whose KV scales are all the default 1.0."""
    target, _ = halves(tmp_path)
    ones = {layer: torch.ones(1) for layer in target.k_scale}
    with pytest.raises(IntegrityError, match=r"are all 1\.0"):
        lint(replace(target, k_scale=ones, v_scale=ones))


def test_schemes_are_those_of_the_manifest(pair: Path) -> None:
    """Would catch a half that was swapped for another one, digests and all."""
    shutil.rmtree(pair / "target")
    shutil.copytree(pair / "draft", pair / "target")

    def drop(body: dict[str, Any]) -> None:
        names = {f"target/{path.name}" for path in (pair / "target").iterdir()}
        body["files"] = [f for f in body["files"] if not f["path"].startswith("target/") or f["path"] in names]

    rewrite(pair, drop)
    list_again(pair)
    with pytest.raises(IntegrityError, match=r"target/config\.json: has layers"):
        check(pair)


def test_no_manifest(tmp_path: Path) -> None:
    """Would catch a folder that is no pair, reported as an internal error."""
    with pytest.raises(IntegrityError, match=r"pair\.json: is missing"):
        check(tmp_path)


@dataclass
class Words:
    """A tokenizer reduced to its vocabulary."""

    ids: dict[str, int]

    def vocabulary(self) -> dict[str, int]:
        return self.ids


def test_tokenizers_are_compared_token_by_token() -> None:
    """Would catch vocabularies of one size whose ids mean different words."""
    target: Any = Words({"<s>": 0, "a": 1, "b": 2})
    check_tokenizers(target, target)
    swapped: Any = Words({"<s>": 0, "b": 1, "a": 2})
    with pytest.raises(PairError, match=r"2 tokens, first '[ab]': id \d in the target and \d in the draft"):
        check_tokenizers(target, swapped)
    longer: Any = Words({"<s>": 0, "a": 1, "b": 2, "c": 3})
    with pytest.raises(PairError, match="1 tokens, first 'c': id None in the target and 3 in the draft"):
        check_tokenizers(target, longer)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda body: body["recipe"].update(seed="x"), "recipe: seed 'x'"),
        (lambda body: body["recipe"].update(draft={"kind": "ngram"}), "draft kind 'self'"),
        (lambda body: body["recipe"]["speculation"].update(max_length=10**6), "the target knows 256 positions"),
        (lambda body: body["draft"].update(folder="target"), "halves lie in target and draft"),
    ],
)
def test_recipe_and_halves_belong_together(pair: Path, change: Callable[[dict[str, Any]], None], part: str) -> None:
    """Would catch a manifest, digest and all, that opens as another pair than was checked, or not at all."""
    rewrite(pair, change)
    with pytest.raises(IntegrityError, match=part):
        check(pair)
