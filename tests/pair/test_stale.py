"""Measurements that no longer speak of their pair."""

from pathlib import Path
from typing import Any

import pytest

from qspec.cli import main
from qspec.pair.check import check, overridden, read_manifest, stale
from qspec.pair.package import package, seal
from qspec.schema.results import Results
from qspec.serving import vllm as serve
from qspec.serving.vllm import serving
from tests.pairs import KV, halves, recipe


@pytest.fixture(autouse=True)
def wide_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "environment", lambda: {"instruction_sets": "avx2 avx512f avx512_vnni"})


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("made")
    pair = package(*halves(folder / "source"), recipe(), folder)
    digests = {f"pair/{e.path}": e.sha256 for e in read_manifest(pair).files if e.path.endswith("safetensors")}
    results = Results(name="tiny", recipe=recipe().as_dict(), environment={}, digests=digests)
    _seal(pair, results, folder)
    return pair, results


def _seal(pair: Path, results: Results, folder: Path) -> None:
    report = folder / "report"
    report.mkdir(exist_ok=True)
    (report / "results.json").write_text(results.dump(), encoding="utf-8")
    seal(pair, results.model_dump(mode="json"), report)


def test_a_pair_as_it_was_measured_is_not_stale(sealed: tuple[Path, Results], tmp_path: Path) -> None:
    """Would catch a warning that everybody learns to ignore."""
    pair, results = sealed
    assert stale(read_manifest(pair), results) == []
    assert not [found for found in check(pair) if "stale" in found]
    assert serving(pair).warnings == ()


def test_another_half_or_another_setting_is_named(sealed: tuple[Path, Results], tmp_path: Path) -> None:
    """Would catch acceptance of one draft told of another, and of one KV format told of another."""
    pair, results = sealed
    manifest = read_manifest(pair)
    draft = "pair/draft/model.safetensors"
    other = results.model_copy(update={"digests": results.digests | {draft: "0" * 64}})
    assert stale(manifest, other) == ["draft/model.safetensors is not the file that was measured"]
    target = {"model": "tiny", "quantization": {"scheme": "W8A8", "kv": KV | {"granularity": "head"}}}
    changed = results.model_copy(update={"recipe": recipe(target=target).as_dict()})
    assert stale(manifest, changed) == ["target.quantization.kv.granularity is not what was measured"]
    copy = package(*halves(tmp_path / "source"), recipe(), tmp_path)
    _seal(copy, other, tmp_path)
    assert "stale, measure again: draft/model.safetensors is not the file that was measured" in check(copy)
    assert serving(copy).warnings == ("draft/model.safetensors is not the file that was measured",)


@pytest.mark.parametrize("half", ["target", "draft"])
@pytest.mark.parametrize(
    ("change", "named"),
    [({"scheme": "FP8_DYNAMIC"}, "scheme"), ({"kv": None}, "kv"), ({"kv": {"scales": "cast"}}, "kv.scales")],
)
def test_a_change_of_either_half_is_named(
    sealed: tuple[Path, Results], half: str, change: dict[str, Any], named: str
) -> None:
    """Would catch acceptance that is told on although the scheme or the cache of one half is another one now."""
    pair, results = sealed
    fields = recipe().as_dict()
    before = fields[half]["quantization"]
    fields[half]["quantization"] = before | {
        key: before[key] | value if isinstance(value, dict) else value for key, value in change.items()
    }
    other = results.model_copy(update={"recipe": fields})
    assert stale(read_manifest(pair), other) == [f"{half}.quantization.{named} is not what was measured"]


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
