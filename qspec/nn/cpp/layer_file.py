"""A model's weights in one file, as the C++ core reads them: packed once, then read part by part.

Parts (each decoder layer; then head and embedding together) lie one after the other in whole blocks. Behind them stand
a JSON index, its length in eight bytes, and the SHA-256 of all that.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_char
from dataclasses import asdict, dataclass
import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO
import weakref

from torch import Tensor

from qspec.errors import RecipeError, SourceError
from qspec.nn.cpp import model as native_model, weights as native_weights
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import CMatrix
from qspec.nn.cpp.model import WeightSource
from qspec.nn.cpp.weights import Packed
from qspec.ops.native_library import library_name
from qspec.provenance import atomic_file
from qspec.records import LoadedModel, QuantizedModel

ENDS = "ends"
"""Name of the part that belongs to no layer."""
BLOCK = 4096
"""Bytes that reads past the file cache are multiples of, in the file and in memory."""
_ALIGN = 64
"""Where an array begins in its part: vectors of it are then loaded whole."""
_DIGEST = hashlib.sha256().digest_size
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FilePart:
    """Bytes `start` to `start + size` of a file. weights: their numbers, and arrays as (begin, bytes) or None."""

    start: int
    size: int
    weights: list[tuple[list[float], list[tuple[int, int] | None]]]

    def at(self, address: int) -> list[CMatrix]:
        """The weights, for a part that is read to `address`."""
        matrices = []
        for numbers, arrays in self.weights:
            codes, *others = (None if array is None else address + array[0] for array in arrays)
            size = arrays[0][1] if arrays[0] else 0
            matrices.append(CMatrix(*numbers, codes, size, *others))
        return matrices


def pack_once(model: LoadedModel | QuantizedModel, path: Path) -> None:
    """Pack a model's weights into `path`, unless they are there: whole, and in the layout of today.

    Layers are packed one by one. Raises `RecipeError` for a model that the C++ core does not run, and `OutputError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process finds the file when it comes second
        if not path.exists() or not _is_whole(path) or _index(path)["layout"] != _layout():
            _pack(model, path)


class LayerFile:
    """A file of `pack_once`. `direct` reads past the system's file cache: always from the disk."""

    def __init__(self, path: Path, direct: bool = False) -> None:
        """Raises `SourceError` where the file cannot be read so."""
        if direct and not hasattr(os, "O_DIRECT"):
            raise SourceError("direct_io", "reads past the file cache as only Linux does", "leave direct_io off")
        self._path = path
        self.parts = {name: FilePart(**facts) for name, facts in _index(path)["parts"].items()}
        try:
            self.file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError as error:
            fix = "leave direct_io off: not every file system has it" if direct else "check path and permissions"
            raise SourceError(str(path), f"cannot be opened to be read from ({error.strerror})", fix) from error
        weakref.finalize(self, os.close, self.file)

    def read(self, part: FilePart, address: int) -> None:
        """Copy a part to memory that has room for it. Raises `SourceError`."""
        memory, done = memoryview((c_char * part.size).from_address(address)).cast("B"), 0
        while done < part.size:
            try:
                count = os.preadv(self.file, [memory[done:]], part.start + done)
            except OSError as error:
                raise self.unreadable(str(error.strerror)) from error
            if not count:
                raise self.unreadable("it was cut")
            done += count

    def unreadable(self, why: str) -> SourceError:
        return SourceError(str(self._path), f"cannot be read ({why})", "check the disk, and open the model again")


def _pack(model: LoadedModel | QuantizedModel, path: Path) -> None:
    if obstacle := NativeDecoder.supports(model):
        rule = f"layers are read from disk by the C++ core, which has no code for {obstacle}"
        raise RecipeError("memory_limit", rule, "open the model without one")
    with atomic_file(path) as file:
        out = _Writer(file)
        parts = {name: asdict(_write_part(out, weights)) for name, weights in _parts(model)}
        index = json.dumps({"layout": _layout(), "parts": parts}).encode()
        out.write(index + len(index).to_bytes(8, "little"))
        file.write(out.digest.digest())


def _parts(model: LoadedModel | QuantizedModel) -> Iterator[tuple[str, list[Packed]]]:
    source = WeightSource(model)
    for layer in model.arch.layers:
        yield layer, source.layer(layer)
    yield ENDS, source.ends()


def _write_part(out: "_Writer", weights: Sequence[Packed]) -> FilePart:
    start, stored = out.size, []
    for p in weights:
        arrays = [None if array is None else (out.array(array) - start, array.nbytes) for array in p.arrays]
        stored.append(([p.kind, p.input, p.n, p.k, p.group, p.input_scale], arrays))
    out.fill(BLOCK)
    return FilePart(start, out.size - start, stored)


class _Writer:
    """Appends to a file, and knows how much and its digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def fill(self, unit: int) -> None:
        self.write(bytes(-self.size % unit))

    def array(self, x: Tensor) -> int:
        """Append the bytes of a contiguous tensor; where they begin."""
        self.fill(_ALIGN)
        begin = self.size
        self.write((c_char * x.nbytes).from_address(x.data_ptr()))
        return begin


def _is_whole(path: Path) -> bool:
    """Whether a file's bytes are those that were written."""
    digest, left = hashlib.sha256(), path.stat().st_size - _DIGEST
    with path.open("rb") as file:
        while left > 0 and (data := file.read(min(_CHUNK, left))):
            digest.update(data)
            left -= len(data)
        whole = file.read() == digest.digest()
    if not whole:
        logging.getLogger(__name__).warning("%s is damaged, and is made anew", path)
    return whole


def _index(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        end = file.seek(-_DIGEST - 8, os.SEEK_END)
        size = int.from_bytes(file.read(8), "little")
        file.seek(end - size)
        index: dict[str, Any] = json.loads(file.read(size))
        return index


def _layout() -> str:
    """Digest of all that says how weights are packed, and read."""
    digest = hashlib.sha256(library_name().encode())
    for source in (native_weights.__file__, native_model.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
