"""The GGUF container: its header parsed in one pass, its tensors' bytes by name (version 2 and 3, little-endian).

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The library's own reader takes seconds for a
vocabulary of 50,000 tokens, which `qspec plan` would pay each time.
"""

from dataclasses import dataclass
import math
import mmap
from pathlib import Path
import struct
from typing import Any

from qspec.errors import SourceError

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order (GGUF writes it reversed); `kind` is ggml's type number."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """Header of a GGUF file. Raises `SourceError` if it is none, or is cut off."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse()
        except (ArithmeticError, MemoryError, OSError, RecursionError, TypeError, ValueError, struct.error) as error:
            raise SourceError(str(path), f"is not a readable GGUF file ({error})", "download it again") from error

    def read(self, name: str, size: int) -> memoryview:
        """The `size` bytes of a tensor, mapped, not copied."""
        start = self.tensors[name].offset
        if start + size > len(self._map):
            raise SourceError(f"{self.path}: {name}", "lies beyond the end of the file", "download it again")
        return memoryview(self._map)[start : start + size]

    def _parse(self) -> None:
        cursor = _Cursor(self._map)
        magic, version = cursor.numbers("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        n_tensors, n_values = cursor.numbers("QQ")
        for _ in range(n_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.numbers("I")[0])
        infos = [cursor.tensor_info() for _ in range(n_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{codes}", self.data, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return values

    def string(self) -> str:
        (size,) = self.numbers("Q")
        if self.at + size > len(self.data):
            raise ValueError("text beyond the end of the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if of in _CODES:
                return list(self.numbers(f"{count}{_CODES[of]}"))
            return [self.value(of) for _ in range(count)]
        if kind not in _CODES:
            raise ValueError(f"value type {kind}")
        return self.numbers(_CODES[kind])[0]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (n_dims,) = self.numbers("I")
        shape = self.numbers(f"{n_dims}Q")
        kind, offset = self.numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset
