"""KV caches: preallocated, appended in place, truncated by forgetting. H KV heads, L positions, D head size, T tokens.

A token's codes depend on what it is and on where it stands, never on how it arrived: a cache that drafted and rolled
back holds the same codes as one that never drafted. Per token that is plain; groups of tokens and residual windows
keep the newest in float (`nn.eager.kv_window`), and the decoder takes rows in the segments that `segments` names.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qspec.nn.eager.kv_codes import ChannelCodes, Codes, FloatCodes, StaticCodes, TokenCodes
from qspec.nn.eager.kv_window import Windowed
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.numerics.quantization.kv_blocks import dequantize, quantize_static
from qspec.plan import KVPart, KVScheme
from qspec.records import ArchMap, layer_number

Scales = Mapping[str, Tensor]


class KVCache(Protocol):
    """Keys and values of all layers of one sequence."""

    max_length: int

    @property
    def takes_trees(self) -> bool:
        """Whether positions may be written in any order: codes are by token, none by group."""

    def update(self, layer: int, start: int, k_HTD: Tensor, v_HTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write positions `start…start+T` of `layer`; return keys and values `[H, start+T, D]` to attend to."""

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Move positions `start + path[j]` to `start + j`; of what stands from `start` on, nothing else stays."""

    def segments(self, start: int, end: int) -> list[int]:
        """How many of the rows `start…end` go through the model together, to read what each would read alone."""

    def round_query(self, layer: int, q_HTD: Tensor) -> Tensor:
        """Queries as attention reads them."""

    def bytes_per_token(self) -> float:
        """Storage of one position over all layers, scales included."""

    def window_bytes(self) -> int:
        """Storage that does not grow with the length: the newest tokens in float."""


class FloatKVCache:
    """Keys and values in the compute dtype."""

    takes_trees = True

    def __init__(self, arch: ArchMap, max_length: int, dtype: torch.dtype) -> None:
        self.max_length = max_length
        shape = (arch.n_layers, 2, arch.n_kv_heads, max_length, arch.head_dim)
        self._data = torch.empty(shape, dtype=dtype)

    def update(self, layer: int, start: int, k_HTD: Tensor, v_HTD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._data[layer]
        end = start + k_HTD.shape[1]
        keys[:, start:end] = k_HTD
        values[:, start:end] = v_HTD
        return keys[:, :end], values[:, :end]

    def truncate(self, length: int) -> None:
        """Nothing to do: what lies beyond the length is overwritten before it is read."""

    def keep(self, start: int, path: Sequence[int]) -> None:
        _compact([self._data], start, path)

    def segments(self, start: int, end: int) -> list[int]:
        return [end - start]

    def round_query(self, layer: int, q_HTD: Tensor) -> Tensor:
        return q_HTD

    def bytes_per_token(self) -> float:
        return self._data.nbytes / self.max_length

    def window_bytes(self) -> int:
        return 0


class QuantizedKVCache:
    """Codes as `scheme` says. Keys and values that are stored alike are one tensor, `[2, H, L, D]`.

    Scales by `model.layers.N.self_attn`, `[1]` or `[H]` (queries: of all heads), for stored ones only.
    """

    def __init__(
        self,
        arch: ArchMap,
        max_length: int,
        dtype: torch.dtype,
        scheme: KVScheme,
        k_scale: Scales,
        v_scale: Scales,
        q_scale: Scales | None = None,
    ) -> None:
        self.max_length = max_length
        self._dtype, self._scheme = dtype, scheme
        layers = [f"{layer}.self_attn" for layer in arch.layers]
        self._layers = [self._layer(arch, name, k_scale, v_scale) for name in layers]
        self._windows = [store for layer in self._layers for store in layer if isinstance(store, Windowed)]
        rounded = scheme.query is not None and q_scale is not None
        self._q_scale = [q_scale.get(name) for name in layers] if rounded and q_scale else []

    @property
    def takes_trees(self) -> bool:
        return not self._scheme.step

    def update(self, layer: int, start: int, k_HTD: Tensor, v_HTD: Tensor) -> tuple[Tensor, Tensor]:
        stores = self._layers[layer]
        if len(stores) == 1:
            keys, values = self._append(stores[0], start, torch.stack((k_HTD, v_HTD)))
            return keys, values
        return self._append(stores[0], start, k_HTD), self._append(stores[1], start, v_HTD)

    def truncate(self, length: int) -> None:
        for window in self._windows:
            window.truncate(length)

    def keep(self, start: int, path: Sequence[int]) -> None:
        assert self.takes_trees, "codes of whole groups do not move"
        end = start + max(path, default=-1) + 1
        _compact((x for layer in self._layers for store in layer for x in _codes(store).stored(end)), start, path)

    def segments(self, start: int, end: int) -> list[int]:
        if not self._scheme.step:
            return [end - start]
        sizes = []
        while start < end:
            edge = self._scheme.boundary(start) + self._scheme.step + self._scheme.residual
            sizes.append(min(edge, end) - start)
            start += sizes[-1]
        return sizes

    def round_query(self, layer: int, q_HTD: Tensor) -> Tensor:
        scale = self._q_scale[layer] if self._q_scale else None
        if scale is None:
            return q_HTD
        return dequantize(quantize_static(q_HTD, scale, FP8_E4M3), scale).to(q_HTD.dtype)

    def codes(self, start: int) -> list[Tensor]:
        """Codes, scales and outliers that a token at `start` reads, for comparison."""
        end = self._scheme.boundary(start)
        return [tensor for layer in self._layers for store in layer for tensor in _codes(store).stored(end)]

    def bytes_per_token(self) -> float:
        return sum(_codes(store).nbytes for layer in self._layers for store in layer) / self._allocated

    def window_bytes(self) -> int:
        return sum(window.nbytes for window in self._windows)

    @property
    def _allocated(self) -> int:
        """Positions that there is room for: whole groups."""
        step = self._scheme.step or 1
        return -(-self.max_length // step) * step

    def _append(self, store: Codes | Windowed, start: int, x: Tensor) -> Tensor:
        if isinstance(store, Windowed):
            return store.append(start, x)
        store.write(start, x)
        return store.read(start + x.shape[-2]).to(self._dtype)

    def _layer(self, arch: ArchMap, name: str, k_scale: Scales, v_scale: Scales) -> tuple[Codes | Windowed, ...]:
        """Storage of both keys and values, or of keys and of values."""
        heads, dim, (key, value) = arch.n_kv_heads, arch.head_dim, self._scheme.parts
        if self._scheme.skips(layer_number(name)):
            return (FloatCodes((2, heads), self._allocated, dim, self._dtype),)
        if key == value:
            scale = torch.stack((k_scale[name], v_scale[name])).reshape(2, -1, 1, 1) if key.stored else None
            return (self._store(key, (2, heads), dim, scale),)
        stores = []
        for part, scales in ((key, k_scale), (value, v_scale)):
            scale = scales[name].reshape(-1, 1, 1) if part.stored else None
            stores.append(self._store(part, (heads,), dim, scale))
        return tuple(stores)

    def _store(self, part: KVPart, heads: tuple[int, ...], dim: int, scale: Tensor | None) -> Codes | Windowed:
        codes: Codes
        if scale is not None:
            codes = StaticCodes(heads, self._allocated, dim, part.fmt, scale)
        elif part.granularity == "channel":
            codes = ChannelCodes(heads, self._allocated, dim, part)
        else:
            codes = TokenCodes(heads, self._allocated, dim, part)
        if not self._scheme.step:
            return codes
        return Windowed(codes, self._scheme, heads, self.max_length, dim, self._dtype)


def _codes(store: Codes | Windowed) -> Codes:
    return store.codes if isinstance(store, Windowed) else store


def _compact(tensors: Iterable[Tensor], start: int, path: Sequence[int]) -> None:
    """Along the second last dimension, in place."""
    source = torch.tensor(path, dtype=torch.long) + start
    for x in tensors:
        x[..., start : start + len(path), :] = x.index_select(-2, source)
