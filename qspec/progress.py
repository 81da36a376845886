"""Stages and bars that a person sees on stderr while a job runs, and the `run.log` that stays afterwards."""

from collections.abc import Iterable, Iterator
import io
import logging
from pathlib import Path
import sys
import time
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

HEARTBEAT = 30.0
"""Seconds between lines on a loop where stderr is no terminal."""

log = logging.getLogger("qspec")


class Progress:
    """Stages and bars on stderr; every stage and its seconds also go to the log. `quiet` leaves only the log.

    Where stderr is no terminal, a loop says now and then how far it is, in place of a bar. seconds: of the stages that
    have ended.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.seconds = quiet, dict[str, float]()
        self._stage: str | None = None
        self._started = 0.0

    def stage(self, name: str) -> None:
        """Start a stage; ends the one before it."""
        self.close()
        self._stage, self._started = name, time.perf_counter()
        self.say(f"{name} …")

    def close(self) -> None:
        """End the running stage and say how long it took. Safe to call twice."""
        if self._stage is not None:
            seconds = time.perf_counter() - self._started
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + seconds
            self.say(f"{self._stage}: {seconds:.1f} s")
        self._stage = None

    def say(self, line: str) -> None:
        """One line for the person and the log, above any bar."""
        log.info(line)
        if not self.quiet:
            tqdm.write(line, file=sys.stderr)

    def track(self, items: Iterable[T], stage: str, total: int | None = None, unit: str = "item") -> Iterator[T]:
        """Yield `items` under a bar of done / total, rate and time left; items that are text are shown as they run."""
        terminal = sys.stderr.isatty()
        title = stage if terminal or self._stage in (None, stage) else f"{self._stage}: {stage}"
        with (tqdm if terminal else _Heartbeat)(
            items, desc=title, total=total, unit=unit, leave=False, disable=self.quiet, file=sys.stderr
        ) as bar:
            for item in bar:
                if isinstance(item, str):
                    bar.set_postfix_str(item, refresh=terminal)
                yield item


class _Heartbeat(tqdm):  # type: ignore[misc]  # tqdm carries no types
    """A bar as single lines, `HEARTBEAT` seconds apart: what runs, how much of it is done, how long the rest takes."""

    def __init__(self, items: Iterable[T], **options: Any) -> None:
        super().__init__(items, **options | {"file": io.StringIO()}, mininterval=HEARTBEAT, miniters=1)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line; none before the first item is done, and none at the end, which the next stage tells."""
        if msg is None and 0 < self.n != self.total:
            done, spent = f"{self.n:,}", self.format_dict["elapsed"]
            if self.total:
                left = self.format_interval(spent * (self.total / self.n - 1))
                done += f" of {self.total:,} ({self.n / self.total:.0%}), about {left} left"
            tqdm.write(f"{self.desc}: {done}", file=sys.stderr)
        return True


def setup_log(file: str | Path) -> None:
    """Append everything that is logged, by qspec (INFO) and by libraries (WARNING), to `file`.

    A second call moves the log to its own file.
    """
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _RunLog)]:
        root.removeHandler(old)
        old.close()
    handler = _RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    log.setLevel(logging.INFO)


class _RunLog(logging.FileHandler):
    """The one handler that `setup_log` owns. A full disk ends the run where results are written, not here."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Keep quiet; the base class prints a traceback for every line that it cannot write."""
