"""Pairs that were damaged, tampered with, made to harm their readers, or never fitted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
import hashlib
import json
import os
from pathlib import Path
import shutil
from typing import Any

import pytest
import torch

from qspec import limited
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import IntegrityError, PairError
from qspec.models.vocab import check_tokenizers
from qspec.pair.check import check, lint, read_manifest
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.report.verdict import obstacles
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


def change_json(pair: Path, name: str, *path: str | int, value: Any) -> None:
    """Put another value into a JSON file of the pair; manifest and digests are made right again."""
    file = pair / name
    body = json.loads(file.read_text(encoding="utf-8"))
    node = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file.write_text(json.dumps(body), encoding="utf-8")
    list_again(pair)


def change_tensor(pair: Path, half: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put another tensor into a half; manifest and digests are made right again."""
    file = pair / half / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in read_tensors(file).items()}
    tensors[name] = change(tensors[name])
    write_tensors(file, tensors)
    list_again(pair)


def refused(pair: Path, part: str, *readers: Callable[[Path], Any]) -> None:
    """Whoever reads the pair refuses it in one line; whether it is checked first or run at once makes no difference."""
    for read in readers or (check, open_pair):
        with pytest.raises(IntegrityError, match=part) as caught:
            read(pair)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


GROUP = ("quantization_config", "config_groups", "group_0")
PATIENT = "re:" + "(.*)*" * 8 + "x"


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("head_dim",), 2**30, "head_dim 1073741824: must be"),
        (("num_labels",), 2**31, "num_labels"),
        (("max_position_embeddings",), 2**40, "max_position_embeddings"),
        (("sliding_window",), 2**32, "sliding_window"),
        (("intermediate_size",), 1 << 20, r"config\.json says"),
        (("rms_norm_eps",), float("nan"), "rms_norm_eps"),
        (("rms_norm_eps",), float("inf"), "rms_norm_eps"),
        (("rms_norm_eps",), -1e-5, "rms_norm_eps"),
        (("rope_parameters", "rope_theta"), float("nan"), "rotary frequency"),
        (("rope_parameters", "rope_theta"), 1e-30, "rotary frequency"),
        ((*GROUP, "weights", "group_size"), 0, "group or tile of 0"),
        ((*GROUP, "weights", "group_size"), 10**30, "group or tile"),
        ((*GROUP, "input_activations", "group_size"), 48, "64 inputs do not divide into groups of 48"),
        ((*GROUP, "targets"), [PATIENT], "cannot be read within"),
        ((*GROUP, "targets"), ["re:a{99999999999}"], "repetition number"),
    ],
    ids=str,
)
def test_configs_that_harm_their_reader(
    pair: Path, path: tuple[str, ...], value: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch gigabytes made of a number, a pattern that is matched for years, and NaN that answers in blanks."""
    if value == [PATIENT]:
        monkeypatch.setattr(limited, "SECONDS", 0.05)
    if "group_size" in path:
        change_json(pair, "target/config.json", *path[:-1], "strategy", value="group")
    change_json(pair, "target/config.json", *path, value=value)
    refused(pair, part)


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("kv", "residual"), 2**40, r"kv\.residual"),
        (("kv", "skip_layers"), [7], "layer 7: the model has 2"),
        (("rules",), [[PATIENT, None]], "cannot be read within"),
        (("default",), None, "another plan than config.json"),
        (("head_ids",), [3, 299, 300], "reaches from 3 to 300, ids are 0 to 299"),
        (("head_ids",), [3, 3], "do not rise"),
    ],
    ids=str,
)
def test_sidecars_that_harm_their_reader(
    pair: Path, path: tuple[str, ...], value: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch caches of any size, layers that are not there, and ids that lead out of the head."""
    if path == ("rules",):
        monkeypatch.setattr(limited, "SECONDS", 0.05)
    if path[0] == "kv":
        whole = {"format": "fp8_e4m3", "granularity": "tensor", "scales": "calibrated"}
        change_json(pair, "target/qspec.json", "kv", value=whole)
    change_json(pair, "target/qspec.json", *path, value=value)
    refused(pair, part)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{{ 'x' * 99999999999 }}",
    ],
    ids=["loops", "doubled text", "multiplied text"],
)
def test_templates_that_harm_their_reader(pair: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a chat template, which is a program, run without limits of time and memory."""
    monkeypatch.setattr(limited, "SECONDS", 0.05)
    (pair / "target" / "chat_template.jinja").write_text(template, encoding="utf-8")
    list_again(pair)
    refused(pair, "cannot be read within|template that fails", open_pair)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}] * 12,
            },
        ),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a+)+(a+)+(a+)+$"}, "behavior": "Isolated", "invert": False},
        ),
    ],
)
def test_tokenizers_that_harm_their_reader(
    pair: Path, part: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a normalizer that makes gigabytes of one letter, and a pattern that is matched for years."""
    monkeypatch.setattr(limited, "SECONDS", 0.05)
    change_json(pair, "target/tokenizer.json", part, value=value)
    refused(pair, "cannot be read", open_pair)


def test_a_tokenizer_of_more_ids_than_rows(pair: Path) -> None:
    """Would catch a token that begins every prompt and lies outside of the embedding."""
    path = ("post_processor", "special_tokens", "<s>", "ids")
    change_json(pair, "target/tokenizer.json", *path, value=[60_000])
    refused(pair, "gives token 60000, the embedding has 300 rows")


@pytest.mark.parametrize(
    ("half", "name", "change", "part"),
    [
        ("target", "model.layers.0.mlp.up_proj.weight_scale", torch.zeros_like, "scales are finite"),
        ("target", "model.layers.1.mlp.up_proj.weight_scale", lambda x: x.fill_(3e38), "scales are finite"),
        ("target", "model.layers.0.self_attn.k_scale", lambda x: x.fill_(3e38), "scales are finite"),
        ("target", "model.layers.0.mlp.up_proj.weight_scale", lambda x: x[:0], "weight_scale|do not fit"),
        ("target", "model.layers.0.mlp.up_proj.weight_scale", lambda x: x.to(torch.int32), "weight_scale|int32"),
        ("target", "model.norm.weight", lambda x: x[:0], "has shape"),
        ("target", "model.norm.weight", lambda x: x.to(torch.int64), "is no float"),
        ("target", "model.embed_tokens.weight", lambda x: x[:, :-1], "has shape"),
        ("draft", "model.layers.0.mlp.up_proj.weight_shape", lambda x: x * 2, "do not hold"),
        ("draft", "model.layers.0.mlp.up_proj.weight_packed", lambda x: x[:-1], "do not hold"),
    ],
)
def test_tensors_that_harm_their_reader(
    pair: Path, half: str, name: str, change: Callable[[torch.Tensor], torch.Tensor], part: str
) -> None:
    """Would catch scales that make zeros or infinities of a layer, and tensors of another size or type than is read."""
    change_tensor(pair, half, name, change)
    refused(pair, part)


@pytest.mark.parametrize("name", ["mlp.down_proj.bias", "mlp.down_proj.weight_g_idx", "input_layernorm.bias"])
def test_tensors_that_a_layer_does_not_have(pair: Path, name: str) -> None:
    """Would catch a bias as long as it likes that is added to a layer without one, and an order of inputs ignored."""
    file = pair / "target" / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in read_tensors(file).items()}
    write_tensors(file, tensors | {f"model.layers.0.{name}": torch.zeros(3)})
    list_again(pair)
    refused(pair, "is no part of a llama model|do not fit")


def test_a_longer_context_than_the_model_has(pair: Path) -> None:
    """Would catch a cache of terabytes, asked for by the recipe, where nobody checked the pair."""
    rewrite(pair, lambda body: body["recipe"]["speculation"].update(max_length=2**40))
    refused(pair, "the target knows 256 positions")


def test_a_sparse_manifest(pair: Path) -> None:
    """Would catch gigabytes of nothing, read whole because they are called pair.json."""
    with (pair / "pair.json").open("ab") as file:
        file.truncate(12 << 30)
    refused(pair, "is larger than")


@pytest.mark.parametrize("name", ["target/config.json", "target/qspec.json", "draft/model.safetensors", "pair.json"])
def test_a_pipe_in_place_of_a_file(pair: Path, name: str) -> None:
    """Would catch a reader that waits for whoever writes into a pipe, for ever."""
    (pair / name).unlink()
    os.mkfifo(pair / name)
    refused(pair, "is a pipe|is missing")


def test_a_link_out_of_the_pair(pair: Path) -> None:
    """Would catch a pair that runs with files of others because only `check` looks at links."""
    path = pair / "target" / "config.json"
    path.rename(pair.parent / "elsewhere.json")
    path.symlink_to(pair.parent / "elsewhere.json")
    refused(pair, "is a link")


def test_results_of_another_form(pair: Path) -> None:
    """Would catch a traceback over a report that was swapped for something else."""
    measured = {"metric": "memory read", "value": 1.0, "unit": "B/s", "n": 1}
    of = {"files": {}, "settings": {"target": [1]}, "environment": {}}
    speed = {"arms": [], "ratios": [], "bandwidth": measured, "provenance": of}
    body = {"format_version": 1, "name": "x", "recipe": {"target": [1]}, "environment": {}, "speed": speed}
    (pair / "report").mkdir()
    (pair / "report" / "results.json").write_text(json.dumps(body), encoding="utf-8")
    entries = {path.relative_to(pair).as_posix(): path for path in pair.rglob("*") if path.is_file()}
    files = [
        {"path": name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in sorted(entries.items())
        if name != "pair.json"
    ]
    rewrite(pair, lambda manifest: manifest.update(files=files))
    assert "speed: target is not what was measured" in obstacles(pair)
