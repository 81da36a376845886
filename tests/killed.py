"""Run qspec's command line in processes that die, by a real SIGKILL, at a chosen step on the disk.

A step is whatever changes a file or folder below a given one: opening to write, renaming, removing, making. A file that
is opened to be replaced makes two: before, and while it is empty. This file is also the program behind `Killer`: it
imports qspec once and forks a process for every command, so that each begins alike and costs no start.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod")
IMPORTED = (
    "qspec.remeasure",
    "qspec.publish",
    "tests.example_results",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "compressed_tensors",
)
"""What takes long to import, and starts no threads: they would not be there after a fork."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, or -9; steps: what it did to the disk, as `event path`."""

    status: int
    steps: list[str]
    output: str


class Killer:
    """Runs commands one after the other. `Killer.started()` makes one."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @classmethod
    @contextmanager
    def started(cls) -> Iterator["Killer"]:
        command = [sys.executable, str(Path(__file__))]
        root = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            yield cls(process)
            assert process.stdin is not None
            process.stdin.close()

    def run(self, *arguments: str | Path, below: Path, die_at: int | str | None = None) -> Ended:
        """Run `qspec` with `arguments`; it dies before its step `die_at` of those below a folder.

        That is a number, counted from 0, or part of a step's name: the first such.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"arguments": list(map(str, arguments)), "below": str(below), "die_at": die_at}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))


class _Steps:
    """Counts the steps of this process, and ends it."""

    def __init__(self, below: str, die_at: int | str | None, log: Any) -> None:
        self.below, self.die_at, self.log, self.count, self.busy = below, die_at, log, 0, False

    def is_last(self, step: str) -> bool:
        """Whether the process dies before this step."""
        return step.find(self.die_at) >= 0 if isinstance(self.die_at, str) else self.count == self.die_at

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """As an audit hook: before anything is done."""
        if self.busy or not (event in CHANGES or (event == "open" and (arguments[2] or 0) & WRITES)):
            return
        self.busy = True
        path = _absolute(arguments[0], arguments[-1] if event in ("os.remove", "os.rmdir") else -1)
        if path is not None and path.startswith(self.below):
            self.step(event, path)
            if event == "open" and arguments[2] & os.O_TRUNC:
                self.step("opened", path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)))
        self.busy = False

    def step(self, event: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        """One more step, or the end, behind `half` of the step before."""
        name = f"{event} {path.removeprefix(self.below)}"
        if self.is_last(name):
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        os.write(self.log, f"{name}\n".encode())


def _absolute(path: Any, folder: int) -> str | None:
    if isinstance(path, int):
        return None
    name = os.fsdecode(path)
    if folder >= 0 and not os.path.isabs(name):
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return os.path.abspath(name)


def _tensors_too(steps: _Steps) -> None:
    """The library that writes tensors is not Python, and tells no hook: it fills a file beside, then renames it."""
    import safetensors.torch

    save = safetensors.torch.save_file

    def saved(tensors: Any, path: str, metadata: Any = None) -> None:
        if os.path.abspath(path).startswith(steps.below):
            steps.step("tensors", path)
            steps.busy = True
            steps.step("tensors half", path, lambda: Path(path).with_name(".tmpHALF").write_bytes(b"half"))
            steps.busy = False
        save(tensors, path, metadata)

    safetensors.torch.save_file = saved


def _child(job: dict[str, Any], log: int, output: Path) -> int:
    """The command, with measurements of the test's own: they are no steps, and take long."""
    from qspec import pipeline
    from qspec.cli import main
    from qspec.measure import arms
    from tests.example_results import example

    measured = example()
    pipeline.bench = lambda *_, **__: measured.speed  # type: ignore[assignment]
    arms.evaluate = lambda *_, **__: measured.accuracy
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    steps = _Steps(job["below"], job["die_at"], log)
    _tensors_too(steps)
    sys.addaudithook(steps.hear)
    return main(job["arguments"])


def _serve() -> None:
    import importlib
    import tempfile

    for name in IMPORTED:
        importlib.import_module(name)

    with tempfile.TemporaryDirectory() as folder:
        output, steps = Path(folder) / "output", Path(folder) / "steps"
        for line in sys.stdin:
            log = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            process = os.fork()
            if process == 0:
                status = 1
                try:
                    status = _child(json.loads(line), log, output)
                    sys.stdout.flush()
                finally:
                    os._exit(status)
            os.close(log)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            ended = {"status": code, "steps": steps.read_text().splitlines(), "output": output.read_text()}
            print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    _serve()
    os._exit(0)  # the libraries take seconds to leave
