"""Where a model is quantized piece by piece: each finished piece is kept, so that a killed run goes on after it.

A piece is two files: its tensors, and a record that is written last and says that the piece is whole. Beside the last
one lie the hidden states that the next one starts from.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import shutil
from typing import Any

from torch import Tensor

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import SourceError
from qspec.provenance import atomic_write

_KEY = "key.json"


class Store:
    """A folder of finished pieces. `key` is all that their bytes depend on; pieces of another key are dropped."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        self._key = json.dumps(key, sort_keys=True, indent=1)
        if self._read(_KEY) != self._key:
            shutil.rmtree(folder, ignore_errors=True)
        self.records = self._finished()

    def keep(
        self,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        states: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Add a piece. `states`: named lists of hidden states after it."""
        number = len(self.records)
        if not number:
            atomic_write(self.folder / _KEY, self._key)
        flat = {f"{name}.{row}": x_TK for name, rows in states.items() for row, x_TK in enumerate(rows)}
        write_tensors(self._tensors(number), tensors)
        if flat:
            write_tensors(self._states(number), flat)
        atomic_write(self.folder / f"{number:05d}.json", json.dumps(record))
        self._states(number - 1).unlink(missing_ok=True)
        self.records.append(dict(record))

    def states(self, name: str, rows: int) -> list[Tensor]:
        """Hidden states after the last piece, as `keep` got them."""
        stored = read_tensors(self._states(len(self.records) - 1))
        return [stored[f"{name}.{row}"].clone() for row in range(rows)]

    def tensor_files(self) -> list[Path]:
        """The tensors of every piece."""
        return [self._tensors(number) for number in range(len(self.records))]

    def _finished(self) -> list[dict[str, Any]]:
        """Records of the pieces that are whole, up to the first that is not."""
        records: list[dict[str, Any]] = []
        while (text := self._read(f"{len(records):05d}.json")) is not None:
            try:
                read_tensors(self._tensors(len(records)))
            except SourceError:
                break
            records.append(json.loads(text))
        return records

    def _tensors(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _states(self, number: int) -> Path:
        return self.folder / f"{number:05d}.states.safetensors"

    def _read(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
