"""Install the engines that a matrix compares, each in an environment of its own, and convert the model for each."""

from collections.abc import Callable
import json
from pathlib import Path
import re
import shutil
import subprocess
import sys
import venv

from bench_cli import read_options
import torch

from qspec.bridges import compressed
from qspec.errors import QspecError
from qspec.eval_files import eval_dir
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.provenance import atomic_write, staged_dir
from qspec.schema.engine_matrix import EngineMatrix, Peer, Weights, read_engine_matrix
from qspec.schema.matrix import Subject, read_matrix
from qspec.schema.recipe import ModelSpec
from qspec.stages.load import load, locate

ROOT = Path("runs/peers")
REFUSED = ROOT / "refused.json"
SCRIPTS = Path(__file__).resolve().parent / "peers"
PATIENCE = 1800
"""Seconds for one installation or conversion."""


def python_of(peer: str | None) -> Path:
    """The interpreter that runs a peer's worker; None is this one."""
    return Path(sys.executable) if peer is None else ROOT / peer / "venv/bin/python"


def weights_path(name: str) -> Path:
    return ROOT / "weights" / name


def refusals() -> dict[str, str]:
    """Why peers and weights are not there, by name."""
    return dict(json.loads(REFUSED.read_bytes())) if REFUSED.exists() else {}


def fidelity_subject(matrix: EngineMatrix) -> Subject:
    return read_matrix(eval_dir() / "matrices/fidelity.yaml")[matrix.fidelity]


def run(*command: str | Path) -> None:
    """Raises `QspecError` with the last line that the command said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise QspecError(str(command[0]), f"took more than {PATIENCE} s", "try again on a quiet machine") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"ended with {done.returncode}").splitlines()[-1]
        raise QspecError(str(command[0]), said[:300], "see what the command prints")


def install(name: str, peer: Peer) -> None:
    """The stamp is written last, so that half an environment is made again."""
    folder = ROOT / name / "venv"
    venv.create(folder, with_pip=True, clear=True)
    pip = (python_of(name), "-m", "pip")
    run(*pip, "install", "--quiet", *peer.packages)
    if peer.remove:
        run(*pip, "uninstall", "--quiet", "--yes", *peer.remove)
    atomic_write(stamp(name), stamp_text(peer))


def stamp(name: str) -> Path:
    return ROOT / name / "installed.json"


def stamp_text(peer: Peer) -> str:
    return json.dumps(peer.model_dump(mode="json"))


def installed(name: str, peer: Peer) -> bool:
    return stamp(name).exists() and stamp(name).read_text(encoding="utf-8") == stamp_text(peer)


def convert(name: str, weights: Weights, subject: Subject) -> None:
    out = weights_path(name)
    if out.is_dir():
        shutil.rmtree(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if weights.quantization is not None:
        spec = ModelSpec(model=subject.model, quantization=weights.quantization)
        quantize_checkpoint(spec, out, subject.calibration)
    elif weights.kind == "float":
        with staged_dir(out) as part:
            compressed.write_float(load(subject.source), part, getattr(torch, weights.format))
    elif weights.kind == "gguf":
        source = locate(subject.source).path
        assert source is not None
        run(python_of("llama_cpp"), SCRIPTS / "convert_gguf.py", source, out, weights.format)
    else:
        source, part = weights_path("float32"), out.with_name(f".{out.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        run(*converter(weights, source, part))
        part.rename(out)


def converter(weights: Weights, source: Path, out: Path) -> tuple[str | Path, ...]:
    """The peer's own command line."""
    bin_of = python_of(weights.kind).parent
    if weights.kind == "openvino":
        name, _, group = weights.format.partition(" g")
        told = ("--weight-format", name, "--task", "text-generation-with-past")
        told += ("--group-size", group) if group else ()
        return (bin_of / "optimum-cli", "export", "openvino", "--model", source, *told, out)
    told = ("--quantization", weights.format, "--output_dir", out)
    return (bin_of / "ct2-transformers-converter", "--model", source, *told)


def main() -> None:
    args = read_options(__doc__, "cpu_engines.yaml")
    matrix, progress, refused = read_engine_matrix(args.matrix), Progress(), refusals()
    subject = fidelity_subject(matrix)
    jobs: dict[str, tuple[bool, Callable[[], None]]] = {}
    for name, peer in matrix.peers.items():
        jobs[name] = installed(name, peer), lambda name=name, peer=peer: install(name, peer)
    for name, weights in matrix.weights.items():
        jobs[name] = weights_path(name).exists(), lambda name=name, w=weights: convert(name, w, subject)
    for name, (done, make) in jobs.items():
        if not re.search(args.only, name):
            continue
        if args.list:
            print("done   " if done else f"to do   {refused.get(name, '')}", name)
        elif not done or args.again:
            progress.stage(name)
            refused.pop(name, None)
            try:
                make()
            except QspecError as error:
                refused[name] = str(error)
                progress.say(f"{name}: {error}")
            atomic_write(REFUSED, json.dumps(refused, indent=1))
    progress.close()


if __name__ == "__main__":
    main()
