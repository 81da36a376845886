"""The choice among ways to run an operation."""

from collections.abc import Callable
from pathlib import Path

import torch

from qspec.ops.cuda.tuning import Tuner, fastest


def timed(calls: list[int]) -> Callable[[Callable[[], object]], float]:
    """A clock for ways that are numbers of seconds."""

    def seconds(call: Callable[[], object]) -> float:
        value = call()
        assert isinstance(value, int)
        calls.append(value)
        return float(value)

    return seconds


def test_choice_is_made_once_and_kept(tmp_path: Path) -> None:
    """Catches the slowest that is taken, timing again in a later process, and a choice that another key is given."""
    path, calls = tmp_path / "new" / "tiles.json", list[int]()
    tuner = Tuner(path, timed(calls))
    assert tuner.best("a", [3, 1, 2], int) == 1
    assert tuner.best("b", [5, 4], int) == 4
    assert calls == [3, 1, 2, 5, 4]
    assert Tuner(path, timed(calls)).best("a", [3, 1, 2], int) == 1
    assert len(calls) == 5


def test_stale_and_broken_files_are_tuned_anew(tmp_path: Path) -> None:
    """Catches a choice that no longer exists, and a file that stops every run."""
    path, calls = tmp_path / "tiles.json", list[int]()
    Tuner(path, timed(calls)).best("a", [1, 2], int)
    assert Tuner(path, timed(calls)).best("a", [4, 3], int) == 3
    path.write_text("{", encoding="utf-8")
    assert Tuner(path, timed(calls)).best("a", [4, 3], int) == 3
    path.unlink()
    path.mkdir()
    assert Tuner(path, timed(calls)).best("a", [4, 3], int) == 3


def test_nothing_is_timed_without_a_gpu() -> None:
    """Catches tuning in Triton's interpreter, which would take hours and mean nothing."""
    assert fastest("key", torch.device("cpu"), ["first", "second"], lambda way: 1 / 0) == "first"
