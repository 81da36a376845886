"""Finished work that is found again: whole, under its own key, or not at all."""

from itertools import count
import os
from pathlib import Path
from typing import Any

import pytest

from qspec import kept as kept_module
from qspec.kept import Kept


def write(folder: Path) -> dict[str, Any]:
    (folder / "inner").mkdir()
    (folder / "inner/file.bin").write_bytes(b"12345")
    return {"pair": (1, 2)}


def refuse(*_: Any) -> None:
    pytest.fail("it is there")


def test_what_is_there_is_not_done_again(tmp_path: Path) -> None:
    """Catches work that is done twice, and a value that a resumed run reads as another type than the first one had."""
    made, found = Kept(tmp_path).entry("a", [1], write), Kept(tmp_path).entry("a", [1], refuse)
    assert made == found
    assert found.value == {"pair": [1, 2]}
    assert (found.folder / "inner/file.bin").read_bytes() == b"12345"
    assert Kept(tmp_path).value("b", None, lambda: 3) == Kept(tmp_path).value("b", None, refuse) == 3


@pytest.mark.parametrize(("name", "key"), [("a", [2]), ("a", [1, None]), ("other", [1])])
def test_another_name_or_key_is_another_result(tmp_path: Path, name: str, key: object) -> None:
    """Catches a result that is taken for one of other settings; the one that was there stays."""
    kept = Kept(tmp_path)
    kept.entry("a", [1], write)
    assert kept.find(name, key) is None
    kept.value(name, key, lambda: "other")
    assert kept.entry("a", [1], refuse).value == {"pair": [1, 2]}


def test_another_version_does_the_work_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches results of code that has changed since."""
    Kept(tmp_path).entry("a", [1], write)
    monkeypatch.setattr(kept_module, "package_version", lambda _: "0.0.0")
    assert Kept(tmp_path).find("a", [1]) is None


def test_an_entry_that_was_cut_short_counts_as_absent(tmp_path: Path) -> None:
    """Catches a file, or a note, that a full disk or a lost connection has cut, and what lies in another's place."""
    kept = Kept(tmp_path)
    folder, note = kept.entry("a", [1], write).folder, kept.entry("a", [1], write).folder / ".kept.json"
    whole = note.read_bytes()
    for damaged in (*(whole[:size] for size in range(len(whole) - 1)), b"[]", b"null", b'{"digest": 1}'):
        note.write_bytes(damaged)
        assert kept.find("a", [1]) is None
    note.write_bytes(whole)
    (folder / "inner/file.bin").write_bytes(b"1234")
    assert kept.find("a", [1]) is None
    assert kept.entry("a", [1], write).value == {"pair": [1, 2]}
    other = kept.entry("b", [1], write).folder
    other.rename(other.with_name("aside"))
    folder.rename(other)
    assert kept.find("b", [1]) is None


def test_a_new_entry_takes_the_place_of_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a moment at which neither the old nor the new checkpoint is found by a process that starts anew."""
    rename = os.rename
    for last in count():
        kept, left = Kept(tmp_path / str(last)), iter(range(last))
        kept.keep("a", [1], lambda _: "old")

        def die(*args: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise SystemExit
            rename(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", die)
            patched.setattr("shutil.rmtree", lambda *_, **__: None)  # a killed process cleans nothing up
            try:
                kept.keep("a", [1], lambda _: "new")
            except SystemExit:
                pass
            else:
                break
        entry = kept.find("a", [1])
        assert entry is not None
        assert entry.value in ("old", "new")
    assert last == 3  # the note, the old one aside, the new one in its place
    assert kept.find("a", [1]).value == "new"  # type: ignore[union-attr]
