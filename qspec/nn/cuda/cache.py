"""The static KV cache of all sequences on a device: S slots for sequences, G KV heads, L positions, D head size."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from qspec.nn.cuda.model import CudaModel
from qspec.ops.cuda import KVLayer


class CudaCache:
    """Tensors that never move, so that captured graphs may hold their addresses.

    Position `length` is one more than sequences may use: padding rows are written there.
    """

    def __init__(self, model: CudaModel, sequences: int, length: int) -> None:
        self.sequences, self.length = sequences, length
        self._model = model
        self._layers = [self._layer(i) for i in range(model.arch.n_layers)]

    def first(self, sequences: int) -> list[KVLayer]:
        """Views of every layer for the first `sequences` slots."""
        return [_mapped(layer, lambda x: x[:sequences]) for layer in self._layers]

    def one(self, slot: int, times: int = 1) -> list[KVLayer]:
        """Views of every layer for one slot, as that many sequences over the same memory."""
        return [_mapped(layer, lambda x: x[slot : slot + 1].expand(times, *x.shape[1:])) for layer in self._layers]

    def grow(self, sequences: int) -> None:
        """More slots, behind those that there are. Layer by layer: only one of them is there twice."""
        self.sequences = sequences
        for i in range(len(self._layers)):
            self._layers[i] = self._longer(i)

    def keep(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Move positions `start + path[j]` of a slot to `start + j`."""
        source = torch.tensor(path, dtype=torch.long, device=self._model.device) + start
        for x_GL in self.stored(slot):
            x_GL[:, start : start + len(path)] = x_GL.index_select(1, source)

    def stored(self, slot: int) -> Iterator[Tensor]:
        """Everything that a slot holds, `[G, L, …]`, codes as bytes."""
        for layer in self._layers:
            yield from (x[slot] for x in _memory(layer))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for slot in range(self.sequences) for x in self.stored(slot))

    def _longer(self, i: int) -> KVLayer:
        layer = self._layer(i)
        for mine, before in zip(_memory(layer), _memory(self._layers[i]), strict=True):
            mine[: len(before)] = before
        return layer

    def _layer(self, i: int) -> KVLayer:
        a, model = self._model.arch, self._model
        shape = (self.sequences, a.n_kv_heads, self.length + 1, a.head_dim)
        if model.kv is None:
            keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
            return KVLayer(keys, values)
        keys, values = (
            torch.zeros(shape, dtype=torch.uint8, device=model.device).view(model.kv.storage) for _ in range(2)
        )
        if model.kv_scales:
            return KVLayer(keys, values, *model.kv_scales[i])
        return KVLayer(keys, values, *(torch.ones(shape[:3], device=model.device) for _ in range(2)))


def _mapped(layer: KVLayer, change: Callable[[Tensor], Tensor]) -> KVLayer:
    scales = (change(x) if isinstance(x, Tensor) else x for x in (layer.k_scale, layer.v_scale))
    return KVLayer(change(layer.k_BGLD), change(layer.v_BGLD), *scales)


def _memory(layer: KVLayer) -> list[Tensor]:
    """All that a layer holds `[S, G, L, …]`, codes as bytes."""
    parts = (x for x in (layer.k_BGLD, layer.v_BGLD, layer.k_scale, layer.v_scale) if isinstance(x, Tensor))
    return [x.view(torch.uint8) if x.element_size() == 1 else x for x in parts]
