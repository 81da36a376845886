"""The recorded search: what `--again` measures anew, and what it keeps."""

from collections.abc import Iterable
import json
from pathlib import Path
import sys
from typing import Any

import pytest

from qspec.tune import measure as tune_measure
from scripts import tune as bench_tune
from tests.tiny import tiny_model
from tests.tune.test_search import tuned

ROOT = Path(__file__).resolve().parents[2]

TIMED = {"times", "rounds", "prompts", "lookup", "runs"}


def _files(work: Path) -> dict[str, bytes]:
    paths = [path for path in work.rglob("*") if path.is_file() and path.suffix != ".html"]
    return {path.relative_to(work).as_posix(): path.read_bytes() for path in paths}


def _but_runs(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("seconds/runs-")}


def test_again_measures_seconds_anew_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions from another day than their confirmations; models and acceptance measured twice for nothing."""
    model = tiny_model("llama", tmp_path / "model")
    tune = {"drafts": {"ngram": {"kind": "ngram"}, "self": {"kind": "self"}}}
    path, work = tmp_path / "recipe.yaml", tmp_path / "work"
    path.write_text(tuned(tmp_path, model, tune=tune).dump())
    monkeypatch.setattr(bench_tune, "WORK", work)
    monkeypatch.setattr(bench_tune, "BASELINE", tmp_path / "tune.json")
    monkeypatch.setattr(bench_tune, "ALONE", {"original": bench_tune.ALONE["original"]})

    def search(*options: str) -> dict[str, bytes]:
        monkeypatch.setattr(sys, "argv", ["bench_tune", "--recipe", str(path), *options])
        bench_tune.main()
        return _files(work)

    def spent(*_: Any) -> None:
        raise AssertionError("measured twice")

    first = search()
    assert search() == first
    monkeypatch.setattr(tune_measure, "distributions", spent)
    monkeypatch.setattr(tune_measure, "measure_fidelity", spent)
    monkeypatch.setattr("qspec.quantization.job.quantize_model", spent)
    again = search("--again")
    assert _but_runs(again) == _but_runs(first)  # other predictions may choose other pairs to run
    renewed = {name for name in again if again[name] != first.get(name)}
    assert {tuple(name.split("-")[0].split("/")) for name in renewed} == {("seconds", name) for name in TIMED}
    assert json.loads((tmp_path / "tune.json").read_text())["single_techniques"]
