"""Finished work in a folder, each result under a digest of all that decides it: what is there is not done again."""

from collections.abc import Callable
from dataclasses import dataclass
import json
from pathlib import Path
from typing import Any

from qspec.provenance import atomic_write, digest_of, package_version, restore, staged_dir

_NOTE = ".kept.json"


@dataclass(frozen=True)
class Entry:
    """One finished result: its value, of JSON types, and the folder that holds its files."""

    value: Any
    folder: Path


class Kept:
    """Results by name and key: a key is all that decides a result, as JSON types; the version of qspec joins it.

    An entry appears whole or not at all, so that a process that is killed goes on after the last one. Entries that were
    cut short, or that lie in the place of others, count as absent. Each entry has one writer at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str, key: object) -> Entry | None:
        """The entry of this name and key, if it is whole."""
        digest, path = self._place(name, key)
        if not path.exists():
            restore(path)  # of a writer that was killed in the moment between two versions
        try:
            note = json.loads((path / _NOTE).read_bytes())
            whole = note["digest"] == digest and note["files"] == _sizes(path)
            return Entry(note["value"], path) if whole else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, name: str, key: object, make: Callable[[Path], Any]) -> Entry:
        """Put what `make` writes into an empty folder, and what it returns, in the place of whatever is there."""
        digest, path = self._place(name, key)
        with staged_dir(path) as part:
            value = make(part)
            atomic_write(part / _NOTE, json.dumps({"digest": digest, "files": _sizes(part), "value": value}))
        return Entry(json.loads(json.dumps(value)), path)  # as a later call finds it

    def entry(self, name: str, key: object, make: Callable[[Path], Any]) -> Entry:
        """The entry of this name and key, made unless it is there."""
        return self.find(name, key) or self.keep(name, key, make)

    def value(self, name: str, key: object, make: Callable[[], Any]) -> Any:
        """The value of an entry without files, made unless it is there."""
        return self.entry(name, key, lambda _: make()).value

    def _place(self, name: str, key: object) -> tuple[str, Path]:
        digest = digest_of([name, key, package_version("qspec")])
        return digest, self._folder / f"{name}-{digest[:16]}"


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, the note aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / _NOTE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
