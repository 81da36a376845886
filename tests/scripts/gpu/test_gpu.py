"""The benchmark for a bare GPU machine, in its dry form on a CPU: the same way from end to end, on tiny shapes."""

import json
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest
import torch

from qspec.bridges.hf import load_folder
from scripts.gpu import cells as gpu_cells, goals as gpu_goals, models as gpu_models, run as gpu_bench
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]

BARE = """
import builtins, runpy, sys
real, allowed = builtins.__import__, {"torch", "triton", "qspec", "scripts", *sys.stdlib_module_names}
inside = lambda name: name in ("torch", "triton") or name.startswith(("torch.", "triton."))
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    top, caller = name.partition(".")[0], (globals or {}).get("__name__", "")
    ours = caller == "__main__" or caller.startswith(("qspec", "scripts"))
    if ours and level == 0 and top not in allowed:
        raise ImportError(f"{caller} imports {name}, which a bare machine lacks")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
sys.argv = ["gpu_bench.py", *sys.argv[1:]]
runpy.run_module("scripts.gpu.run", run_name="__main__")
"""


def dry(*arguments: str) -> str:
    """What a dry run prints, in a process where no library but torch and triton can be imported by us."""
    command = [sys.executable, "-c", BARE, "--device", "cpu", "--dry", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], str]:
    """File, last line, and all that was printed, of every part."""
    folder = tmp_path_factory.mktemp("gpu")
    arch = gpu_models.small(1, vocab=300)
    source = gpu_models.random_source(torch.device("cpu"), torch.bfloat16)
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    sizes: dict[str, tuple[int, ...]] = {names[0]: (300, 256), names[1]: (300, 256), names[2]: (256,)}
    sizes |= {f"{name}.weight": arch.linear_shape(name) for name in arch.linears()}
    sizes |= {f"model.layers.0.{norm}.weight": (256,) for norm in ("input_layernorm", arch.mlp_norm)}
    kept = {
        "arch": vars(arch),
        "tensors": {n: source(n, size) for n, size in sizes.items()},
        "prompts": [[5, 6], [7] * 9],
    }
    torch.save(kept, folder / "weights")
    printed = dry("--out", str(folder / "rows.json"), "--weights", str(folder / "weights"))
    return json.loads((folder / "rows.json").read_text()), json.loads(printed.splitlines()[-1]), printed


def test_a_bare_machine_runs_every_part(run: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    """Catches an import of a library that a bare machine lacks, a part that raises, and rows that miss the file."""
    file, last, printed = run
    assert {row["part"] for row in file["rows"]} == {"checks", "ceilings", "prefill", "decode", "acceptance", "goals"}
    wrong = [row for row in file["rows"] if row["part"] == "checks" and not row["ok"]]
    assert wrong == []
    assert last["checks"]["wrong"] == []
    assert last["checks"]["n"] > 30
    assert last["file"].endswith("rows.json")
    assert len(last["goals"]) == printed.count("goal: ") == 5
    assert "say nothing about speed" in file["environment"]["dry"]


def test_the_table_is_whole(run: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    """Catches an arm, a batch or a target that drops out in silence; what does not fit must say so."""
    rows = [row for row in run[0]["rows"] if row["part"] == "decode"]
    timed = {(row["target"], row["arm"], row["batch"]) for row in rows if "skipped" not in row}
    arms = {arm.name for arm in gpu_cells.ARMS}
    large = {arm.name for arm in gpu_cells.ARMS if arm.loop != "BF16"}
    want = {("8B", arm, b) for arm in arms for b in (1, 2)} | {("70B", arm, b) for arm in large for b in (1, 2)}
    assert timed == want
    skipped = {row["arm"]: row["skipped"] for row in rows if "skipped" in row}
    assert skipped.keys() == arms - large
    assert skipped["BF16"].startswith("139 GB of weights")
    for row in rows:
        if row.get("drafts"):
            assert row["synthetic_alpha"] == 0.8
            assert 1 <= row["tokens_per_step"] <= row["drafts"] + 1
        elif "skipped" not in row:
            assert row["tokens_per_step"] == 1


def test_acceptance_on_real_weights_is_counted(run: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    """Catches a draft that is another model than its target's copy: one in four bits agrees more than chance."""
    rows = [row for row in run[0]["rows"] if row["part"] == "acceptance"]
    assert {(row["arm"], row["sampling"]) for row in rows} == {
        (f"{scheme}, drafts W4A16", law) for scheme in ("BF16", "FP8") for law in ("greedy", "temperature 1")
    }
    assert all(0.3 < row["alpha"] <= 1 for row in rows)


def test_cells_without_time_are_named_and_rows_survive(tmp_path: Path) -> None:
    """Catches a run that ends over its time, or whose rows are lost when it is cut."""
    out = tmp_path / "rows.json"
    dry("--out", str(out), "--parts", "ceilings")
    assert json.loads(out.read_text())["rows"][0]["part"] == "ceilings"
    dry("--out", str(out), "--parts", "8B", "--minutes", "0", "--resume")
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["part"] == "ceilings"
    reasons = [row["skipped"] for row in rows if row["part"] == "cells"]
    assert len(reasons) == 3
    assert all(reason.startswith("time: 0 s left") for reason in reasons)


def test_a_device_that_failed_is_left_to_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches parts that are lost because a kernel of an earlier one broke the process's device."""
    given: list[list[str]] = []
    monkeypatch.setattr(gpu_bench.os, "execv", lambda _, arguments: given.append(arguments[2:]))
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--device", "cpu", "--dry", "--out", str(tmp_path / "rows.json")])

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(gpu_bench.gpu_checks, "checks", broken)
    for part in ("_measured", "_target", "_acceptance"):
        monkeypatch.setattr(gpu_bench.Bench, part, lambda *_: None)
    gpu_bench.main()
    assert gpu_bench.parse(given[0]).parts == list(gpu_bench.PARTS[1:])
    assert gpu_bench.parse(given[0]).resume
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows[0]["skipped"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_goals_are_judged_by_the_worst_row() -> None:
    """Catches a goal that one good batch meets for all, and one that is met without a measurement."""
    base = {"part": "decode", "target": "8B", "prompt": 2000, "new": 200, "drafts": 0, "of_ceiling": 0.9}
    spread = {"median": 1.9, "low": 1.8, "high": 2.0}
    rows = [base | {"arm": "FP8+KV8", "batch": 1, "speedup": spread, "speedup_own": spread}]
    found = {goal["goal"]: goal for goal in gpu_goals.goals(rows)}
    assert [goal["met"] for goal in found.values()] == [True, True, None, None, None]
    rows.append(rows[0] | {"batch": 32, "speedup": spread | {"median": 1.6}})
    worse = next(goal for goal in gpu_goals.goals(rows) if goal["goal"].startswith("FP8+KV8"))
    assert (worse["met"], worse["found"]) == (False, 1.6)
    assert "batch 32" in worse["where"]


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    """Catches a file that a bare machine cannot read, a shape that changes on the way, and bare prompts."""
    folder = tiny_model("llama", tmp_path / "model")
    gpu_models.write_weights(tmp_path / "weights", str(folder), ["fox"])
    arch, tensors, prompts = gpu_models.read_weights(tmp_path / "weights")
    model = load_folder(folder)
    assert arch == model.arch
    assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in model.tensors.items()}
    assert prompts == [model.tokenizer.chat([{"role": "user", "content": "fox"}])]


def test_sizes_are_those_of_the_model_cards() -> None:
    """Catches a shape that is read wrong: parameters of Llama 3.1 8B and 70B and Llama 3.2 1B, less the input rows."""
    for name, parameters in (("8B", 8_030_261_248), ("70B", 70_553_706_496), ("1B", 1_235_814_400)):
        arch = gpu_models.shape(name)
        norms = (2 * arch.n_layers + 1) * arch.hidden_size
        rows = 0 if arch.tied else arch.vocab_size * arch.hidden_size
        assert gpu_models.weight_bytes(arch, "BF16") == 2 * (parameters - norms - rows)
