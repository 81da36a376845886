"""Everything that later stages would refuse is refused before compute."""

import json
from pathlib import Path
from typing import Any

import pytest

from qspec.bridges.hf import load_folder
from qspec.errors import QspecError
from qspec.measure.rehearse import rehearse
from qspec.records import LoadedModel
from tests.jobs import job
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("model")))


def test_a_job_that_can_run_passes(tmp_path: Path, model: LoadedModel) -> None:
    """Would catch a rehearsal that refuses what the run can do."""
    rehearse(job(tmp_path, tmp_path), model)


@pytest.mark.parametrize(
    ("section", "changes", "part"),
    [
        ("calibration", {"data": [{"name": "late.jsonl"}]}, "line 4: is no JSON object"),
        ("calibration", {"data": [{"name": "short.txt"}]}, "holds 0 rows of 512 tokens"),
        ("evaluation", {"fidelity": {"data": "short.txt"}, "tasks": []}, "holds 0 windows of 256 tokens"),
        ("evaluation", {"fidelity": None, "needle": {"data": "short.txt", "lengths": [200]}}, "holds 0 windows of 200"),
        ("evaluation", {"fidelity": None, "needle": {"lengths": [512]}}, "needle.lengths 512: is above the 256 tokens"),
        ("benchmark", {"prompts": "late.jsonl"}, "line 4: is no JSON object"),
        ("benchmark", {"prompts": "short.txt", "max_new_tokens": 250}, "holds 0 that fit the context, and 1"),
        ("benchmark", {"prompts": "short.txt", "per_category": 2}, "holds 1 that fit the context, and 2"),
        ("benchmark", {"prompts": "short.txt", "categories": ["x"]}, "prompt category 'x': does not exist"),
    ],
)
def test_text_is_refused_before_compute(
    tmp_path: Path, model: LoadedModel, section: str, changes: dict[str, Any], part: str
) -> None:
    """Would catch an hour of quantization before a file is found too short, damaged, or without the category."""
    (tmp_path / "short.txt").write_text("The quick brown fox", encoding="utf-8")
    (tmp_path / "late.jsonl").write_text(3 * '{"text": "The quick brown fox"}\n' + "{\n", encoding="utf-8")
    placed = json.loads(json.dumps(changes).replace("short.txt", f"{tmp_path}/short.txt"))
    placed = json.loads(json.dumps(placed).replace('"late.jsonl', f'"{tmp_path}/late.jsonl'))
    with pytest.raises(QspecError) as caught:
        rehearse(job(tmp_path, tmp_path, **{section: placed}), model)
    assert part in str(caught.value)


def test_tasks_are_refused_before_compute(
    tmp_path: Path, model: LoadedModel, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch answers (here MMLU-Pro's own 2048 tokens) for which a short context has no room."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    tasks = {"fidelity": None, "tasks": [{"name": "mmlu_pro", "limit": 1, "subjects": ["biology"]}]}
    with pytest.raises(QspecError, match="answers of 2048 tokens: leave no room for a prompt in a context of 256"):
        rehearse(job(tmp_path, tmp_path, evaluation=tasks), model)
    tasks["tasks"][0]["max_gen_toks"] = 64  # type: ignore[index]
    rehearse(job(tmp_path, tmp_path, evaluation=tasks), model)
