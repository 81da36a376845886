"""Models that are quantized piece by piece: nothing is lost when the process dies, and memory stays bounded."""

from collections.abc import Callable
import os
from pathlib import Path
import signal
import subprocess
import sys

import pytest
import torch

from qspec.bridges import compressed
from qspec.models.vocab import real_vocab
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.quantization.calibrate import calibrate, random_rows
from qspec.quantization.pieces import embedded, pieces
from qspec.quantization.rtn import quantize
from qspec.quantization.smooth import transform
from qspec.records import LoadedModel
from qspec.schema.quantization import KVSpec, ModelSpec, QuantSpec, SmoothingSpec
from qspec.schema.recipe import CalibrationSpec, DataSpec, FusionSpec
from qspec.schemes.build import build_plan
from tests.observed import load
from tests.tiny import TEXT, tiny_model

CALIBRATED = QuantSpec(scheme="W8A8", method="gptq", smoothing=SmoothingSpec(), kv=KVSpec())
QUIET = Progress(quiet=True)


def spec(folder: Path, quantization: QuantSpec) -> ModelSpec:
    return ModelSpec(model=str(folder), quantization=quantization)


def text(folder: Path) -> CalibrationSpec:
    (folder / "text.txt").write_text("\n\n".join([TEXT] * 8), encoding="utf-8")
    return CalibrationSpec(data=(DataSpec(name=str(folder / "text.txt")),), samples=4, length=32)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a copy of this process; the signal that ended it, or 0."""
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # no thread of the parent lives on
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kill_9_between_any_two_results_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a piece that is half written, done twice, or continued from other hidden states."""
    folder, calibration = tiny_model("llama", tmp_path / "source"), text(tmp_path)
    whole = quantize_checkpoint(spec(folder, CALIBRATED), tmp_path / "whole", calibration, progress=QUIET)
    assert len(whole.linears) == 14
    want = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    rename, made = os.rename, []

    def count(*args: object) -> None:
        made.append(args)
        rename(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", count)
        quantize_checkpoint(spec(folder, CALIBRATED), tmp_path / "counted", calibration, progress=QUIET)
    assert len(made) >= 8  # each piece, the states behind it, the pieces as one checkpoint
    for last in range(len(made)):
        out = tmp_path / f"killed-{last}"

        def die(out: Path = out, last: int = last) -> None:
            left = iter(range(last))

            def rename_or_die(*args: object) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(*args)  # type: ignore[arg-type]

            os.rename = rename_or_die  # type: ignore[assignment]
            quantize_checkpoint(spec(folder, CALIBRATED), out, calibration, progress=QUIET)

        assert in_child(die) == signal.SIGKILL
        assert not out.exists()
        assert in_child(lambda out=out: quantize_checkpoint(spec(folder, CALIBRATED), out, calibration)) == 0
        assert {path.name: path.read_bytes() for path in out.iterdir()} == want
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".work")]


def test_pieces_of_other_settings_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint whose first layers were made by another recipe."""
    folder = tiny_model("llama", tmp_path / "source")
    with monkeypatch.context() as patched:
        patched.setattr("qspec.quantization.job.kept_apart", lambda _: pytest.fail("stop after the pieces"))
        with pytest.raises(pytest.fail.Exception):
            quantize_checkpoint(spec(folder, QuantSpec(scheme="FP8_DYNAMIC")), tmp_path / "out", progress=QUIET)
    quantize_checkpoint(spec(folder, QuantSpec(scheme="W8A8")), tmp_path / "out", progress=QUIET)
    quantize_checkpoint(spec(folder, QuantSpec(scheme="W8A8")), tmp_path / "fresh", progress=QUIET)
    made, fresh = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "fresh"))
    assert made == fresh


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_pieces_give_what_the_whole_model_gives(tmp_path: Path, kind: str) -> None:
    """Catches statistics, smoothing or scales that depend on how the model is cut."""
    folder = tiny_model(kind, tmp_path / "source")
    quantization, fusion = (
        QuantSpec(scheme="FP8", smoothing=SmoothingSpec(), kv=KVSpec(granularity="head")),
        FusionSpec(),
    )
    calibration = text(tmp_path)
    made = quantize_checkpoint(spec(folder, quantization), tmp_path / "out", calibration, fusion, QUIET)
    model, plan = load(folder), build_plan(quantization)
    from qspec.bridges.text import calibration_rows

    drawn = random_rows(real_vocab(model.tokenizer), QuantSpec().random_rows, calibration.length, 0)
    stats = calibrate(model, [*calibration_rows(calibration, model.tokenizer, 0), *drawn])
    changed, after, _ = transform(model, stats, quantization, fusion, plan)
    whole = quantize(changed, after, plan)
    for layer, linear in whole.linears.items():
        assert torch.equal(made.linears[layer].weight.codes.view(torch.uint8), linear.weight.codes.view(torch.uint8))
        assert made.linears[layer].input_scale == linear.input_scale
    for name, tensor in whole.tensors.items():
        assert torch.equal(made.tensors[name], tensor.to(made.tensors[name].dtype))
    assert all(torch.equal(made.k_scale[layer], scale) for layer, scale in whole.k_scale.items())


def test_experts_that_no_piece_reached_are_told_once(tmp_path: Path) -> None:
    """Catches a report with one sentence per layer of a mixture, or with none."""
    folder = tiny_model("qwen3_moe", tmp_path / "source")
    (tmp_path / "text.txt").write_text("\n\n".join(["aaaaaaaaaaaaaaaa"] * 8), encoding="utf-8")
    calibration = CalibrationSpec(data=(DataSpec(name=str(tmp_path / "text.txt")),), samples=1, length=8)
    made = quantize_checkpoint(
        spec(folder, QuantSpec(scheme="FP8", random_rows=0)), tmp_path / "out", calibration, progress=QUIET
    )
    (note,) = (note for note in made.notes if "saw no calibration token" in note)
    assert "of 12 experts" in note  # six in each of two layers; the first has none


def test_every_tensor_is_in_one_piece(tmp_path: Path) -> None:
    """Catches a tensor that is lost, or a piece that reads another's."""
    model: LoadedModel = load(tiny_model("qwen3", tmp_path))
    cut = list(pieces(model))
    assert [piece.arch.layers for piece in cut] == [["model.layers.0"], ["model.layers.1"], []]
    assert sorted(name for piece in cut for name in piece.tensors) == sorted(model.tensors)
    with pytest.raises(KeyError):
        cut[0].tensors["model.norm.weight"]
    assert embedded(model, [[1, 2, 3]])[0].shape == (3, model.arch.hidden_size)


LIMITED = """
import os, sys, threading, time
from pathlib import Path
from qspec.bridges import tensors
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.schema.quantization import QuantSpec
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import CalibrationSpec, DataSpec
import torch
torch.set_num_threads(1)
folder, scheme, allowed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
text = CalibrationSpec(data=(DataSpec(name=str(folder / "text.txt")),), samples=2, length=32)

def run(name):
    model = ModelSpec(model=str(folder / name), quantization=QuantSpec(scheme=scheme, group_size=32))
    quantize_checkpoint(model, folder / f"{name}-out", text, progress=Progress(quiet=True))

def used():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def watch(limit):
    while used() < limit:
        time.sleep(0.005)
    os._exit(9)

run("small")  # libraries are imported at first use
threading.Thread(target=watch, args=(used() + allowed,), daemon=True).start()
tensors.SHARD_BYTES = allowed // 4
run("big")
"""
"""Ends itself with status 9 above a limit on what is in memory and in no file (a mapped file takes no memory: its pages
are dropped under pressure)."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
@pytest.mark.parametrize("scheme", ["W4A16", "FP8"])
def test_a_checkpoint_of_several_times_the_memory(tmp_path: Path, scheme: str) -> None:
    """Catches a stage that holds the whole model: data-free and calibrated, under a limit that it does not fit."""
    text(tmp_path)
    layers, allowed = 24, 40_000_000
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers}
    folder = tiny_model("llama", tmp_path / "big", **shape)
    tiny_model("llama", tmp_path / "small")
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 7 * allowed
    arguments = [str(tmp_path), scheme, str(allowed)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, and not counted
    command = [sys.executable, "-c", LIMITED, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(compressed.read(tmp_path / "big-out").linears) == 7 * layers
