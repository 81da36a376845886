"""Round a model to nearest under its plan, layer by layer; scales that runtimes merge are shared before rounding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qspec.bridges.compressed import lint_scale, refuse_tied_head
from qspec.errors import RecipeError, SourceError
from qspec.numerics.affine import QTensor, quantize_weight, tensor_amax
from qspec.numerics.blocks import PerTensor
from qspec.numerics.clipping import clipped_range
from qspec.numerics.codes import symmetric_scale
from qspec.numerics.kv import static_scale
from qspec.plan import KVScheme, LayerScheme, QuantPlan, TensorScheme
from qspec.progress import Progress
from qspec.records import FUSED_GROUPS, ArchMap, LayerStats, LoadedModel, QLinear, QuantizedModel


def quantize(
    model: LoadedModel,
    stats: LayerStats | None,
    plan: QuantPlan,
    share_scales: bool = True,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Codes and scales of every layer that `plan` names; everything else is kept as it is.

    `share_scales`: q/k/v, and gate/up, get one per-tensor weight scale and one input scale. Raises `RecipeError` for
    static scales without `stats` or a head that is tied, `SourceError` for weights that are not finite.
    """
    resolved = plan.resolve(model.arch.linears())
    schemes = {layer: scheme for layer, scheme in resolved.items() if scheme is not None}
    _refuse(model.arch, schemes, plan.kv, stats)
    notes: list[str] = []
    linears: dict[str, QLinear] = {}
    units = list(_units(schemes, share_scales))
    for unit in (progress or Progress(quiet=True)).track(units, "quantize", len(units), "layers"):
        linears |= _quantize_unit(model, unit, schemes[unit[0]], stats, notes)
    k_scale, v_scale = _kv_scales(model.arch, plan.kv, stats, notes)
    owned = {f"{layer}.{part}" for layer in schemes for part in ("weight", "bias")}
    return QuantizedModel(
        model.arch,
        {name: model.tensors[name] for name in model.tensors if name not in owned},
        {layer: linears[layer] for layer in schemes},
        plan,
        model.config,
        model.tokenizer,
        model.source,
        k_scale,
        v_scale,
        notes=tuple(notes),
    )


def _refuse(arch: ArchMap, schemes: Mapping[str, LayerScheme], kv: KVScheme | None, stats: LayerStats | None) -> None:
    refuse_tied_head(arch, schemes)
    static = next((layer for layer, s in schemes.items() if s.activation and not s.activation.dynamic), None)
    calibrated = kv is not None and kv.granularity != "token_head" and kv.scales == "calibrated"
    needs = static or ("the KV cache" if calibrated else None)
    if needs and (stats is None or stats.tokens == 0):
        raise RecipeError(needs, "has static scales, which need calibration data", "calibrate, or use a dynamic scheme")


def _units(schemes: Mapping[str, LayerScheme], share_scales: bool) -> Iterator[tuple[str, ...]]:
    """Layers that are quantized together: merged ones with per-tensor scales, all others alone."""
    done: set[str] = set()
    for layer, scheme in schemes.items():
        if layer not in done:
            mates = [mate for mate in _merged_with(layer) if schemes.get(mate) == scheme]
            unit = tuple(mates) if share_scales and _per_tensor(scheme) and mates else (layer,)
            done.update(unit)
            yield unit


def _merged_with(layer: str) -> list[str]:
    """All members of the layer's fused group, in order; empty when it is in none."""
    for group in FUSED_GROUPS:
        for part in group:
            if layer.endswith(f".{part}"):
                return [layer.removesuffix(part) + member for member in group]
    return []


def _per_tensor(scheme: LayerScheme) -> bool:
    static_input = scheme.activation is not None and not scheme.activation.dynamic
    return isinstance(scheme.weight.granularity, PerTensor) or static_input


def _quantize_unit(
    model: LoadedModel, unit: Sequence[str], scheme: LayerScheme, stats: LayerStats | None, notes: list[str]
) -> dict[str, QLinear]:
    weights = [finite_weight(model, layer) for layer in unit]
    quantized = _quantize_weights(weights, scheme.weight)
    input_scale = _input_scale(unit, scheme.activation, stats, notes)
    for layer, weight in zip(unit, quantized, strict=True):
        lint_scale(f"{layer}.weight_scale", weight.scale)
        if input_scale is not None:
            lint_scale(f"{layer}.input_scale", input_scale)
    return {
        layer: QLinear(weight, scheme.activation, input_scale, model.tensors.get(f"{layer}.bias"))
        for layer, weight in zip(unit, quantized, strict=True)
    }


def finite_weight(model: LoadedModel, layer: str) -> Tensor:
    """Weight `[N, K]` of a linear layer, float32; raises `SourceError` if it holds NaN or infinity."""
    weight = model.lm_head() if layer == "lm_head" else model.tensors[f"{layer}.weight"]
    if not bool(torch.isfinite(weight).all()):
        raise SourceError(f"{layer}.weight", "holds NaN or infinity", "use an intact checkpoint of the model")
    return weight.float()


def _quantize_weights(weights: Sequence[Tensor], scheme: TensorScheme) -> list[QTensor]:
    """Codes of each matrix. With per-tensor scales several are quantized as one, so that they share the scale."""
    if len(weights) == 1 or not isinstance(scheme.granularity, PerTensor):
        return [quantize_weight(w, scheme.fmt, scheme.granularity, scheme.symmetric, scheme.clip) for w in weights]
    whole = quantize_weight(torch.cat(list(weights)), scheme.fmt, scheme.granularity, scheme.symmetric, scheme.clip)
    rows = torch.split_with_sizes(whole.codes, [w.shape[0] for w in weights])
    return [replace(whole, codes=codes.clone(), scale=whole.scale.clone()) for codes in rows]


def _input_scale(
    unit: Sequence[str], scheme: TensorScheme | None, stats: LayerStats | None, notes: list[str]
) -> Tensor | None:
    """`[1]`, or None for dynamic and for no activation quantization."""
    if scheme is None or scheme.dynamic or stats is None:
        return None
    ranges = [_input_amax(layer, scheme, stats) for layer in unit]
    amax = torch.stack(ranges).amax(0)
    if not bool(amax > 0):
        amax, origin = _fallback_amax(unit[0], stats.amax_K, scheme.fmt.qmax)
        notes.append(f"{', '.join(unit)}: no activation seen in calibration; input scale from {origin}.")
    return symmetric_scale(amax, scheme.fmt)


def _input_amax(layer: str, scheme: TensorScheme, stats: LayerStats) -> Tensor:
    """Range of a layer's input, `[1]`; 0 when calibration never saw it."""
    if layer not in stats.amax_K:
        return torch.zeros(1)
    amax = tensor_amax(stats.amax_K[layer])
    sample = stats.inputs_TK.get(layer)
    if scheme.clip.method == "absmax" or sample is None or not sample.numel():
        return amax
    _, hi = clipped_range(sample.reshape(1, -1).float(), scheme.fmt, scheme.clip, True)
    return torch.minimum(amax, hi.reshape(1))


def _fallback_amax(layer: str, seen: Mapping[str, Tensor], otherwise: float) -> tuple[Tensor, str]:
    """Largest magnitude that layers of the same kind saw, and in words where it comes from."""
    kind = layer.rpartition(".")[2]
    known = [tensor_amax(amax) for name, amax in seen.items() if name.rpartition(".")[2] == kind]
    largest = torch.stack(known).amax(0) if known else torch.zeros(1)
    if bool(largest > 0):
        return largest, f"the largest of all {kind}"
    return torch.full((1,), otherwise), "the format's own range (scale 1)"


def _kv_scales(
    arch: ArchMap, kv: KVScheme | None, stats: LayerStats | None, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored scales of keys and values by layer: `[1]` or `[n_kv_heads]`; empty when they are dynamic."""
    if kv is None or kv.granularity == "token_head":
        return {}, {}
    layers = [f"model.layers.{i}.self_attn" for i in range(arch.n_layers)]
    if kv.scales == "cast":
        ones = torch.ones(arch.n_kv_heads if kv.granularity == "head" else 1)
        return {layer: ones.clone() for layer in layers}, {layer: ones.clone() for layer in layers}
    assert stats is not None
    heads = arch.n_kv_heads
    keys = _kv_scale(layers, heads, kv, stats.k_amax_H, notes, "key")
    return keys, _kv_scale(layers, heads, kv, stats.v_amax_H, notes, "value")


def _kv_scale(
    layers: Sequence[str], heads: int, kv: KVScheme, amax_H: Mapping[str, Tensor], notes: list[str], what: str
) -> dict[str, Tensor]:
    """A head that calibration never excited gets the range of the largest head of its layer, or of all layers."""
    scales = {}
    for layer in layers:
        seen = amax_H.get(layer, torch.zeros(heads)).float()
        if not bool((seen > 0).all()):
            largest = tensor_amax(seen)
            amax, origin = (largest, "its largest head") if largest > 0 else _fallback_amax(layer, amax_H, kv.fmt.qmax)
            notes.append(f"{layer}: {what} heads without range in calibration; their scale comes from {origin}.")
            seen = torch.where(seen > 0, seen, amax)
        scale = static_scale(seen if kv.granularity == "head" else seen.amax().reshape(1), kv.fmt)
        lint_scale(f"{layer}.{what[0]}_scale", scale)
        scales[layer] = scale
    return scales
