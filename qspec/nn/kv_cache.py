"""KV caches: preallocated, appended in place, truncated by forgetting.

Every format here quantizes a token by itself (static scales, or one scale per token and head), so a cache that drafted
and rolled back holds the same codes as one that never drafted. H KV heads, L positions, D head size, T new tokens.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from qspec.numerics import kv
from qspec.ops.cpu import decode_fp8_e4m3
from qspec.plan import KVScheme
from qspec.records import ArchMap


class KVCache(Protocol):
    """Keys and values of all layers of one sequence."""

    max_length: int

    def update(self, layer: int, start: int, k_HTD: Tensor, v_HTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write positions `start…start+T` of `layer`; return keys and values `[H, start+T, D]` to attend to."""

    def bytes_per_token(self) -> float:
        """Storage of one position over all layers, scales included."""


class FloatKVCache:
    """Keys and values in the compute dtype."""

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

    def bytes_per_token(self) -> float:
        return self._data.nbytes / self.max_length


class QuantizedKVCache:
    """Codes of `scheme.fmt`, with stored scales (tensor, head) or one per token and head.

    `k_scale` / `v_scale` by `model.layers.N.self_attn`, `[1]` or `[H]`; unused by `token_head`.
    """

    def __init__(
        self,
        arch: ArchMap,
        max_length: int,
        dtype: torch.dtype,
        scheme: KVScheme,
        k_scale: Mapping[str, Tensor],
        v_scale: Mapping[str, Tensor],
    ) -> None:
        self.max_length = max_length
        self._dtype, self._scheme = dtype, scheme
        shape = (arch.n_layers, 2, arch.n_kv_heads, max_length, arch.head_dim)
        self._codes = torch.zeros(shape, dtype=torch.uint8).view(scheme.fmt.storage)
        names = [f"model.layers.{i}.self_attn" for i in range(arch.n_layers)]
        self._dynamic = scheme.granularity == "token_head"
        self._token_scales = torch.ones((*shape[:-1], 1)) if self._dynamic else torch.empty(0)
        self._static = [] if self._dynamic else [_stacked(k_scale[n], v_scale[n]) for n in names]

    def update(self, layer: int, start: int, k_HTD: Tensor, v_HTD: Tensor) -> tuple[Tensor, Tensor]:
        end = start + k_HTD.shape[1]
        x_2HTD, codes_2HLD = torch.stack((k_HTD, v_HTD)), self._codes[layer]
        if self._dynamic:
            scales_2HL1 = self._token_scales[layer]
            new = kv.quantize_per_token_head(x_2HTD, self._scheme.fmt)
            codes_2HLD[:, :, start:end], scales_2HL1[:, :, start:end] = new
            scale = scales_2HL1[:, :, :end]
        else:
            scale = self._static[layer]
            codes_2HLD[:, :, start:end] = kv.quantize_static(x_2HTD, scale, self._scheme.fmt)
        keys, values = (_decode(codes_2HLD[:, :, :end]) * scale).to(self._dtype)
        return keys, values

    def codes(self, length: int) -> Tensor:
        """Stored codes of the first `length` positions, for comparison."""
        return self._codes[:, :, :, :length].view(torch.uint8)

    def bytes_per_token(self) -> float:
        return (self._codes.nbytes + self._token_scales.nbytes) / self.max_length


def _stacked(k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """Scales of keys and values, `[2, 1 or H, 1, 1]`."""
    return torch.stack((k_scale, v_scale)).reshape(2, -1, 1, 1)


def _decode(codes: Tensor) -> Tensor:
    return decode_fp8_e4m3(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()
