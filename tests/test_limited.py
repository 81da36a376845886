"""Work on what others wrote ends, and what it raises arrives whole."""

from collections.abc import Callable
import os
from pathlib import Path
import re
import resource
import time

import pytest

from qspec import limited
from qspec.errors import IntegrityError, QspecError, SourceError
from qspec.limited import rehearse


def endless() -> None:
    while True:
        pass


def deaf() -> None:
    time.sleep(1000)


def hungry() -> None:
    bytearray(limited.MEMORY + (1 << 30))


def killed() -> None:
    os.abort()


@pytest.mark.parametrize("work", [endless, deaf, hungry, killed])
def test_work_that_does_not_end_is_refused(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a reader that hangs, fills the memory, or dies of what it reads (an abort in a library)."""
    monkeypatch.setattr(limited, "SECONDS", 0.02)
    with pytest.raises(SourceError, match=r"the file: cannot be read within 0 seconds and 1\.0 GiB"):
        rehearse(work, "the file")


def in_disguise() -> None:
    """As libraries report it: an error of another kind, taken for a broken file on its way."""
    try:
        try:
            bytearray(900 << 20)
        except MemoryError:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory") from None
    except RuntimeError as error:
        raise SourceError("model.safetensors", "is not readable", "give an intact copy") from error


def within(work: Callable[[], None], room: int) -> str:
    """What `rehearse` raises in a process of its own that has `room` bytes left by RLIMIT_AS."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            rehearse(work, "the file")
        except QspecError as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        return told.read()


@pytest.mark.parametrize("work", [hungry, in_disguise, killed])
def test_a_limit_of_this_process_is_not_the_files_fault(work: Callable[[], None]) -> None:
    """Would catch a sound model called hostile, or broken, under `ulimit -v`, and a limit that the work may exceed."""
    said = within(work, 500 << 20)
    assert re.match(r"OutOfMemory: the file: cannot be read: .* RLIMIT_AS \(ulimit -v\) of .* leaves 5\d\d MB", said), (
        said
    )


def test_time_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch more memory asked for what hangs, because the process has little."""
    monkeypatch.setattr(limited, "SECONDS", 0.02)
    assert "within 0 seconds" in within(endless, 500 << 20)


def refused() -> None:
    raise IntegrityError("value", "rule\nof lines", "fix")


def failed() -> None:
    raise RuntimeError("two\nlines" * 100)


class Panic(BaseException):
    """How the tokenizers library says that it has failed."""


def panicked() -> None:
    raise Panic("at the disco")


def test_what_is_raised_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch a refusal that loses its kind, a traceback of another process, and several lines."""
    with pytest.raises(IntegrityError, match="value: rule"):
        rehearse(refused, "the file")
    for work, part in ((failed, "RuntimeError: two lines"), (panicked, "Panic: at the disco")):
        with pytest.raises(SourceError, match=f"the file: cannot be read .{part}") as caught:
            rehearse(work, "the file")
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_kept_and_nothing_is_left() -> None:
    """Would catch work that changes this process, a zombie, a descriptor that stays open, or a second fork inside."""
    before, seen = len(os.listdir("/proc/self/fd")), list[int]()
    for _ in range(3):
        rehearse(lambda: rehearse(lambda: seen.append(1), "inner"), "outer")
    assert seen == []
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
