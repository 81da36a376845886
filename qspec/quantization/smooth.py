"""Rewrites that leave the function as it is, up to rounding, and make it easier to quantize: smoothing, norm folds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.smoothing import (
    divide_gain,
    divide_rows,
    fold_norm,
    scale_columns,
    search_strength,
    smoothing_scale,
    weights_amax,
)
from qspec.ops.reference import fake_quantize
from qspec.plan import LayerScheme, QuantPlan
from qspec.records import FUSED_GROUPS, LAYER_LINEARS, ArchMap, LayerStats, LoadedModel
from qspec.schema.quantization import QuantSpec, SmoothingSpec
from qspec.schema.recipe import FusionSpec

QKV, O_PROJ = FUSED_GROUPS[0], LAYER_LINEARS[3]


STRENGTHS = 5
"""Strengths that `auto` tries, evenly over [0, 1)."""
SEARCHED = 16
"""Readers of one input on which a smoothing strength is searched: of a mixture's layers, some speak for all."""


@dataclass(frozen=True)
class _Pair:
    """`source` produces what `readers` consume: a norm's weight, or a linear layer's output channels.

    `repeats`: how many heads read each source channel (grouped-query attention); 1 elsewhere.
    """

    source: str
    readers: tuple[str, ...]
    is_norm: bool
    repeats: int = 1


@dataclass(frozen=True)
class Rewrites:
    """Changes to a model or a piece of one: the strength of each smoothing, by source, and norm gains folded."""

    strengths: Mapping[str, float] = field(default_factory=dict)
    folded: int = 0


def transform(
    model: LoadedModel, stats: LayerStats | None, spec: QuantSpec, fusion: FusionSpec, plan: QuantPlan
) -> tuple[LoadedModel, LayerStats | None, Rewrites]:
    """Smoothed and folded model, the statistics that it would show, and what was done.

    Smoothing divides what a norm, `v_proj` or `up_proj` produces and multiplies the columns that read it; folding
    moves norm gains into the next layer. A smoothed norm is not folded: that would undo it.
    """
    if spec.smoothing is None and not fusion.fold_norms:
        return model, stats, Rewrites()
    if spec.smoothing is not None and (stats is None or stats.tokens == 0):
        raise RecipeError("smoothing", "needs calibration data", "calibrate, or leave smoothing out")
    work = _Workspace(model, stats)
    smoothed = _smooth(work, spec.smoothing, plan) if spec.smoothing else {}
    folded = _fold(work, [p for p in _norm_pairs(model.arch) if p.source not in smoothed]) if fusion.fold_norms else 0
    return work.model(), work.stats(), Rewrites(smoothed, folded)


def notes(rewrites: Sequence[Rewrites], spec: QuantSpec, fusion: FusionSpec) -> list[str]:
    """Sentences for the report, over all pieces."""
    strengths = sorted(strength for part in rewrites for strength in part.strengths.values())
    lines = [_smoothing_note(strengths)] if spec.smoothing else []
    if fusion.fold_norms:
        lines.append(f"Norm gains folded into the next linear layer: {sum(part.folded for part in rewrites)}.")
    return lines


class _Workspace:
    """Tensors and statistics under rewriting; the originals are never touched."""

    def __init__(self, model: LoadedModel, stats: LayerStats | None) -> None:
        self._model, self._stats = model, stats
        self._changed: dict[str, Tensor] = {}
        self.amax: dict[str, Tensor] = dict(stats.amax_K) if stats else {}
        self.inputs: dict[str, Tensor] = dict(stats.inputs_TK) if stats else {}
        self.arch = model.arch

    def __getitem__(self, name: str) -> Tensor:
        return self._changed[name] if name in self._changed else self._model.tensors[name].float()

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._changed[name] = value

    def bias(self, layer: str) -> Tensor | None:
        name = f"{layer}.bias"
        return self[name] if name in self._model.tensors else None

    def weights(self, layers: Sequence[str]) -> list[Tensor]:
        return [self[f"{layer}.weight"] for layer in layers]

    def rescale_inputs(self, layers: Sequence[str], divisor_K: Tensor) -> None:
        """Statistics of `layers` once their input is divided by `divisor`; a channel divided by 0 reads nothing."""
        factor_K = torch.where(divisor_K == 0, 0.0, 1 / divisor_K)
        for layer in layers:
            if layer in self.amax:
                self.amax[layer] = self.amax[layer] * factor_K.abs()
            if layer in self.inputs:
                self.inputs[layer] = self.inputs[layer] * factor_K

    def model(self) -> LoadedModel:
        return replace(self._model, tensors={**self._model.tensors, **self._changed})

    def stats(self) -> LayerStats | None:
        return self._stats and replace(self._stats, amax_K=self.amax, inputs_TK=self.inputs)


def _norm_pairs(arch: ArchMap) -> list[_Pair]:
    """Every norm and the linear layers that read it, a router first; the last one feeds the head unless that is tied.

    Norms of what attention and MLP add (`ArchMap.post_norms`) feed no layer.
    """
    pairs = []
    for layer in arch.layers:
        router = arch.router(layer)
        gates = [f"{mlp}.{part}" for mlp in arch.mlps(layer) for part in ("gate_proj", "up_proj")]
        pairs.append(_Pair(f"{layer}.input_layernorm", tuple(f"{layer}.{part}" for part in QKV), True))
        pairs.append(_Pair(f"{layer}.{arch.mlp_norm}", (router, *gates) if router else tuple(gates), True))
    return pairs if arch.tied or not arch.has_head else [*pairs, _Pair("model.norm", ("lm_head",), True)]


def _linear_pairs(arch: ArchMap, keep_values: bool) -> list[_Pair]:
    """v -> o and up -> down. `keep_values` leaves v alone: static KV scales were measured on what it produces."""
    pairs = []
    for layer in arch.layers:
        block = f"{layer}."
        if not keep_values:
            repeats = arch.n_heads // arch.n_kv_heads
            pairs.append(_Pair(block + QKV[2], (block + O_PROJ,), False, repeats))
        if not arch.down_hadamard:  # which mixes the channels between them
            pairs += [_Pair(f"{mlp}.up_proj", (f"{mlp}.down_proj",), False) for mlp in arch.mlps(layer)]
    return pairs


def _smooth(work: _Workspace, spec: SmoothingSpec, plan: QuantPlan) -> dict[str, float]:
    """Smooth every pair that gains from it; returns the strengths used, by source."""
    schemes = plan.resolve(work.arch.linears())
    static_kv = plan.kv is not None and plan.kv.stored
    used: dict[str, float] = {}
    for pair in [*_norm_pairs(work.arch), *_linear_pairs(work.arch, static_kv)]:
        rounded = [layer for layer in pair.readers if schemes.get(layer)]
        scheme = schemes[rounded[0]] if rounded else None
        if scheme is not None and pair.readers[0] in work.inputs:
            strength = _smooth_pair(work, pair, rounded, scheme, spec)
            if strength is not None:
                used[pair.source] = strength
    return used


def _smooth_pair(
    work: _Workspace, pair: _Pair, rounded: Sequence[str], scheme: LayerScheme, spec: SmoothingSpec
) -> float | None:
    """Smooth one pair for its readers that are quantized; None when `auto` finds that leaving it alone loses less."""
    amax_K = _over_repeats(work.amax[pair.readers[0]].float(), pair.repeats, work.arch.head_dim)
    strength = spec.strength
    if strength == "auto":
        tried = [step / STRENGTHS for step in range(STRENGTHS)]
        whole_NK = torch.cat(work.weights(rounded[:: -(-len(rounded) // SEARCHED)]))
        best, _ = search_strength(work.inputs[pair.readers[0]], [whole_NK], amax_K, _fake_quant(scheme), tried)
        if best is None:
            return None
        strength = best
    w_amax_K = _over_repeats(weights_amax(work.weights(rounded)), pair.repeats, work.arch.head_dim)
    _apply(work, pair, smoothing_scale(amax_K, w_amax_K, strength))
    return strength


def _apply(work: _Workspace, pair: _Pair, s_K: Tensor) -> None:
    """Divide the source by `s` and multiply the readers' columns by it."""
    name = f"{pair.source}.weight"
    if pair.is_norm:
        work[name] = divide_gain(work[name], work.arch.norm_offset, s_K)
    else:
        s_N = _first_repeat(s_K, pair.repeats, work.arch.head_dim)
        work[name], bias = divide_rows(work[name], work.bias(pair.source), s_N)
        if bias is not None:
            work[f"{pair.source}.bias"] = bias
    for layer in pair.readers:
        work[f"{layer}.weight"] = scale_columns(work[f"{layer}.weight"], s_K)
    work.rescale_inputs(pair.readers, s_K)


def _over_repeats(x_K: Tensor, repeats: int, head_dim: int) -> Tensor:
    """Maximum over the heads that read one KV head, spread back over them; `[K]` to `[K]`."""
    if repeats == 1:
        return x_K
    heads = x_K.reshape(-1, repeats, head_dim)
    return heads.amax(1, keepdim=True).expand_as(heads).reshape(-1)


def _first_repeat(s_K: Tensor, repeats: int, head_dim: int) -> Tensor:
    """One factor per channel of the KV heads."""
    return s_K if repeats == 1 else s_K.reshape(-1, repeats, head_dim)[:, 0].reshape(-1)


def _fake_quant(scheme: LayerScheme) -> Callable[[Tensor, Tensor], Tensor]:
    """The layer as it will run: both sides rounded under its scheme."""
    weight, activation = scheme.weight, scheme.activation

    def run(x_TK: Tensor, w_NK: Tensor) -> Tensor:
        importance_K = x_TK.square().mean(0) if weight.clip.method == "mse" else None
        q = quantize_weight(w_NK, weight.fmt, weight.granularity, weight.symmetric, weight.clip, importance_K)
        x = x_TK if activation is None else fake_quantize(x_TK, activation)
        return x @ q.dequantize().T

    return run


def _fold(work: _Workspace, pairs: Sequence[_Pair]) -> int:
    """Fold the norms of `pairs`; returns how many. Reads of a channel with gain 0 vanish with it."""
    for pair in pairs:
        gain = f"{pair.source}.weight"
        factor_K = work[gain] + work.arch.norm_offset
        work[gain], weights = fold_norm(work[gain], work.arch.norm_offset, work.weights(pair.readers))
        for layer, weight in zip(pair.readers, weights, strict=True):
            work[f"{layer}.weight"] = weight
        work.rescale_inputs(pair.readers, factor_K)
    return len(pairs)


def _smoothing_note(strengths: Sequence[float]) -> str:
    """`strengths` sorted."""
    if not strengths:
        return "Smoothing: no layer gained from it."
    low, middle, high = strengths[0], strengths[len(strengths) // 2], strengths[-1]
    return f"Smoothing: {len(strengths)} places, strength {low:.2f} … {high:.2f}, median {middle:.2f}."
