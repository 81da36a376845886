"""A decoder whose layers do not all fit: some stay in memory, the others are read again for every pass.

A thread reads ahead while layers run, also into the next pass: the disk works while a draft is made. What is read are
packed codes, so quantization and offload multiply. A pass over k + 1 tokens reads what a pass over one does: where
reading is what takes the time, verification costs one plain step.
"""

from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass
import os
from pathlib import Path

from qspec.errors import OutputError, RecipeError
from qspec.nn.cpp import interface as native_interface
from qspec.nn.cpp.decoder import Core, NativeDecoder
from qspec.nn.cpp.interface import CPiece
from qspec.nn.cpp.layer_file import ENDS, FilePart, LayerFile, pack_once
from qspec.nn.cpp.model import WeightSource
from qspec.ops.native_library import NoLibrary, private_cache
from qspec.records import LoadedModel, QuantizedModel


@dataclass(frozen=True)
class Reading:
    """Reads for passes: bytes, the seconds that reading took, and the seconds that passes waited."""

    bytes: int
    seconds: float
    waited: float

    @property
    def hidden(self) -> float:
        """Share of the time of reading behind which something else was done; 0 where nothing was read."""
        return max(0.0, 1 - self.waited / self.seconds) if self.seconds else 0.0

    def since(self, earlier: "Reading") -> "Reading":
        return Reading(self.bytes - earlier.bytes, self.seconds - earlier.seconds, self.waited - earlier.waited)


@dataclass(frozen=True)
class Residency:
    """resident, streamed: names of layers; total: the most that is in memory; read: what a pass reads."""

    resident: tuple[str, ...]
    streamed: tuple[str, ...]
    total: int
    read: int

    def __str__(self) -> str:
        layers = len(self.resident) + len(self.streamed)
        return f"{len(self.resident)} of {layers} layers in memory, {megabytes(self.read)} read for every pass"


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model. fixed: all that belongs to no layer; layers: each layer's weights, by name."""

    fixed: int
    layers: Mapping[str, int]

    def holding(self, count: int) -> Residency:
        """With `count` layers in memory, spread evenly: while they run, the disk is not idle."""
        names, total = list(self.layers), len(self.layers)
        resident = [name for i, name in enumerate(names) if (i + 1) * count // total > i * count // total]
        streamed = [name for name in names if name not in resident]
        moving = [self.layers[name] for name in streamed]
        held = self.fixed + sum(self.layers[name] for name in resident) + BUFFERS * max(moving, default=0)
        return Residency(tuple(resident), tuple(streamed), held, sum(moving))

    def under(self, limit: int) -> Residency:
        """With as many layers in memory as `limit` allows; raises `RecipeError` where it does not allow for none."""
        ways = [self.holding(count) for count in range(len(self.layers), -1, -1)]
        way = next((way for way in ways if way.total <= limit), None)
        if way is not None:
            return way
        least = megabytes(min(way.total for way in ways))
        rule = (
            f"the model takes {least} at the least: {megabytes(self.fixed)} for embedding, head and KV cache, the rest "
            f"for {BUFFERS} buffers of the largest layer"
        )
        fix = f"give at least {least}, or lower speculation.max_length, which sizes the KV cache"
        raise RecipeError(f"memory limit {megabytes(limit)}", rule, fix)


class OffloadedDecoder(NativeDecoder):
    """A `NativeDecoder` under a limit of memory: the same layers, the same numbers to the last bit.

    The limit holds for weights, KV cache and buffers; what a pass computes and other sequences' caches come on top.
    The thread ends with the last reference.
    """

    _core: "_StreamedCore"

    def __init__(
        self, model: LoadedModel | QuantizedModel, file: LayerFile, limit: int, max_length: int | None = None
    ) -> None:
        """`file` holds the weights of `model`. Raises `RecipeError` for a limit, in bytes, that is too low."""
        self._run_on(_StreamedCore(model, file, limit, max_length or model.arch.max_positions), model.arch)

    @classmethod
    def open(
        cls,
        model: LoadedModel | QuantizedModel,
        weights: str,
        limit: int,
        max_length: int | None = None,
        direct: bool = False,
    ) -> "OffloadedDecoder":
        """Pack a model in the cache folder, once for all weights of one name, and open it from there.

        `direct` reads past the system's file cache. Raises `RecipeError` for a model that the C++ core does not run.
        """
        path = packed_path(weights)
        pack_once(model, path)
        return cls(model, LayerFile(path, direct), limit, max_length)

    @property
    def sizes(self) -> ModelBytes:
        return self._core.sizes

    @property
    def residency(self) -> Residency:
        return self._core.residency

    def reading(self) -> Reading:
        """All that was read since the model was opened, by all its sequences."""
        reading = self._core.reading()
        return Reading(reading.bytes, reading.seconds, reading.waited)


def packed_path(weights: str) -> Path:
    """Where weights of this name are packed. A file may be deleted at any time; it is made again.

    Raises `OutputError` where the cache folder is not this user's alone.
    """
    try:
        return private_cache() / "layers" / f"{weights}.layers"
    except NoLibrary as error:
        rule = f"packed layers have no safe place ({error})"
        raise OutputError("memory limit", rule, "mend that, or open the pair without a limit") from error


class _StreamedCore(Core):
    """Weights that are read from a file: into the core's memory once, or for every pass."""

    def __init__(self, model: LoadedModel | QuantizedModel, file: LayerFile, limit: int, max_length: int) -> None:
        self._file, self._limit = file, limit
        super().__init__(model, max_length, None)

    def reading(self) -> native_interface.CReading:
        reading = native_interface.CReading()
        self.lib.qspec_reading(self.handle, byref(reading))
        return reading

    def unreadable(self) -> Exception:
        error = self.reading().error
        return self._file.unreadable("it was cut" if error < 0 else os.strerror(error))

    def _load(self, model: LoadedModel | QuantizedModel) -> None:
        arch, parts, source = model.arch, self._file.parts, WeightSource(model)
        tables = 2 * 4 * self.max_length * len(arch.rope_inv_freq) * (2 if arch.window_inv_freq else 1)
        fixed = parts[ENDS].size + tables + self.lib.qspec_cache_bytes(self.handle)
        self.sizes = ModelBytes(fixed, {name: parts[name].size for name in arch.layers})
        self.residency = self.sizes.under(self._limit)
        self._set_ropes(arch)
        self._set_ends(source, parts[ENDS].at(self._read(parts[ENDS])), in_place=True)
        for name in self.residency.resident:
            self._place(source, name, self._read(parts[name]))
        if self.residency.streamed:
            self._stream(source, self.residency.streamed)

    def _stream(self, source: WeightSource, names: tuple[str, ...]) -> None:
        parts = [self._file.parts[name] for name in names]
        places = [self._memory(max(part.size for part in parts)) for _ in range(BUFFERS)]
        pieces = []
        for turn, (name, part) in enumerate(zip(names, parts, strict=True)):
            place = places[turn % BUFFERS]
            self._place(source, name, place)
            pieces.append(CPiece(source.arch.layers.index(name), part.start, part.size, place))
        count = len(pieces)
        self.check(self.lib.qspec_set_stream(self.handle, self._file.file, (CPiece * count)(*pieces), count))

    def _place(self, source: WeightSource, name: str, address: int) -> None:
        weights = self._file.parts[name].at(address)
        self._set_layer(source.arch.layers.index(name), source, weights, in_place=True)

    def _read(self, part: FilePart) -> int:
        """Address of memory that holds a part from now on."""
        address = self._memory(part.size)
        self._file.read(part, address)
        return address

    def _memory(self, size: int) -> int:
        address: int | None = self.lib.qspec_memory(self.handle, size)
        self.check(address)
        assert address
        return address


BUFFERS = 2
"""Places that layers are read into: one runs while the next is read."""


def megabytes(count: int) -> str:
    """`12.3 MB`, of 10^6 bytes, as limits are written; rounded up, so that it is always enough."""
    return f"{-(-count // 100_000) / 10:.1f} MB"
