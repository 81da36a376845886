"""Layers of a CUDA model that wait in pinned host memory and are copied ahead of the pass that reads them.

Two buffers on the device take turns: while one layer computes out of the first, the next one that waits is copied into
the second, on a stream of its own. A pass forks that stream and joins it again, so a graph may hold both. What is
computed is the same to the last bit; each pass costs at least the bytes copied over the bus's rate.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.cuda.model import CudaLayer, CudaModel

Part = TypeVar("Part")
ALIGNED = 256
"""Bytes that parts of a layer begin at multiples of, as an allocation would."""
BUFFERS = 2


def offloaded(model: CudaModel, device: torch.device, limit: int) -> CudaModel:
    """A model on the host moved to `device`, with as many layers waiting outside as `limit` bytes of weights ask for.

    Those are spread evenly, so that each has layers before it to hide behind. Raises `RecipeError` where even two
    buffers do not fit.
    """
    layers = list(model.layers)
    sizes = [_packed_bytes(layer) for layer in layers]
    around = sum(x.nbytes for x in tensors(replace(model, layers=())))
    buffers = BUFFERS * max(sizes)
    if around + sum(sizes) <= limit:
        return moved(model, device)
    if around + buffers > limit:
        rule = f"embedding, head and {BUFFERS} layers take {(around + buffers) / 1e9:.2f} GB"
        raise RecipeError(f"memory limit {limit / 1e9:.2f} GB", rule, "raise it, or quantize further")
    kept = next(n for n in range(len(layers), -1, -1) if around + buffers + n * max(sizes) <= limit)
    waiting = len(layers) - kept
    outside = {(2 * i + 1) * len(layers) // (2 * waiting) for i in range(waiting)}
    outer = moved(replace(model, layers=()), device)
    return replace(outer, layers=StreamedLayers(layers, outside, device))


class StreamedLayers:
    """The layers of a model, one after the other; each may be read until the next one is asked for."""

    def __init__(self, layers: Sequence[CudaLayer], outside: set[int], device: torch.device) -> None:
        self._device, pinned = device, device.type == "cuda"
        self._host = [_packed(layers[i], pinned) for i in sorted(outside)]
        size = max(map(len, self._host))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        turn = {i: order for order, i in enumerate(sorted(outside))}
        self._turns = [turn.get(i) for i in range(len(layers))]
        self._layers = [
            moved(layer, device) if order is None else _unpacked(layer, self._buffers[order % BUFFERS])
            for layer, order in zip(layers, self._turns, strict=True)
        ]
        self._stream = torch.cuda.Stream(device) if pinned else None

    def __iter__(self) -> Iterator[CudaLayer]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        ready = [self._fetch(order) for order in range(BUFFERS)]
        for layer, order in zip(self._layers, self._turns, strict=True):
            if order is None:
                yield layer
                continue
            self._join(ready[order % BUFFERS])
            yield layer
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            ready[order % BUFFERS] = self._fetch(order + BUFFERS)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _fetch(self, order: int) -> torch.cuda.Event | None:
        """Begin to copy a layer into its buffer; what tells that it is there."""
        if order >= len(self._host):
            return None
        host = self._host[order]
        buffer, event = self._buffers[order % BUFFERS][: len(host)], None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            buffer.copy_(host, non_blocking=True)
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _join(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def moved(part: Part, device: torch.device) -> Part:
    """A dataclass whose tensors, however deep, lie on another device; one that is there twice (tied) once."""
    found = {id(x): x.to(device) for x in tensors(part)}
    there: Part = _mapped(part, lambda x: found[id(x)])
    return there


def tensors(part: Any) -> list[Tensor]:
    """All tensors of a dataclass, however deep, in order; one that is there twice once."""
    found = dict[int, Tensor]()
    _mapped(part, lambda x: found.setdefault(id(x), x))
    return list(found.values())


def _mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        return tuple(_mapped(x, change) for x in part)
    if is_dataclass(part) and not isinstance(part, type):
        own = {f.name: getattr(part, f.name) for f in fields(part)}
        new = {name: changed for name, x in own.items() if (changed := _mapped(x, change)) is not x}
        return replace(part, **new) if new else part
    return part


def _packed_bytes(layer: CudaLayer) -> int:
    return sum(-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors(layer))


def _packed(layer: CudaLayer, pinned: bool) -> Tensor:
    """All tensors of a layer in one piece of host memory."""
    whole, at = torch.empty(_packed_bytes(layer), dtype=torch.uint8, pin_memory=pinned), 0
    for x in tensors(layer):
        whole[at : at + x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
        at += -(-x.nbytes // ALIGNED) * ALIGNED
    return whole


def _unpacked(layer: CudaLayer, buffer: Tensor) -> CudaLayer:
    """The layer whose tensors are those pieces of a buffer."""
    pieces, at = dict[int, Tensor](), 0
    for x in tensors(layer):
        pieces[id(x)] = buffer[at : at + x.nbytes].view(x.dtype).view(x.shape)
        at += -(-x.nbytes // ALIGNED) * ALIGNED
    found: CudaLayer = _mapped(layer, lambda x: pieces[id(x)])
    return found
