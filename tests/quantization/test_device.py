"""Quantization on a device that is not the CPU."""

import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.progress import Progress
from qspec.quantization import job
from qspec.quantization.pieces import CPU, placed
from qspec.schema.recipe import CalibrationSpec
from tests.pairs import recipe
from tests.tiny import tiny_model

CASES = () if os.environ.get("QSPEC_LONG") == "1" else ("stored scales", "feedback", "choices", "mixed")


def test_all_of_it_runs_where_the_weights_are(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Catches a tensor that is made on the CPU or left there, memory that is taken for the CPU's, files that hold a
    device's tensors, and other scales and codes than on the CPU.

    Attention of the two adds in another order: ranges differ in their last bits, and codes at a tie of rounding.
    """
    tiny_model("llama", tmp_path, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    command = [sys.executable, str(Path(__file__).with_name("elsewhere.py")), str(tmp_path), *CASES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pytestconfig.rootpath), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) >= len(CASES) > 0 or not CASES
    for case in found:
        assert case["codes"] < 0.002, case
        assert case["floats"] < 1e-5, case


def test_a_pair_for_a_gpu_is_quantized_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GPU that waits while the CPU calibrates for it, and a CPU's pair that is sent to one."""
    asked = list[torch.device]()
    model = load_folder(tiny_model("llama", tmp_path / "model", num_hidden_layers=1))

    def watched(*args: Any) -> Any:
        asked.append(args[-1])
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(job, "quantize_model", watched)
    text = job.Calibration(CalibrationSpec(), model.tokenizer, 0, Progress(quiet=True))
    for device in ("cpu", "h200"):
        one = recipe().model_copy(update={"device": device})
        with pytest.raises(InterruptedError):
            job.quantized_half(one, one.target.quantization, model, text, tmp_path, device)
    assert asked == [CPU, torch.device("cuda")]


def test_what_needs_the_whole_model_goes_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that runs a GPU out of memory which the host's would have held."""
    model, gpu = load_folder(tiny_model("llama", tmp_path, num_hidden_layers=1)), torch.device("cuda")
    free = {1 << 20: True, 1 << 16: False}
    for size, fits in free.items():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, size=size: (size, size))
        assert job._holds(gpu, model) == fits
    assert job._holds(CPU, model)
    assert placed(model, CPU) is model
