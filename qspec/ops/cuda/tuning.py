# mypy: allow-untyped-calls
"""The fastest of a few ways to run an operation: each is timed once per device and size, the choice is kept on disk."""

from collections.abc import Callable, Sequence
from functools import cache
import json
import os
from pathlib import Path
from typing import TypeVar

import torch

from qspec.errors import QspecError
from qspec.ops.native_library import NoLibrary, private_cache
from qspec.provenance import atomic_write

Way = TypeVar("Way")


class Tuner:
    """Choices by key, in a JSON file that need not exist; one that cannot be read or written is done without."""

    def __init__(self, path: Path, seconds: Callable[[Callable[[], object]], float]) -> None:
        self._path, self._seconds = path, seconds
        self._known = self._read()

    def known(self, key: str, ways: Sequence[Way]) -> Way | None:
        """The way that was chosen before, if it is still one."""
        return next((way for way in ways if str(way) == self._known.get(key)), None)

    def best(self, key: str, ways: Sequence[Way], run: Callable[[Way], object]) -> Way:
        """The way that takes the least time, the earlier of two equal ones; times them if it is not known."""
        chosen = self.known(key, ways)
        if chosen is None:
            chosen = min(ways, key=lambda way: self._seconds(lambda: run(way)))
            self._known = self._read() | self._known | {key: str(chosen)}
            self._write()
        return chosen

    def _read(self) -> dict[str, str]:
        try:
            chosen = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return chosen if isinstance(chosen, dict) else {}

    def _write(self) -> None:
        try:
            atomic_write(self._path, json.dumps(self._known, indent=1, sort_keys=True))
        except QspecError:  # a home that cannot be written to is no reason to stop
            return


def fastest(key: str, device: torch.device, ways: Sequence[Way], run: Callable[[Way], object]) -> Way:
    """The fastest on this GPU. The first where nothing can be timed: elsewhere, and while a graph is captured."""
    if device.type != "cuda" or len(ways) == 1:
        return ways[0]
    tuner = _tuner(torch.cuda.get_device_name(device))
    if torch.cuda.is_current_stream_capturing():
        return tuner.known(key, ways) or ways[0]
    return tuner.best(key, ways, run)


@cache
def _tuner(device: str) -> Tuner:
    from triton import __version__
    from triton.testing import do_bench

    name = f"tiles-{device.replace(' ', '-')}-triton-{__version__}.json"
    try:
        path = private_cache() / name
    except NoLibrary:
        path = Path(os.devnull, name)  # chosen anew in each process
    return Tuner(path, lambda call: float(do_bench(call, warmup=5, rep=20)))
