"""A checkpoint's tensors read on request, not mapped: decoder layers into buffers that are used over and over.

A layer's tensors lie in few runs of bytes (safetensors sorts by dtype, then by name), each read with one request. While
a buffer is shown, whoever asks for a tensor of that layer gets a view of it; all others are read as they are asked for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
import json
import mmap
import os
from pathlib import Path
from typing import Any
import weakref

import torch
from torch import Tensor

from qspec.bridges.tensors import read_tensors, weight_files
from qspec.errors import IntegrityError, SourceError

BLOCK = 4096
"""What direct reads are multiples of, in the file and in memory."""
_CHUNK = 4 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INTACT = "keep the files as they are while a model runs, and run `qspec check`"


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: bytes `start…stop` of a file."""

    file: "_File"
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]

    def of(self, raw: Tensor) -> Tensor:
        """The tensor whose bytes `raw` holds."""
        dtype = _DTYPES[self.dtype]
        raw = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        return raw.view(dtype).reshape(self.shape)


@dataclass(frozen=True)
class _Run:
    """Whole blocks from `start` on, of which bytes up to `stop` are wanted; they go to `at` of a buffer."""

    file: "_File"
    start: int
    stop: int
    at: int

    @property
    def blocks(self) -> int:
        """Bytes with the rest of the last block."""
        return -(-(self.stop - self.start) // BLOCK) * BLOCK

    def holds(self, stored: _Stored) -> bool:
        return self.file is stored.file and self.start <= stored.start and stored.stop <= self.stop


class Staging:
    """The weight files of a folder. `opener` is what `compressed.read` takes; the rest is `nn.offload.LayerSource`.

    `direct` reads past the system's file cache: what is read then takes no memory elsewhere, and always comes from the
    disk. Without it, memory that nobody else needs keeps what was read, as the system sees fit. Layers may be read in a
    thread of their own; the rest is for one thread.
    """

    def __init__(self, folder: Path, direct: bool = False) -> None:
        if direct and not hasattr(os, "O_DIRECT"):
            raise SourceError("direct_io", "reads past the file cache as only Linux does", "leave direct_io off")
        read_tensors(folder)  # refuses what is no safetensors
        self._files = [_File(path, direct) for path in weight_files(folder) if path.suffix == ".safetensors"]
        self._layers: dict[str, dict[str, _Stored]] = {}
        for name, stored in ((name, stored) for file in self._files for name, stored in file.tensors.items()):
            if name.startswith("model.layers."):
                self._layers.setdefault(".".join(name.split(".", 3)[:3]), {})[name] = stored
        self._runs = {layer: list(_runs(list(stored.values()))) for layer, stored in self._layers.items()}
        self._shown: dict[str, Tensor] = {}

    def opener(self, path: Path) -> "_Handle":
        return _Handle(next(file for file in self._files if file.path == path), self._shown)

    def buffer(self, layers: Iterable[str]) -> mmap.mmap:
        """Memory for one of these layers at a time; given back when its last view is gone."""
        return _new_buffer(max(map(self.size, layers)))

    def size(self, layer: str) -> int:
        """Bytes that a buffer for a layer needs."""
        return sum(run.blocks for run in self._runs[layer])

    def read(self, layer: str, buffer: mmap.mmap) -> None:
        """Fill a buffer. Raises `IntegrityError` for a file that is not what it was, `SourceError` for a failure."""
        with memoryview(buffer) as view:
            for run in self._runs[layer]:
                run.file.read(view[run.at : run.at + run.blocks], run.start, run.stop - run.start)

    def show(self, layer: str, buffer: mmap.mmap) -> None:
        """Give views of a buffer to who asks for tensors of this layer, until the next call."""
        self.hide()
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        for name, stored in self._layers[layer].items():
            run = next(run for run in self._runs[layer] if run.holds(stored))
            at = run.at + stored.start - run.start
            self._shown[name] = stored.of(raw[at : at + stored.stop - stored.start])

    def hide(self) -> None:
        """Hold no view any more."""
        self._shown.clear()


def _new_buffer(size: int) -> mmap.mmap:
    """Memory that begins at a page, as direct reads ask for."""
    return mmap.mmap(-1, max(size, BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _File:
    """One open safetensors file and where its tensors lie."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError as error:
            fix = "leave direct_io off: not every file system has it" if direct else "check path and permissions"
            raise SourceError(str(path), f"cannot be opened to be read from ({error.strerror})", fix) from error
        weakref.finalize(self, os.close, self._fd)
        self._state = self._stat()
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self.tensors = {name: self._stored(facts, 8 + size) for name, facts in header.items()}

    def read(self, view: memoryview, start: int, wanted: int) -> None:
        """Fill `view` from `start` on; beyond the `wanted` bytes the file may end."""
        done = 0
        try:
            while done < wanted and (count := os.preadv(self._fd, [view[done:]], start + done)):
                done += count
            changed = self._stat() != self._state
        except OSError as error:
            rule = f"cannot be read at byte {start + done} ({error.strerror})"
            raise SourceError(str(self.path), rule, "check the disk, and run `qspec check`") from error
        if done < wanted or changed:
            raise IntegrityError(str(self.path), "has changed since the model was opened", _INTACT)

    def _stored(self, facts: dict[str, Any], data: int) -> _Stored:
        start, stop = facts["data_offsets"]
        if facts["dtype"] not in _DTYPES:
            rule = f"holds {facts['dtype']}, which is not read layer by layer"
            raise SourceError(str(self.path), rule, "open it without a memory limit")
        return _Stored(self, data + start, data + stop, facts["dtype"], tuple(facts["shape"]))

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns


class _Handle:
    """The part of safetensors' open file that `LazyTensors` asks for."""

    def __init__(self, file: _File, shown: dict[str, Tensor]) -> None:
        self._file, self._shown = file, shown

    def get_tensor(self, name: str) -> Tensor:
        if name in self._shown:
            return self._shown[name]
        return _read_alone(self._file.tensors[name])

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self, name)

    def stored(self, name: str) -> _Stored:
        return self._file.tensors[name]


@dataclass(frozen=True)
class _Slice:
    """A tensor that a part is asked of; all of it is read."""

    handle: _Handle
    name: str

    def get_shape(self) -> list[int]:
        return list(self.handle.stored(self.name).shape)

    def get_dtype(self) -> str:
        return self.handle.stored(self.name).dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.handle.get_tensor(self.name)[index]


def _runs(tensors: Sequence[_Stored]) -> Iterator[_Run]:
    """Runs of blocks that hold all tensors; those that share a block, or are neighbours, are read together."""
    spans: list[tuple[_File, int, int]] = []
    for stored in sorted(tensors, key=lambda stored: (stored.file.path, stored.start)):
        if spans and spans[-1][0] is stored.file and stored.start <= spans[-1][2] + BLOCK:
            spans[-1] = (stored.file, spans[-1][1], stored.stop)
        else:
            spans.append((stored.file, stored.start // BLOCK * BLOCK, stored.stop))
    at = 0
    for file, start, stop in spans:
        run = _Run(file, start, stop, at)
        at += run.blocks
        yield run


def _read_alone(stored: _Stored) -> Tensor:
    """A tensor in memory of its own, read in chunks."""
    raw = torch.empty(stored.stop - stored.start, dtype=torch.uint8)
    buffer = _new_buffer(min(_CHUNK, len(raw) + 2 * BLOCK))
    chunk, at, blocks = torch.frombuffer(buffer, dtype=torch.uint8), stored.start, len(buffer) // BLOCK * BLOCK
    while at < stored.stop:
        begin = at // BLOCK * BLOCK
        end = min(begin + blocks, stored.stop)
        with memoryview(buffer) as view:
            stored.file.read(view[:blocks], begin, end - begin)
        raw[at - stored.start : end - stored.start] = chunk[at - begin : end - begin]
        at = end
    return stored.of(raw)
