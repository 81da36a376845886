"""The accuracy of a finished pair, measured anew through servers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import json
from pathlib import Path
from typing import Any

import pytest

from qspec.bridges.hf import load_folder
from qspec.bridges.openai_api import Api
from qspec.cli import main
from qspec.measure import served as evaluate_served
from qspec.nn.eager.decoder import Decoder
from qspec.pair.package import package
from qspec.remeasure import evaluate_pair
from qspec.schema.results import Results
from tests.openai_server import Model, serve
from tests.pairs import halves, recipe

TASK = "{name: gsm8k, num_fewshot: 0, limit: 2, max_gen_toks: 4}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return package(*halves(folder / "source"), recipe(target={"model": str(folder / "source")}), folder)


@pytest.fixture
def url(pair: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    model = load_folder(pair.parent / "source")
    with serve(Model(Decoder.from_float(model), model.tokenizer, set(model.arch.eos_ids), 256)) as address:
        yield address


def _sets(task: str = TASK) -> list[str]:
    return ["--set", "evaluation.fidelity=null", "--set", f"evaluation.tasks=[{task}]"]


def test_running_servers_are_asked(pair: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch options that do not reach the recipe, one server asked for both arms, conditions that get lost."""
    told = ["evaluate", str(pair), "--out", str(tmp_path / "new"), "--backend", "api"]
    assert main([*told, "--original", url, "--quantized", url, *_sets()]) == 0
    assert "gsm8k (api): the original is right in none of 2 items, so they can show no loss" in capsys.readouterr().out
    (task,) = Results.read(tmp_path / "new/results.json").accuracy.tasks
    assert (task.backend, task.original.n, task.difference.value) == ("api", 2, 0.0)
    stated = {"api": "completions", "model": "tiny", "server": "test", "context": 256, "fewshot_form": "one text"}
    assert stated.items() <= task.quantized.condition.items()
    assert (tmp_path / "new/report.html").is_file()


def test_what_cannot_be_asked_is_one_line(pair: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Would catch a change of the pair itself, and servers that nobody named, found out behind hours of questions."""
    told = ["evaluate", str(pair), "--out", str(tmp_path / "new"), "--backend", "api", *_sets()]
    for more, part in (
        ([], "has no servers to ask"),
        (["--original", url], "evaluation.api.quantized"),
        (["--set", "speculation.temperature=1"], "changes more than the evaluation"),
        (["other-pair"], "other-pair: goes to vLLM's servers, and no task is answered by vLLM"),
        (["--original", url, "--quantized", "http://127.0.0.1:9/v1"], "does not answer"),
    ):
        assert main([*told, *more]) == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_vllm_serves_one_arm_after_the_other(pair: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch both models in memory at once, an original that is served otherwise, and weights that stay behind."""
    events: list[Any] = []

    @contextmanager
    def server(python: Path, model: Path, arguments: Sequence[str], *_: object) -> Iterator[None]:
        assert (model / "config.json").is_file()
        events.append((model.name, dict(zip(arguments[::2], arguments[1::2], strict=True))))
        yield
        events.append("stopped")

    monkeypatch.setattr(evaluate_served.vllm, "server", server)
    monkeypatch.setattr(evaluate_served.vllm, "version", lambda python: "0.32.0")
    monkeypatch.setattr(evaluate_served, "Api", lambda address: Api(url))
    monkeypatch.setattr("qspec.serving.vllm.environment", lambda: {"instruction_sets": "avx512f"})
    found = evaluate_pair(pair, tmp_path / "new", ("evaluation.fidelity=null", f"evaluation.tasks=[{TASK}]"), "vllm")
    (_, first), stopped, (name, second), _ = events
    assert (stopped, name) == ("stopped", "target")
    assert first["--max-model-len"] == second["--max-model-len"] == "128"
    assert first["--dtype"] == second["--dtype"]
    assert first["--generation-config"] == second["--generation-config"] == "vllm"  # no penalties of the authors'
    assert [task.backend for task in found.accuracy.tasks] == ["vllm"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        f"{name}" for name in ("report.csv", "report.html", "report.json", "report.md", "results.json")
    ]


def test_this_process_can_be_asked_anew(pair: Path, url: str, tmp_path: Path) -> None:
    """Would catch an engine that is left out where a task names several backends."""
    told = f"evaluation.tasks=[{json.dumps({'name': 'gsm8k', 'num_fewshot': 0, 'limit': 1, 'max_gen_toks': 4})}]"
    api = f"evaluation.api={{original: '{url}', quantized: '{url}'}}"
    backends = "evaluation.tasks.0.backends=[qspec, api]"
    found = evaluate_pair(pair, tmp_path / "new", ("evaluation.fidelity=null", told, backends, api))
    assert [task.backend for task in found.accuracy.tasks] == ["qspec", "api"]
