"""Round a model to nearest under its plan, layer by layer; scales that runtimes merge are shared before rounding."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qspec.bridges.compressed import lint_scale, refuse_tied_head
from qspec.errors import RecipeError, SourceError
from qspec.numerics.quantization.affine import QTensor, quantize_weight, tensor_amax
from qspec.numerics.quantization.blocks import PerTensor
from qspec.numerics.quantization.codes import symmetric_scale
from qspec.numerics.quantization.outliers import SparseMatrix, split
from qspec.plan import KVScheme, LayerScheme, QuantPlan, TensorScheme
from qspec.progress import Progress
from qspec.quantization.kv_scales import key_biases, kv_scales, largest_seen
from qspec.records import ArchMap, LayerStats, LoadedModel, QLinear, QuantizedModel, fused_with, layer_number


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
        linears |= quantize_unit(model, unit, schemes[unit[0]], stats, notes)
    scales = kv_scales(model.arch, plan.kv, stats, notes)
    notes.extend(key_biases(model, plan.kv, stats))
    owned = {f"{layer}.{part}" for layer in schemes for part in ("weight", "bias")}
    return QuantizedModel(
        model.arch,
        {name: model.tensors[name] for name in model.tensors if name not in owned},
        {layer: linears[layer] for layer in schemes},
        plan,
        model.config,
        model.tokenizer,
        model.source,
        scales.k,
        scales.v,
        notes=tuple(notes),
        q_scale=scales.q,
        files=model.files,
    )


def _refuse(arch: ArchMap, schemes: Mapping[str, LayerScheme], kv: KVScheme | None, stats: LayerStats | None) -> None:
    refuse_tied_head(arch, schemes)
    static = next((layer for layer, s in schemes.items() if s.activation and not s.activation.dynamic), None)
    calibrated = kv is not None and kv.calibrated
    needs = static or ("the KV cache" if calibrated else None)
    if needs and (stats is None or stats.tokens == 0):
        raise RecipeError(needs, "has static scales, which need calibration data", "calibrate, or use a dynamic scheme")


def _units(schemes: Mapping[str, LayerScheme], share_scales: bool) -> Iterator[tuple[str, ...]]:
    """Layers that are quantized together: merged ones with per-tensor scales, all others alone."""
    done: set[str] = set()
    for layer, scheme in schemes.items():
        if layer not in done:
            mates = [mate for mate in fused_with(layer) if schemes.get(mate) == scheme]
            unit = tuple(mates) if share_scales and _per_tensor(scheme) and mates else (layer,)
            done.update(unit)
            yield unit


def _per_tensor(scheme: LayerScheme) -> bool:
    static_input = scheme.activation is not None and not scheme.activation.dynamic
    return isinstance(scheme.weight.granularity, PerTensor) or static_input


def quantize_unit(
    model: LoadedModel, unit: Sequence[str], scheme: LayerScheme, stats: LayerStats | None, notes: list[str]
) -> dict[str, QLinear]:
    """Layers that read one input and share what is per tensor; `notes` gets a sentence where a scale is made up."""
    moment_K = importance(unit[0], stats)
    weights, outliers = zip(*(_split(model, layer, scheme, moment_K) for layer in unit), strict=True)
    quantized = quantize_weights(weights, scheme.weight, moment_K)
    input_scale = static_input_scale(unit, scheme.activation, stats, notes)
    for layer, weight in zip(unit, quantized, strict=True):
        lint_scale(f"{layer}.weight_scale", weight.scale)
        if input_scale is not None:
            lint_scale(f"{layer}.input_scale", input_scale)
    return {
        layer: QLinear(weight, scheme.activation, input_scale, model.tensors.get(f"{layer}.bias"), apart)
        for layer, weight, apart in zip(unit, quantized, outliers, strict=True)
    }


def _split(
    model: LoadedModel, layer: str, scheme: LayerScheme, moment_K: Tensor | None
) -> tuple[Tensor, SparseMatrix | None]:
    """The weight to round, and what of it is kept apart."""
    w_NK, weight = finite_weight(model, layer), scheme.weight
    if not scheme.outliers:
        return w_NK, None
    dense_NK, apart = split(w_NK, scheme.outliers, weight.fmt, weight.granularity, weight.symmetric, moment_K)
    if not bool(torch.isfinite(apart.values).all()):
        rule = f"holds {float(w_NK.abs().max()):.3g}, and outliers are stored in float16, up to 65504"
        raise RecipeError(f"{layer}.weight", rule, "leave outliers out")
    return dense_NK, apart


def finite_weight(model: LoadedModel, layer: str) -> Tensor:
    """Weight `[N, K]` of a linear layer, float32; raises `SourceError` if it holds NaN or infinity."""
    weight = model.lm_head() if layer == "lm_head" else model.tensors[f"{layer}.weight"]
    require_finite(f"{layer}.weight", weight)
    return weight.float()


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise `SourceError` if a tensor of a model holds NaN or infinity."""
    if not bool(torch.isfinite(tensor).all()):
        raise SourceError(name, "holds NaN or infinity", "use an intact checkpoint of the model")


def importance(layer: str, stats: LayerStats | None) -> Tensor | None:
    """Mean square of every input channel in the kept sample, `[K]`: what an error of that column's weights costs.

    None where calibration never saw the layer, or only zeros.
    """
    sample = None if stats is None else stats.inputs_TK.get(layer)
    if sample is None or not bool(sample.any()):
        return None
    return sample.float().square().mean(0)


def quantize_weights(
    weights: Sequence[Tensor], scheme: TensorScheme, importance_K: Tensor | None = None
) -> list[QTensor]:
    """Codes of each matrix. With per-tensor scales several are quantized as one, so that they share the scale.

    `importance_K`, of the input that all of them read, weighs the errors of the `mse` clip.
    """
    form = (scheme.fmt, scheme.granularity, scheme.symmetric, scheme.clip, importance_K)
    if len(weights) == 1 or not isinstance(scheme.granularity, PerTensor):
        return [quantize_weight(w, *form) for w in weights]
    whole = quantize_weight(torch.cat(list(weights)), *form)
    rows = torch.split_with_sizes(whole.codes, [w.shape[0] for w in weights])
    return [replace(whole, codes=codes.clone(), scale=whole.scale.clone()) for codes in rows]


def static_input_scale(
    unit: Sequence[str], scheme: TensorScheme | None, stats: LayerStats | None, notes: list[str]
) -> Tensor | None:
    """`[1]`, shared by the layers of `unit`; None for dynamic and for no activation quantization."""
    if scheme is None or scheme.dynamic or stats is None:
        return None
    amax = _input_amax(unit, stats)
    if not bool(amax > 0):
        block, expert, _ = unit[0].partition(".experts.")
        seen = {name: amax_K for name, amax_K in stats.amax_K.items() if name.startswith(block)}
        amax, origin = largest_seen(unit[0], seen if expert else stats.amax_K, scheme.fmt.qmax)
        if not expert:  # `unseen_experts` counts those
            notes.append(f"{', '.join(unit)}: no activation seen in calibration; input scale from {origin}.")
    return symmetric_scale(amax, scheme.fmt)


def unseen_experts(arch: ArchMap, quantized: Container[str], stats: LayerStats | None) -> dict[str, int]:
    """How many quantized experts calibration sent no token to, by decoder layer; layers without one are left out."""
    if stats is None or not stats.tokens:
        return {}
    first = {layer: [f"{mlp}.gate_proj" for mlp in arch.mlps(layer)] for layer in arch.layers if arch.router(layer)}
    missed = {
        layer: sum(name in quantized and name not in stats.amax_K for name in names) for layer, names in first.items()
    }
    return {layer: count for layer, count in missed.items() if count}


def unseen_notes(arch: ArchMap, unseen: Mapping[str, int]) -> list[str]:
    """At most one sentence, on all layers of the whole model."""
    if not unseen:
        return []
    worst = max(unseen, key=lambda layer: unseen[layer])
    experts = arch.n_experts * len(arch.routers())
    return [
        f"{sum(unseen.values())} of {experts} experts saw no calibration token (most in layer {layer_number(worst)}: "
        f"{unseen[worst]} of {arch.n_experts}); their static input scales are the largest of their layer's other "
        "experts, their weights are rounded without statistics."
    ]


def _input_amax(unit: Sequence[str], stats: LayerStats) -> Tensor:
    """Range of the input that all of `unit` read, `[1]`; 0 when calibration never saw it."""
    known = [tensor_amax(stats.amax_K[layer]) for layer in unit if layer in stats.amax_K]
    return torch.stack(known).amax(0) if known else torch.zeros(1)
