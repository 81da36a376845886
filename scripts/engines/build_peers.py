"""Install the engines that a matrix compares, each in an environment of its own, and convert the model for each.

Environments and weights of the engines in eval/matrices/cpu_engines.yaml, under runs/peers: what is there is kept.
A peer that cannot be installed or converted for is noted in runs/peers/refused.json; scripts/study engines reports it.
  --only PATTERN   peers and weights whose name holds the regular expression      --again   those anew
  --list           what is done        --matrix FILE    another matrix
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
import json
from pathlib import Path
import re
import shutil
import subprocess
import sys
import venv

import torch

from qspec.bridges import compressed
from qspec.errors import QspecError
from qspec.eval_files import eval_dir
from qspec.models.load import load, locate
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.provenance import atomic_write, staged_dir
from qspec.schema.quantization import ModelSpec
from scripts.accuracy.matrix import Subject, read_matrix
from scripts.common import read_options
from scripts.engines.matrix import EngineMatrix, Peer, Weights, read_engine_matrix

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
    """Raises `QspecError` with the last line that the command wrote."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise QspecError(str(command[0]), f"took more than {PATIENCE} s", "try again on a quiet machine") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"ended with {done.returncode}").splitlines()[-1]
        raise QspecError(str(command[0]), last[:300], "see what the command prints")


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


def stamp_text(made: Peer | Weights) -> str:
    return json.dumps(made.model_dump(mode="json"))


def installed(name: str, peer: Peer) -> bool:
    return stamp(name).exists() and stamp(name).read_text(encoding="utf-8") == stamp_text(peer)


def weights_stamp(name: str) -> Path:
    return ROOT / "weights" / f"{name}.json"


def converted(name: str, weights: Weights) -> bool:
    written = weights_stamp(name)
    return written.exists() and written.read_text(encoding="utf-8") == stamp_text(weights)


def convert(name: str, weights: Weights, subject: Subject) -> None:
    """The stamp is written last, here too."""
    out = weights_path(name)
    weights_stamp(name).unlink(missing_ok=True)
    if out.is_dir():
        shutil.rmtree(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if weights.quantization is not None:
        spec = ModelSpec(model=subject.model, quantization=weights.quantization)
        quantize_checkpoint(spec, out, subject.calibration)
    elif weights.kind == "float":
        with staged_dir(out) as part:
            model = replace(load(subject.source), files={})  # engines would take penalties from a generation_config
            compressed.write_float(model, part, getattr(torch, weights.format))
    else:
        part = out.with_name(f".{out.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        run(*converter(weights, subject, part))
        part.rename(out)
    atomic_write(weights_stamp(name), stamp_text(weights))


def converter(weights: Weights, subject: Subject, out: Path) -> tuple[str | Path, ...]:
    """The peer's own command line, which makes a file or a folder."""
    if weights.kind == "gguf":
        original = locate(subject.source).path
        assert original is not None
        return (python_of("llama_cpp"), SCRIPTS / "convert_gguf.py", original, out, weights.format)
    bin_of, source = python_of(weights.kind).parent, weights_path("float32")
    if weights.kind == "openvino":
        name, _, group = weights.format.partition(" g")
        task = ("--task", "text-generation-with-past", "--weight-format", name)
        grouped = ("--group-size", group) if group else ()
        return (bin_of / "optimum-cli", "export", "openvino", "--model", source, *task, *grouped, out)
    options = ("--quantization", weights.format, "--output_dir", out)
    return (bin_of / "ct2-transformers-converter", "--model", source, *options)


def main() -> None:
    args = read_options(__doc__, "cpu_engines.yaml")
    matrix, progress, refused = read_engine_matrix(args.matrix), Progress(), refusals()
    subject = fidelity_subject(matrix)
    jobs: dict[str, tuple[bool, Callable[[], None]]] = {}
    for name, peer in matrix.peers.items():
        jobs[name] = installed(name, peer), partial(install, name, peer)
    for name, weights in matrix.weights.items():
        jobs[name] = converted(name, weights), partial(convert, name, weights, subject)
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
