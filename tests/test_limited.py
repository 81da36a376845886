"""Work on what others wrote ends, and what it raises arrives whole."""

from collections.abc import Callable
import os
import time

import pytest

from qspec import limited
from qspec.errors import IntegrityError, SourceError
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
