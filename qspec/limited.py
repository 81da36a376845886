"""Work on what others wrote, tried first in a process of its own that ends when it takes too long or too much memory.

A chat template is a program, a tokenizer runs regular expressions, a pattern may backtrack for years. What has ended
there in time and room ends here too, so the caller does it again and keeps the result.
"""

from collections.abc import Callable
from contextlib import suppress
import faulthandler
import json
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn
import warnings

from qspec import errors
from qspec.errors import OutOfMemory, QspecError, SourceError
from qspec.memory import ran_out, rooms
from qspec.readable import size as sized

SECONDS, MEMORY = 10.0, 1 << 30
"""Seconds of processor time and bytes beyond those of this process, for work on small files; a tighter limit stays."""
SECONDS_PER_MB, MEMORY_PER_BYTE = 1.0, 32
"""More of both for large files."""
_PATIENCE = 10
"""Seconds of the clock for each of the processor: other processes want it too."""
_MOST_ANSWER = 1 << 16
_inside = False


def rehearse(work: Callable[[], object], where: str, size: int = 0) -> None:
    """Do `work` in a process that is forked and forgotten. size: bytes of the files that it reads.

    Raises what `work` raises there: a `QspecError` as it is, anything else as a `SourceError` about `where`; and
    `SourceError` if it has not ended within the limits, or `OutOfMemory` where this process's own are tighter.
    """
    if _inside:
        work()
        return
    seconds, memory = SECONDS + SECONDS_PER_MB * size / 1e6, MEMORY + MEMORY_PER_BYTE * size
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the new process asks none for anything
        child = os.fork()
    if child == 0:
        os.close(reader)
        _run(work, writer, seconds, memory)
    os.close(writer)
    end = time.monotonic() + _PATIENCE * seconds
    try:
        answer = _answer(reader, end)
    finally:
        os.close(reader)
        late = time.monotonic() >= end
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if answer is None:
        room = min(rooms(), key=lambda room: room.left, default=None)
        if room is not None and room.left < memory and not late and os.WTERMSIG(status) != signal.SIGXCPU:
            rule = (
                f"cannot be read: that may take {sized(memory)} of memory, and {room.limit} leaves {sized(room.left)}"
            )
            raise OutOfMemory(where, rule, "give it more memory")
        rule = f"cannot be read within {seconds:.0f} seconds and {memory / 2**30:.1f} GiB"
        raise SourceError(where, rule, "do not use it: it was made to hang its readers, or give an intact copy")
    if answer:
        kind, value, rule, fix = answer
        raise getattr(errors, kind)(value or where, rule, fix)


def _answer(reader: int, end: float) -> list[str] | None:
    """The lines that the process has written: none, or an error; None if it was ended first."""
    raw = b""
    while len(raw) < _MOST_ANSWER and (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, _MOST_ANSWER)
            if not part:
                break
            raw += part
    with suppress(ValueError):
        answer: list[str] = json.loads(raw)
        return answer
    return None


def _run(work: Callable[[], object], writer: int, seconds: float, memory: int) -> NoReturn:
    """The forked process: never returns, writes nothing but its answer, runs no exit handlers."""
    global _inside
    answer: list[str] = []
    try:
        _inside = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()
        nowhere = open(os.devnull, "r+", encoding="utf-8")  # noqa: SIM115 (for good: libraries report last words)
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
        sys.stdin = sys.stdout = sys.stderr = nowhere
        _limit(seconds, memory)
        if "torch" in sys.modules:  # threads of a pool do not survive a fork
            sys.modules["torch"].set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        work()
    except BaseException as error:  # noqa: BLE001 (tokenizers end in exceptions that are no `Exception`)
        if ran_out(error) is not None:
            os._exit(1)
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        answer = ["SourceError", "", f"cannot be read ({text})", "give an intact copy"]
        if isinstance(error, QspecError):
            answer = [type(error).__name__, error.value, error.rule, error.fix]
    finally:
        with suppress(BaseException):
            os.write(writer, json.dumps(answer).encode()[:_MOST_ANSWER])
        os._exit(0)


def _limit(seconds: float, memory: int) -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: max(1, round(seconds))}
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # not everywhere is there such a file
        limits[resource.RLIMIT_AS] = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory
    for kind, most in limits.items():
        least = min(most, *(limit for limit in (*resource.getrlimit(kind), most) if limit != resource.RLIM_INFINITY))
        resource.setrlimit(kind, (least, least))
