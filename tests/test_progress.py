import io
import logging
from pathlib import Path
import sys

import pytest

from qspec.progress import Progress, setup_log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run_log(tmp_path):
    """A log in use; afterwards logging is as it was."""
    root, level = logging.getLogger(), logging.getLogger("qspec").level
    before = list(root.handlers)
    setup_log(tmp_path / "run.log")
    yield tmp_path / "run.log"
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    logging.getLogger("qspec").setLevel(level)


def test_track_yields_every_item_in_order(capsys):
    """Would catch a bar that swallows or reorders items, and control characters in a log file or a CI page."""
    assert list(Progress().track(iter("abc"), "quantize", total=3, unit="layer")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_track_on_a_terminal_shows_stage_item_and_total(monkeypatch):
    """Would catch a bar that does not say what is running."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in Progress().track(["model.layers.0", "model.layers.1"], "quantize", unit="layer"):
        sys.stderr.write("|")
    shown = sys.stderr.getvalue()
    assert "quantize" in shown
    assert "/2" in shown
    assert "model.layers.1" in shown


def test_off_a_terminal_a_loop_says_how_far_it_is(monkeypatch, capsys):
    """Would catch 24 minutes of silence in a log, lines without stage, share or time left, and a line per item."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    progress = Progress()
    progress.stage("evaluate")
    for _ in progress.track(range(100), "answering", 100):
        now[0] += 10
    for _ in progress.track((str(item) for item in range(7)), "steps"):  # how many is not known
        now[0] += 10
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluate: ")]
    assert lines[0] == "evaluate: answering: 3 of 100 (3%), about 16:10 left"
    assert lines[9] == "evaluate: answering: 30 of 100 (30%), about 11:40 left"
    assert lines[33:] == ["evaluate: steps: 3", "evaluate: steps: 6"]
    list(Progress(quiet=True).track(range(100), "answering", 100))
    assert capsys.readouterr().err == ""


def test_stages_say_their_time_once(capsys):
    """Would catch a stage that never ends, or ends twice."""
    progress = Progress()
    progress.stage("load")
    progress.stage("quantize")
    progress.close()
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["load", "load:", "quantize", "quantize:"]


def test_quiet_still_logs(run_log, capsys):
    """Would catch `quiet` that also empties run.log, or that prints."""
    progress = Progress(quiet=True)
    progress.stage("load")
    list(progress.track([1], "load"))
    progress.close()
    assert capsys.readouterr().err == ""
    assert run_log.read_text().count("INFO qspec: load") == 2


def test_log_holds_library_warnings(run_log):
    """Would catch a run.log that misses the reason why a library fell back."""
    logging.getLogger("some.library").warning("fell back")
    logging.getLogger("some.library").info("chatter")
    text = run_log.read_text()
    assert "WARNING some.library: fell back" in text
    assert "chatter" not in text


def test_second_log_takes_over_and_an_older_one_is_kept(run_log, tmp_path):
    """Would catch lines of one run in the log of another, and a resumed run that erases its log."""
    log = logging.getLogger("qspec")
    log.info("one")
    setup_log(tmp_path / "other" / "run.log")
    log.info("two")
    setup_log(run_log)
    log.info("three")
    assert [line.rsplit(" ", 1)[1] for line in run_log.read_text().splitlines()] == ["one", "three"]
    assert Path(tmp_path / "other" / "run.log").read_text().endswith("two\n")


def test_a_log_on_a_full_disk_keeps_quiet(run_log, capsys, monkeypatch):
    """Would catch a traceback on stderr for every line that a full disk does not take."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    (handler,) = [h for h in logging.getLogger().handlers if getattr(h, "baseFilename", None) == str(run_log)]
    with monkeypatch.context() as patched:
        patched.setattr(handler, "stream", Full())
        Progress(quiet=True).say("a line")
    assert capsys.readouterr().err == ""
