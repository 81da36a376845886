"""A decoder whose layers do not all fit: some stay in memory, the others are read again for every pass.

A thread reads ahead while layers run, also into the next pass: the disk works while a draft is made. What is read are
the stored codes, so quantization and offload multiply. A pass over k + 1 tokens reads what a pass over one does: where
reading is what takes the time, verification costs one plain step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
import mmap
import os
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Protocol, Self
import weakref

import torch
from torch import Tensor

from qspec.nn.decoder import Decoder, Layer
from qspec.nn.lm import FORKED
from qspec.nn.residency import BUFFERS, Residency, held_bytes, layer_bytes, plan_residency
from qspec.ops.cpu import FloatLinear
from qspec.ops.select import Kernels, Linear
from qspec.records import ArchMap, QuantizedModel

_CLOSED = "the model was closed: open it again"
Filled = tuple[str, mmap.mmap] | Exception


class LayerSource(Protocol):
    """Where stored layers come from; `bridges.staging` reads files."""

    def size(self, layer: str) -> int:
        """Bytes that a buffer for a layer needs."""

    def buffer(self, layers: Sequence[str]) -> mmap.mmap:
        """Memory for one of these layers at a time."""

    def read(self, layer: str, buffer: mmap.mmap) -> None:
        """Fill a buffer; called from a thread of its own."""

    def show(self, layer: str, buffer: mmap.mmap) -> None:
        """Let the model's tensors of this layer be views of a buffer."""

    def hide(self) -> None:
        """End that."""


class OffloadedDecoder(Decoder):
    """A `Decoder` under a limit of memory: the same layers, the same numbers to the last bit.

    The limit holds for weights, KV cache and buffers; what a pass computes and other sequences' caches come on top.
    `close`, the end of a `with` block or the last reference ends the thread.
    """

    residency: Residency
    _layers: "_Layers"

    @classmethod
    def open(
        cls,
        model: QuantizedModel,
        source: LayerSource,
        limit: int,
        dtype: torch.dtype = torch.float32,
        max_length: int | None = None,
        kernels: Kernels = "auto",
    ) -> Self:
        """`model` reads its tensors from `source`. Raises `RecipeError` for a limit, in bytes, that is too low."""

        def start(build: Callable[[str], Layer]) -> _Layers:
            return _Layers(model.arch, source, build)

        decoder = cls.from_quantized(model, dtype, max_length, kernels, start)
        schemes = model.plan.resolve(model.arch.linears())
        sizes = layer_bytes(model.arch, schemes, source.size, dtype, kernels)
        decoder.residency = plan_residency(limit, decoder._fixed_bytes(model, dtype, kernels), sizes)
        decoder._layers.start(decoder.residency)
        return decoder

    def close(self) -> None:
        """End the thread; nothing runs afterwards, in forks neither."""
        self._layers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tied_head(self, embed_VK: Tensor) -> Linear:
        """Without the copy that lies beside a mapped embedding: this one is not mapped."""
        return FloatLinear(embed_VK)

    def _fixed_bytes(self, model: QuantizedModel, dtype: torch.dtype, kernels: Kernels) -> int:
        """All that belongs to no layer, the KV cache of one sequence included."""
        assert self._embed_VK is not None
        tables = {table_LD.data_ptr(): table_LD.nbytes for table_LD in (*self._rope, *self._window_rope)}
        cache = round(self.cache.bytes_per_token() * self.max_length) + self.cache.window_bytes()
        arch, head = self.arch, 0
        scheme = model.plan.resolve(arch.linears())["lm_head"]
        if not arch.tied or scheme is not None:
            head = held_bytes(scheme, arch.linear_shape("lm_head"), dtype, kernels)
        return self._embed_VK.nbytes + head + sum(tables.values()) + cache


class _Layers:
    """The layers of one model, once around for each iteration; one iteration at a time."""

    def __init__(self, arch: ArchMap, source: LayerSource, build: Callable[[str], Layer]) -> None:
        self._arch, self._source, self._build = arch, source, build
        self._resident: dict[str, Layer] = {}
        self._ahead: _ReadAhead | None = None

    def start(self, residency: Residency) -> None:
        for name in residency.resident:
            buffer = self._source.buffer([name])
            self._source.read(name, buffer)
            self._resident[name] = self._made(name, buffer)
        if residency.streamed:
            self._ahead = _ReadAhead(self._source, residency.streamed)

    def __iter__(self) -> Iterator[Layer]:
        for name in self._arch.layers:
            if (layer := self._resident.get(name)) is not None:
                yield layer
                continue
            if self._ahead is None:
                raise RuntimeError(_CLOSED)
            buffer = self._ahead.take(name)
            try:
                yield self._made(name, buffer)  # it may hold views of the buffer
            finally:
                self._ahead.give_back(buffer)

    def close(self) -> None:
        self._resident.clear()
        if self._ahead is not None:
            self._ahead.close()

    def _made(self, name: str, buffer: mmap.mmap) -> Layer:
        self._source.show(name, buffer)
        try:
            return self._build(name)
        finally:
            self._source.hide()


class _ReadAhead:
    """Reads layers, in order and over again, each into the next buffer that is free."""

    def __init__(self, source: LayerSource, order: Sequence[str]) -> None:
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        self._filled: SimpleQueue[Filled] = SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(source.buffer(order))
        arguments = source.read, tuple(order), self._free, self._filled
        self._thread = Thread(target=_read_ahead, args=arguments, name="qspec read-ahead", daemon=True)
        self._process = os.getpid()
        self._thread.start()
        self.close = weakref.finalize(self, _end, self._free, self._thread)

    def take(self, layer: str) -> mmap.mmap:
        """The buffer that a layer was read into. Raises what reading it raised, then and ever after."""
        while True:
            found = self._next()
            if isinstance(found, Exception):
                self._filled.put(found)
                raise found
            name, buffer = found
            if name == layer:
                return buffer
            self.give_back(buffer)  # a pass was left half way: around to where this one is

    def give_back(self, buffer: mmap.mmap) -> None:
        self._free.put(buffer)

    def _next(self) -> Filled:
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        while self.close.alive:
            try:
                return self._filled.get(timeout=1.0)
            except Empty:
                assert self._thread.is_alive(), "the thread ends with an error to raise, or after `close`"
        raise RuntimeError(_CLOSED)


def _read_ahead(
    read: Callable[[str, mmap.mmap], None],
    order: Sequence[str],
    free: "SimpleQueue[mmap.mmap | None]",
    filled: "SimpleQueue[Filled]",
) -> None:
    """The thread. It knows nothing of the decoder, so that the decoder can be forgotten while it runs."""
    for layer in cycle(order):
        if (buffer := free.get()) is None:
            return
        try:
            read(layer, buffer)
        except Exception as error:  # noqa: BLE001  raised where the layer is asked for
            filled.put(error)
            return
        filled.put((layer, buffer))


def _end(free: "SimpleQueue[mmap.mmap | None]", thread: Thread) -> None:
    """Buffers that are free come first, and would be read into once more."""
    with suppress(Empty):
        while True:
            free.get_nowait()
    free.put(None)
    if thread is not current_thread():
        thread.join(timeout=10.0)
