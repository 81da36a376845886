"""Stored scales of keys, values and queries, from calibrated ranges; and the key biases that spoil them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qspec.bridges.compressed import lint_scale
from qspec.numerics.quantization.affine import tensor_amax
from qspec.numerics.quantization.codes import symmetric_scale
from qspec.numerics.quantization.formats import FP8_E4M3, NumFormat
from qspec.plan import KVScheme
from qspec.records import ArchMap, LayerStats, LoadedModel, layer_number

BIAS_SHARE = 0.5
"""A key channel is an outlier of its bias when the bias is this much of the largest key, or more."""


@dataclass(frozen=True)
class KVScales:
    """By `model.layers.N.self_attn`: `[1]`, or one per head. Layers in float have none, nor has what scales itself."""

    k: dict[str, Tensor] = field(default_factory=dict)
    v: dict[str, Tensor] = field(default_factory=dict)
    q: dict[str, Tensor] = field(default_factory=dict)


def kv_scales(arch: ArchMap, kv: KVScheme | None, stats: LayerStats | None, notes: list[str]) -> KVScales:
    """Scales of all layers; `notes` gets what calibration did not see."""
    scales = KVScales()
    if kv is None:
        return scales
    assert not kv.open, "`quantization.kv_choice` decides what is open first"
    sides = _sides(kv, stats)
    for layer in arch.layers:
        number, name = layer_number(layer), f"{layer}.self_attn"
        if kv.skips(number):
            continue
        cast = kv.scales == "cast" or number in kv.cast_layers
        for side in sides:
            heads = arch.n_heads if side.kind == "query" else arch.n_kv_heads
            shape = heads if side.granularity == "head" else 1
            scale = torch.ones(shape) if cast else _calibrated(name, heads, side, notes)
            lint_scale(f"{name}.{side.kind[0]}_scale", scale)
            getattr(scales, side.kind[0])[name] = scale
    return scales


def key_biases(model: LoadedModel, kv: KVScheme | None, stats: LayerStats | None) -> tuple[str, ...]:
    """A note on layers whose largest keys are the bias of some `k_proj` channels (Qwen2), under stored scales."""
    biases = {}
    if kv is None or stats is None or not kv.parts[0].stored:
        return ()
    for name, k_amax_H in stats.k_amax_H.items():
        bias = model.tensors.get(f"{name}.k_proj.bias")
        if bias is not None:
            size = bias.float().abs()
            if channels := (size >= BIAS_SHARE * k_amax_H.amax()).nonzero().flatten().tolist():
                biases[name] = channels
    if not biases:
        return ()
    why = "rounding keys of that size can change scores by more than the others say: see kv.granularity: auto"
    return (f"Key outliers from k_proj.bias: {listed_channels(biases)}; {why}.",)


def listed_channels(by_layer: Mapping[str, Sequence[int]], most: int = 8) -> str:
    """`layer 0 (channels 3, 67)` for each, at most `most` of both."""
    texts = []
    for name, channels in list(by_layer.items())[:most]:
        rest = f" and {len(channels) - most} more" if len(channels) > most else ""
        texts.append(f"layer {layer_number(name)} (channels {', '.join(map(str, channels[:most]))}{rest})")
    return ", ".join(texts) + (f" and {len(by_layer) - most} more layers" if len(by_layer) > most else "")


def largest_seen(layer: str, seen: Mapping[str, Tensor], otherwise: float) -> tuple[Tensor, str]:
    """Largest magnitude that layers of the same kind saw, and in words where it comes from."""
    kind = layer.rpartition(".")[2]
    known = [tensor_amax(amax) for name, amax in seen.items() if name.rpartition(".")[2] == kind]
    largest = torch.stack(known).amax(0) if known else torch.zeros(1)
    if bool(largest > 0):
        return largest, f"the largest of all {kind}"
    return torch.full((1,), otherwise), "the format's own range (scale 1)"


@dataclass(frozen=True)
class _Side:
    kind: str
    fmt: NumFormat
    granularity: str
    amax_H: Mapping[str, Tensor]


def _sides(kv: KVScheme, stats: LayerStats | None) -> list[_Side]:
    """Sides with stored scales: keys, values, queries."""
    seen = (stats.k_amax_H, stats.v_amax_H) if stats is not None else ({}, {})
    parts = zip(("key", "value"), kv.parts, seen, strict=True)
    sides = [_Side(kind, part.fmt, part.granularity, amax_H) for kind, part, amax_H in parts if part.stored]
    if kv.query is not None:
        sides.append(_Side("query", FP8_E4M3, kv.query, stats.q_amax_H if stats is not None else {}))
    return sides


def _calibrated(layer: str, heads: int, side: _Side, notes: list[str]) -> Tensor:
    """A head that calibration never excited gets the range of the largest head of its layer, or of all layers."""
    seen = side.amax_H.get(layer, torch.zeros(heads)).float()
    if not bool((seen > 0).all()):
        largest = tensor_amax(seen)
        known = (largest, "its largest head") if largest > 0 else largest_seen(layer, side.amax_H, side.fmt.qmax)
        notes.append(f"{layer}: {side.kind} heads without range in calibration; their scale comes from {known[1]}.")
        seen = torch.where(seen > 0, seen, known[0])
    return symmetric_scale(seen if side.granularity == "head" else seen.amax().reshape(1), side.fmt)
