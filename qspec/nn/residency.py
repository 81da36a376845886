"""Which layers of a model stay in memory under a limit, and which are read again for every pass. Bytes throughout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math

import torch

from qspec.errors import RecipeError
from qspec.numerics.blocks import PerGroup, scale_shape
from qspec.numerics.formats import INT4, INT8
from qspec.ops.select import Kernels
from qspec.plan import LayerScheme
from qspec.records import ArchMap, fused_with

BUFFERS = 2
"""One that a layer is built from, one that the next is read into."""
READY = 2
"""Layers built from buffers that are in memory at once: one is made before the one before it is forgotten."""
PACKING, DECODING = 2, 12
"""Bytes a weight, beside what it becomes: copies that integer kernels are packed from; floats on the way to others."""


@dataclass(frozen=True)
class LayerBytes:
    """stored: as it is read; held: ready to run; work: beside both while it is built."""

    stored: int
    held: int
    work: int


@dataclass(frozen=True)
class Residency:
    """resident, streamed: names of layers; fixed: all that belongs to no layer; total: the most that is in memory.

    read: what a pass reads.
    """

    resident: tuple[str, ...]
    streamed: tuple[str, ...]
    fixed: int
    total: int
    read: int

    def __str__(self) -> str:
        layers = len(self.resident) + len(self.streamed)
        return f"{len(self.resident)} of {layers} layers in memory, {megabytes(self.read)} read for every pass"


def megabytes(count: int) -> str:
    """`12.3 MB`, of 10^6 bytes, as limits are written; rounded up, so that it is always enough."""
    return f"{-(-count // 100_000) / 10:.1f} MB"


def plan_residency(limit: int, fixed: int, layers: Mapping[str, LayerBytes]) -> Residency:
    """Hold as many layers as the limit allows, spread evenly: while they run, the disk is not idle.

    Raises `RecipeError` where it does not even allow for none.
    """
    ways = [_with_resident(count, fixed, layers) for count in range(len(layers), -1, -1)]
    found = next((way for way in ways if way.total <= limit), None)
    if found is not None:
        return found
    least, buffers = min(way.total for way in ways), BUFFERS * max(size.stored for size in layers.values())
    rule = (
        f"the model takes {megabytes(least)} at the least: {megabytes(fixed)} for embedding, head and KV cache, "
        f"{megabytes(buffers)} for {BUFFERS} buffers of the largest layer, the rest to build and run layers"
    )
    fix = f"give at least {megabytes(least)}, or lower speculation.max_length, which sizes the KV cache"
    raise RecipeError(f"memory limit {megabytes(limit)}", rule, fix)


def layer_bytes(
    arch: ArchMap,
    schemes: Mapping[str, LayerScheme | None],
    stored: Callable[[str], int],
    dtype: torch.dtype,
    kernels: Kernels,
) -> dict[str, LayerBytes]:
    """Of every decoder layer, from shapes and schemes; `stored` says what reading one takes."""
    return {layer: _layer_bytes(arch, schemes, layer, stored(layer), dtype, kernels) for layer in arch.layers}


def held_bytes(scheme: LayerScheme | None, shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels) -> int:
    """A linear layer ready to run, as `ops.select.prepare` makes it."""
    count = shape[0] * shape[1]
    if scheme is None:
        return count * dtype.itemsize
    scales = 4 * math.prod(scale_shape(shape, scheme.weight.granularity))
    outliers = math.ceil(8 * count * scheme.outliers / 100)
    return math.ceil(count * _width(scheme, shape, dtype, kernels)) + scales + outliers


def _width(scheme: LayerScheme, shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels) -> float:
    """Bytes of a code as kernels keep it; what no kernel serves is decoded to `dtype`."""
    if kernels == "reference" or _on_int8(scheme):
        return 1
    weight, (n, k) = scheme.weight, shape
    packs = weight.fmt == INT4 and weight.symmetric and scheme.activation is None
    if packs and isinstance(weight.granularity, PerGroup) and n % 16 == 0 and k % weight.granularity.size == 0:
        return 0.5
    return dtype.itemsize


def _on_int8(scheme: LayerScheme) -> bool:
    """Whether integer kernels serve it (`ops.reference.is_int8_dynamic`)."""
    weight, into = scheme.weight, scheme.activation
    whole = weight.fmt == INT8 and not isinstance(weight.granularity, PerGroup)
    return whole and into is not None and into.fmt == INT8 and into.dynamic


def _layer_bytes(
    arch: ArchMap,
    schemes: Mapping[str, LayerScheme | None],
    layer: str,
    stored: int,
    dtype: torch.dtype,
    kernels: Kernels,
) -> LayerBytes:
    names = arch.layer_linears(layer)
    held = sum(held_bytes(schemes[name], arch.linear_shape(name), dtype, kernels) for name in names)
    groups = {fused_with(name) or (name,) for name in names}
    return LayerBytes(stored, held, max(_work(arch, schemes, group, kernels) for group in groups))


def _work(arch: ArchMap, schemes: Mapping[str, LayerScheme | None], group: tuple[str, ...], kernels: Kernels) -> int:
    """Beside the codes, while layers are merged and packed; the eager twins decode their weights in every call."""
    count = sum(math.prod(arch.linear_shape(name)) for name in group)
    exact = kernels != "reference" and all((s := schemes[name]) is not None and _on_int8(s) for name in group)
    return count * (PACKING if exact else DECODING)


def _with_resident(count: int, fixed: int, layers: Mapping[str, LayerBytes]) -> Residency:
    """What it takes to hold `count` layers."""
    names, total = list(layers), len(layers)
    resident = [name for i, name in enumerate(names) if (i + 1) * count // total > i * count // total]
    streamed = [name for name in names if name not in resident]
    moving = [layers[name] for name in streamed]
    built = max((layers[name].stored + layers[name].work for name in resident), default=0)
    passing = BUFFERS * max((size.stored for size in moving), default=0) + max(map(_passing, moving), default=0)
    held = fixed + sum(layers[name].held for name in resident)
    return Residency(
        tuple(resident), tuple(streamed), fixed, held + max(built, passing), sum(size.stored for size in moving)
    )


def _passing(size: LayerBytes) -> int:
    return READY * size.held + size.work
