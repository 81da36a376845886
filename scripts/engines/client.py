"""The study's side of the protocol of `peers/wire.py`: one process per engine, asleep unless asked."""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import select
import signal
import subprocess
from time import monotonic
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from qspec.errors import QspecError

PATIENCE = 900.0
"""Seconds for one answer."""
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Worker:
    """An engine's process, stopped by signal between questions, so that no thread of it takes time from another's.

    Raises `QspecError` for an answer that is an error, comes too late, or never, because the process ended.
    """

    def __init__(self, name: str, command: Sequence[str | Path], threads: int, log: Path) -> None:
        self._name, self._fix, self._unread = name, f"read {log}", b""
        settings = os.environ | dict.fromkeys(VARIABLES, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=settings,
                start_new_session=True,
            )

    def ask(self, command: str, patience: float = PATIENCE, **options: Any) -> Mapping[str, Any]:
        """Wakes the process for one question."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({command: options}).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._line(monotonic() + patience))
        except (OSError, ValueError) as error:
            code = self._process.poll()
            raise QspecError(self._name, f"ended with {code} at {command}", self._fix) from error
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise QspecError(self._name, f"{command} failed: {reply['error']}", self._fix)
        return dict(reply)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # a question that nobody reads any more
                assert pipe is not None
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left = deadline - monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.close()
                raise QspecError(self._name, "did not answer in time", self._fix)
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                self._process.wait()
                return b""
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class AskedLM:
    """A worker as the language model that fidelity is measured on."""

    max_length, length = 1 << 20, 0

    def __init__(self, worker: Worker, vocab_size: int, path: Path) -> None:
        """`path`: where logits lie between the two processes."""
        self._worker, self.vocab_size, self._path = worker, vocab_size, path

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        self._worker.ask("logits", ids=tokens_T.tolist(), path=str(self._path))
        logits_TV = torch.from_numpy(np.fromfile(self._path, dtype=np.float32).reshape(len(tokens_T), -1))
        self._path.unlink()
        return logits_TV[-last if last else 0 :, : self.vocab_size]

    def truncate(self, length: int) -> None:
        """Every question stands alone."""
