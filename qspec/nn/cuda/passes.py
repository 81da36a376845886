"""One pass of a model over static tensors: B sequences, R rows of each, N = B * R; nothing is read on the host.

On a GPU each size of a pass is captured as a CUDA graph when it is first asked for, and replayed after; on a CPU the
same function is called. Which sizes there are, `row_bucket` and `batch_bucket` say.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.model import CudaLayer, CudaModel, Rounded
from qspec.ops import cuda as ops
from qspec.ops.cuda import KVLayer

Given = TypeVar("Given")
Result = TypeVar("Result")
Memory = Any

CHUNK = 2048
"""Rows of a prompt that go through the model together: bounds the memory of a pass."""
NODES = 64
"""Rows of one sequence that a pass tells apart: the bits of an int64."""
ROWS: tuple[int, ...] = (*range(1, 10), 12, 16, 24, 32, 48, NODES)
"""Rows per sequence that graphs are captured for."""


def row_bucket(rows: int) -> int:
    """The size of the pass that `rows` go into; the rest is padding."""
    return ROWS[bisect_left(ROWS, rows)]


def batch_bucket(sequences: int, most: int) -> int:
    """The next power of two, but no more than there are."""
    return min(1 << (sequences - 1).bit_length(), most)


@dataclass(frozen=True)
class Inputs:
    """int64: tokens, positions, slots (padding: the spare one), ancestors (bits of the nodes seen), lengths."""

    tokens_BR: Tensor
    positions_BR: Tensor
    slots_BR: Tensor
    ancestors_BR: Tensor
    lengths_B: Tensor

    @classmethod
    def padding(cls, batch: int, rows: int, spare: int, device: torch.device | None = None) -> "Inputs":
        """Rows that see nothing and are written to the spare position."""
        zeros_BR = torch.zeros(batch, rows, dtype=torch.long, device=device)
        slots_BR, lengths_B = torch.full_like(zeros_BR, spare), torch.zeros_like(zeros_BR[:, 0])
        return cls(zeros_BR, zeros_BR.clone(), slots_BR, zeros_BR.clone(), lengths_B)

    @classmethod
    def chain(cls, tokens_BR: Tensor, lengths_B: Tensor) -> "Inputs":
        """The next R tokens of each sequence, behind what its cache holds."""
        rows_R = torch.arange(tokens_BR.shape[1], device=tokens_BR.device)
        positions_BR = lengths_B[:, None] + rows_R
        ancestors_R = _chain(len(rows_R), rows_R.device)
        return cls(tokens_BR, positions_BR, positions_BR, ancestors_R.expand_as(positions_BR), lengths_B)

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(*(x.to(device, non_blocking=True) for x in _tensors(self)))


Outputs = tuple[Tensor, Tensor]
"""Float32 logits `[B, R, V]`, and the states behind them `[B, R, H + S]`: normed, then what is tapped, by layer."""
Layers = tuple[int, ...]
"""Those whose entering residuals are tapped, rising; the number of layers: what enters the final norm."""


def run(model: CudaModel, layers: list[KVLayer], rope: tuple[Tensor, Tensor], x: Inputs, taps: Layers = ()) -> Outputs:
    """Up to `NODES` rows of every sequence, through the model."""
    scale = model.arch.attention_scale or model.arch.head_dim**-0.5

    def attend(i: int, q_BRQD: Tensor) -> Tensor:
        return ops.attend(q_BRQD, layers[i], x.lengths_B, x.ancestors_BR, scale)

    return head(model, _body(model, layers, rope, x, attend, taps))


def prefill(
    model: CudaModel,
    cache: CudaCache,
    slot: int,
    rope: tuple[Tensor, Tensor],
    x: Inputs,
    start: int,
    taps: Layers = (),
) -> Tensor:
    """Any number of rows of one sequence behind `start` positions; states `[1, R, H + S]` as `Outputs` has them.

    Attention takes them in pieces of `NODES`, each a sequence of its own behind all before it: the cache is read as it
    is stored, and only as far as a row sees.
    """
    rows, scale = x.tokens_BR.shape[1], model.arch.attention_scale or model.arch.head_dim**-0.5
    count, padding = -(-rows // NODES), -rows % NODES
    pieces, layers = cache.one(slot, count), cache.one(slot)
    lengths_B = start + NODES * torch.arange(count, device=model.device)
    ancestors_BR = F.pad(_chain(NODES, model.device).repeat(count)[:rows], (0, padding)).view(count, NODES)

    def attend(i: int, q_1RQD: Tensor) -> Tensor:
        q_BRQD = F.pad(q_1RQD, (0, 0, 0, 0, 0, padding)).view(count, NODES, *q_1RQD.shape[2:])
        return ops.attend(q_BRQD, pieces[i], lengths_B, ancestors_BR, scale).flatten(0, 1)[None, :rows]

    return _body(model, layers, rope, x, attend, taps)


def _chain(rows: int, device: torch.device) -> Tensor:
    """The rows that each of a chain's first rows sees, itself among them, as bits of an int64."""
    return (torch.full((rows,), 2, device=device) << torch.arange(rows, device=device)) - 1  # bit 63 wraps to all bits


def head(model: CudaModel, hidden_BRH: Tensor) -> Outputs:
    """Logits behind states as `Outputs` has them."""
    (b, r), h = hidden_BRH.shape[:2], model.arch.hidden_size
    rounded = model.head.round(hidden_BRH[..., :h].reshape(b * r, h))
    return model.head(rounded).view(b, r, -1).float(), hidden_BRH


def _body(
    model: CudaModel,
    layers: list[KVLayer],
    rope: tuple[Tensor, Tensor],
    x: Inputs,
    attend: Callable[[int, Tensor], Tensor],
    taps: Layers,
) -> Tensor:
    (b, r), eps = x.tokens_BR.shape, model.arch.norm_eps
    x_NH = F.embedding(x.tokens_BR.reshape(-1), model.embed_VH) * model.arch.embed_scale
    residual_NH: Tensor | None = None
    tapped = list[Tensor]()
    for i, layer in enumerate(model.layers):
        codes_NH, scale_N, residual_NH = ops.add_rms_norm(
            x_NH, residual_NH, layer.input_norm, eps, layer.qkv.fmt, layer.qkv.scale
        )
        tapped += [residual_NH] if i in taps else []
        q_BRQD, k_BRGD, v_BRGD = _heads(model, layer, (codes_NH, scale_N), b, r)
        q_BRQD = ops.rope_write(q_BRQD, k_BRGD, v_BRGD, *rope, x.positions_BR, x.slots_BR, layers[i])
        x_NH = layer.o(layer.o.round(attend(i, q_BRQD).reshape(b * r, -1)))
        codes_NH, scale_N, residual_NH = ops.add_rms_norm(
            x_NH, residual_NH, layer.mlp_norm, eps, layer.gate_up.fmt, layer.gate_up.scale
        )
        gate_up_N2I = layer.gate_up((codes_NH, scale_N))
        x_NH = layer.down(ops.silu_mul(gate_up_N2I, layer.down.fmt, layer.down.scale))
    hidden_NH, _, residual_NH = ops.add_rms_norm(x_NH, residual_NH, model.norm, eps, None)
    tapped += [residual_NH] if model.arch.n_layers in taps else []
    return (torch.cat([hidden_NH, *tapped], 1) if tapped else hidden_NH).view(b, r, -1)


def _heads(model: CudaModel, layer: CudaLayer, x: Rounded, b: int, r: int) -> tuple[Tensor, Tensor, Tensor]:
    a = model.arch
    sizes = [a.n_heads, a.n_kv_heads, a.n_kv_heads]
    q, k, v = layer.qkv(x).view(b, r, -1, a.head_dim).split(sizes, 2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (
            ops.add_rms_norm(y.reshape(-1, a.head_dim), None, gain, a.norm_eps, None)[0].view(y.shape)
            for y, gain in ((q, layer.q_norm), (k, layer.k_norm))
        )
    return q.contiguous(), k.contiguous(), v.contiguous()


class Passes:
    """A model over one cache: prompts, passes by graphs, and the bare pass that larger graphs hold."""

    def __init__(self, model: CudaModel, cache: CudaCache) -> None:
        self.model, self.cache = model, cache
        self.taps: Layers = ()
        self._rope = model.rope(cache.length)
        self._memory = graph_memory(model.device)
        self._graphs: dict[tuple[int, int], Graph[Inputs, Outputs]] = {}

    def __call__(self, x: Inputs) -> Outputs:
        """Inputs of bucket sizes, on any device; logits and states, valid until the next pass of the same size."""
        b, r = x.tokens_BR.shape
        if (b, r) not in self._graphs:
            padding = Inputs.padding(b, r, self.cache.length, self.model.device)
            self._graphs[b, r] = Graph(self.run, padding, self._memory)
        return self._graphs[b, r](x)

    def run(self, x: Inputs) -> Outputs:
        """The pass itself, for sequences in the first slots."""
        return run(self.model, self.cache.first(len(x.tokens_BR)), self._rope, x, self.taps)

    def tap(self, layers: Layers) -> None:
        """Tap these layers too, from now on. Graphs are captured anew."""
        if set(layers) - set(self.taps):
            self.taps = tuple(sorted({*self.taps, *layers}))
            self._graphs.clear()
            self._memory = graph_memory(self.model.device)

    def grow(self, sequences: int) -> None:
        """A cache of more slots. Graphs hold addresses of the old one: they are let go first, and captured anew."""
        self._graphs.clear()
        self._memory = graph_memory(self.model.device)
        self.cache.grow(sequences)

    def read(self, slot: int, tokens_T: Tensor, start: int) -> Tensor:
        """A text of any length behind `start` positions of one slot, in chunks; states `[T, H + S]`."""
        assert start + len(tokens_T) <= self.cache.length, f"{start + len(tokens_T)} of {self.cache.length} positions"
        hidden = list[Tensor]()
        for part_R in tokens_T.split(CHUNK):
            given = Inputs.chain(part_R[None], torch.tensor([start])).to(self.model.device)
            hidden.append(prefill(self.model, self.cache, slot, self._rope, given, start, self.taps)[0])
            start += len(part_R)
        return torch.cat(hidden)


class Captured(Generic[Result]):
    """A function over tensors that never move, as one CUDA graph; called as it is on a CPU.

    It is run three times before it is captured, so it must be harmless then. Graphs of one `memory` overwrite each
    other's scratch: what one returns is read before the next one runs, or lies outside.
    """

    def __init__(self, function: Callable[[], Result], device: torch.device, memory: Memory | None = None) -> None:
        self._function = function
        self._graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self._graph is None:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels compile and tune themselves before capture
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=memory):
            self._out = function()

    def __call__(self) -> Result:
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._out


class Graph(Generic[Given, Result]):
    """A `Captured` function of tensors (fields of a dataclass), which are copied to where it reads them: `static`."""

    def __init__(self, function: Callable[[Given], Result], static: Given, memory: Memory | None = None) -> None:
        self._tensors: list[Tensor] = _tensors(static)
        self._captured = Captured(lambda: function(static), self._tensors[0].device, memory)

    def __call__(self, given: Given) -> Result:
        for mine, theirs in zip(self._tensors, _tensors(given), strict=True):
            mine.copy_(theirs, non_blocking=True)
        return self._captured()


def graph_memory(device: torch.device) -> Memory | None:
    """Scratch that graphs share which never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _tensors(x: Any) -> list[Tensor]:
    return [getattr(x, field.name) for field in fields(x)]
