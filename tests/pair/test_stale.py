"""Measurements that no longer speak of their pair."""

import json
from pathlib import Path
import shutil
from typing import Any

import pytest
import torch

from qspec.bridges.heads import speculator
from qspec.cli import main
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize
from qspec.pair.check import overridden, read_manifest, stale
from qspec.pair.package import package
from qspec.report.verdict import obstacles
from qspec.schema.manifest import FileEntry, Manifest
from qspec.schema.recipe import Recipe
from qspec.schema.results import Results
from qspec.serving import vllm as serve
from qspec.serving.vllm import serving
from tests.example_results import example
from tests.pairs import change, halves, measured_of, put, recipe


@pytest.fixture(autouse=True)
def wide_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "environment", lambda: {"instruction_sets": "avx2 avx512f avx512_vnni"})


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("made")
    pair = package(*halves(folder / "source"), recipe(), folder)
    results = measured_of(pair, recipe())
    put(results, pair, folder / "report")
    return pair, results


def test_a_pair_as_it_was_measured_is_not_stale(sealed: tuple[Path, Results], tmp_path: Path) -> None:
    """Would catch a warning that everybody learns to ignore."""
    pair, results = sealed
    assert stale(read_manifest(pair), results) == []
    assert not [found for found in obstacles(pair) if "what was measured" in found]
    assert serving(pair).warnings == ()


TASKS = "needles, mmlu_pro (qspec)"
DRAFTED = "the draft's fidelity"
TARGET = f"fidelity on wikitext2, short answers, {DRAFTED}, {TASKS}, speed"


def test_each_measurement_is_judged_by_what_it_is_of(sealed: tuple[Path, Results], tmp_path: Path) -> None:
    """Would catch acceptance of one draft told of another, and accuracy doubted for a draft that it never saw."""
    pair, results = sealed
    manifest = read_manifest(pair)
    for half, named in (("draft", f"{DRAFTED}, speed"), ("target", TARGET)):
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            path = f"{half}/{name}"
            other = _with_digest(manifest, path)
            assert stale(other, results) == [f"{named}: {path} is not the file that was measured"]
    added = FileEntry(path="target/more.json", bytes=1, sha256="0" * 64)
    more = manifest.model_copy(update={"files": (*manifest.files, added)})
    assert stale(more, results) == [f"{TARGET}: target/more.json is not the file that was measured"]
    noted = results.model_copy(update={"accuracy": example().accuracy})
    assert stale(manifest, noted) == [f"{TARGET.removesuffix(', speed')}: nothing says which files were measured"]


def _with_digest(manifest: Manifest, path: str) -> Manifest:
    """The manifest of a pair in which one file is another."""
    files = [e.model_copy(update={"sha256": "0" * 64}) if e.path == path else e for e in manifest.files]
    return manifest.model_copy(update={"files": tuple(files)})


def test_a_pair_says_what_is_stale(
    sealed: tuple[Path, Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a check, or a server, that is silent about a draft that was never measured, or says so twice."""
    pair = Path(shutil.copytree(sealed[0], tmp_path / "pair"))
    change(pair, "draft", "_scale", 2.0)
    reason = f"{DRAFTED}, speed: draft/model.safetensors is not the file that was measured"
    assert serving(pair).warnings == (reason,)
    assert main(["check", str(pair)]) == 0
    assert capsys.readouterr().out.count(reason) == 1


@pytest.mark.parametrize("half", ["target", "draft"])
@pytest.mark.parametrize(
    ("change", "named"),
    [({"scheme": "FP8_DYNAMIC"}, "scheme"), ({"kv": None}, "kv"), ({"kv": {"scales": "cast"}}, "kv.scales")],
)
def test_a_change_of_either_half_is_named(
    sealed: tuple[Path, Results], half: str, change: dict[str, Any], named: str
) -> None:
    """Would catch acceptance that is told on although the scheme or the cache of one half is another one now."""
    pair, _ = sealed
    fields = recipe().as_dict()
    before = fields[half]["quantization"]
    fields[half]["quantization"] = before | {
        key: before[key] | value if isinstance(value, dict) else value for key, value in change.items()
    }
    other = measured_of(pair, Recipe.model_validate(fields))
    names = f"{DRAFTED}, speed" if half == "draft" else TARGET
    assert stale(read_manifest(pair), other) == [f"{names}: {half}.quantization.{named} is not what was measured"]


def test_a_change_of_the_head_is_named(tmp_path: Path) -> None:
    """Would catch the acceptance of one speculator head told of another, and accuracy doubted for it."""
    head = MLPSpeculator(SpeculatorShape(64, 300, 2, 16, shared=True), None, *torch.randn(2, 300, 64))
    initialize(head, torch.Generator().manual_seed(0))
    speculator.write(head, tmp_path / "head")
    sizes = {"n_predict": 2, "inner_dim": 16, "shared": True}
    draft = {"kind": "mlp_speculator", "model": str(tmp_path / "head"), **sizes}
    made_for = Recipe.model_validate(recipe().as_dict() | {"draft": draft})
    pair = package(halves(tmp_path / "source")[0], None, made_for, tmp_path, tmp_path / "head")
    results = measured_of(pair, made_for)
    assert stale(read_manifest(pair), results) == []
    change(pair, "draft", "_scale", 1.5)
    assert stale(read_manifest(pair), results) == [
        f"{DRAFTED}, speed: draft/model.safetensors is not the file that was measured"
    ]


def test_a_change_of_a_lookup_is_named(tmp_path: Path) -> None:
    """Would catch a speed with drafts of one length told of another, where a draft has no file that could change."""
    made_for = recipe("ngram")
    pair = package(halves(tmp_path / "source")[0], None, made_for, tmp_path)
    fields = made_for.as_dict()
    fields["draft"]["max_ngram"] = 3
    before = measured_of(pair, Recipe.model_validate(fields))
    assert stale(read_manifest(pair), before) == [f"{DRAFTED}, speed: draft.max_ngram is not what was measured"]


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("speculation.draft_length.k", 5, "speed"),
        ("speculation.top_k", 7, "speed"),
        ("speculation.max_length", 64, "speed"),
        ("draft.lookup", "suffix", "speed"),
        ("draft.tree", {"nodes": 4}, "speed"),
        ("device", "h100", "speed"),
        ("dtype", "bfloat16", TARGET),
        ("speculation.temperature", 0.5, ""),
        ("target.model", "elsewhere", ""),
        ("target.base_model", "org/name", ""),
        ("seed", 5, ""),
        ("evaluation.fidelity.windows", 5, ""),
    ],
)
def test_a_setting_makes_stale_what_it_decides(
    sealed: tuple[Path, Results], field: str, value: object, names: str
) -> None:
    """Would catch a speed with one draft length told of another, and a draft's fidelity doubted for a length."""
    pair, _ = sealed
    made = Recipe.of(recipe().as_dict(), (f"{field}={json.dumps(value)}",), "other")
    expected = [f"{names}: {field} is not what was measured"] if names else []
    assert stale(read_manifest(pair), measured_of(pair, made)) == expected


def test_arguments_by_hand_that_change_acceptance_are_warned_of(
    sealed: tuple[Path, Results], capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a server whose KV format nobody has measured, started without a word."""
    assert overridden(["--kv-cache-dtype=auto", "--port", "1"]) == [
        "--kv-cache-dtype is given by hand: what was measured does not hold for it"
    ]
    assert main(["serve", str(sealed[0]), "--print", "--", "--dtype", "float16"]) == 0
    assert "warning: --dtype is given by hand" in capsys.readouterr().err


def test_a_pair_is_told_what_a_device_makes_of_it(
    sealed: tuple[Path, Results], capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a device rule that plans know and finished pairs do not."""
    assert main(["check", str(sealed[0]), "--device", "h100"]) == 0
    assert "is expected to pay from about" in capsys.readouterr().out
    assert main(["check", str(sealed[0]), "--device", "b200"]) == 2
    assert "SM75 to SM90" in capsys.readouterr().err
