"""What a KV scheme leaves open, decided per layer by measurement: cast or calibrated scales, and layers left in float.

Every layer's cache is quantized alone, on the float model's hidden states. `kl` runs the rest of the model and takes
the divergence of its logits (the whole model is in memory); `output` takes the relative change of what the layer hands
on (one layer is).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from qspec.nn.eager.decoder import Decoder
from qspec.plan import KVScheme, QuantPlan
from qspec.progress import Progress
from qspec.quantize.calibrate import calibrate
from qspec.quantize.kv_scales import FEW, KVScales, kv_scales, listed_channels
from qspec.quantize.pieces import longest
from qspec.quantize.sensitivity import Judge, judged_pieces, passed, sampled
from qspec.records import LayerStats, LoadedModel, QuantizedModel, layer_number

OUT_OF_LINE, LEAST = 10.0, 1e-4
"""A layer stays in float when its error is above both: that many medians of all layers, and so much in itself."""
CHANNEL_RATIO = 8.0
"""A key channel is an outlier when its largest magnitude is that many times the median channel's of its layer."""

Candidate = Literal["calibrated", "cast"]


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer's cache by candidate scales, and the channels of its keys that are outliers."""

    layer: str
    errors: Mapping[Candidate, float]
    channels: tuple[int, ...]


def choose_kv(
    model: LoadedModel,
    plan: QuantPlan,
    rows: Sequence[list[int]],
    stats: LayerStats | None = None,
    metric: Literal["kl", "output"] = "kl",
    progress: Progress | None = None,
) -> tuple[QuantPlan, tuple[str, ...]]:
    """The plan with a KV scheme that leaves nothing open, and what was chosen, in sentences.

    A few of `rows` of token ids are measured on. stats: ranges of the float model on all of them; made here if absent.
    """
    if plan.kv is None or not plan.kv.open:
        return plan, ()
    if stats is None and plan.kv.calibrated:
        stats = calibrate(model, rows)
    sample = sampled(rows, metric)
    found, count = list[LayerError](), model.arch.n_layers + 1
    measured = judged_pieces(model, sample, metric)
    for piece, states, _, judge in (progress or Progress(quiet=True)).track(measured, "kv", count, "layers"):
        if piece.arch.n_layers:
            found.append(layer_error(piece, states, plan.kv, stats, judge))
    kv, notes = decide(plan.kv, found)
    unit = "KL in nats" if metric == "kl" else "relative change of a layer's output"
    return replace(plan, kv=kv), (*notes, f"KV choices were measured on {sum(map(len, sample))} tokens ({unit}).")


def layer_error(
    piece: LoadedModel, states: Sequence[Tensor], kv: KVScheme, stats: LayerStats | None, judge: Judge
) -> LayerError:
    """Errors of one decoder layer alone, `states` being hidden states `[T, hidden]` before it."""
    (layer,) = piece.arch.layers
    candidates: tuple[Candidate, ...] = ("calibrated", "cast") if kv.scales == "auto" else (_only(kv.scales),)
    errors = {}
    for candidate in candidates:
        scheme = replace(kv, scales=candidate, skip_layers=(), cast_layers=())
        scales = kv_scales(piece.arch, scheme, stats, [])
        errors[candidate] = judge(passed([_with_cache(piece, scheme, scales, states)], states))
    return LayerError(layer, errors, _outlying_channels(piece, layer, states))


def decide(kv: KVScheme, found: Sequence[LayerError]) -> tuple[KVScheme, tuple[str, ...]]:
    """The scheme with what the errors of all layers say, and notes. Ties stay calibrated."""
    notes: list[str] = []
    cast: tuple[int, ...] = ()
    if kv.scales == "auto":
        cast = tuple(layer_number(x.layer) for x in found if x.errors["cast"] < x.errors["calibrated"])
        notes.append(f"KV scales: 1.0 (cast) in {len(cast)} of {len(found)} layers, calibrated in the others.")
    least = {x.layer: min(x.errors.values()) for x in found}
    skipped = kv.skip_layers
    if skipped == "auto":
        limit = max(LEAST, OUT_OF_LINE * median(least.values()))
        skipped = tuple(layer_number(layer) for layer, error in least.items() if error > limit)
        which = ", ".join(f"{layer_number(layer)} ({error:.2g})" for layer, error in least.items() if error > limit)
        said = f"layers {which}" if which else "no layer"
        notes.append(f"KV in float: {said}; median error {median(least.values()):.2g}.")
    outliers = {x.layer: x.channels for x in found if x.channels}
    if outliers:
        notes.append(f"Key channels above {CHANNEL_RATIO:g} times the median: {listed_channels(outliers)}.")
    scales = "calibrated" if kv.scales == "auto" else kv.scales
    return replace(kv, scales=scales, skip_layers=skipped, cast_layers=cast), tuple(notes)


def _only(scales: Literal["calibrated", "cast", "auto"]) -> Candidate:
    return "cast" if scales == "cast" else "calibrated"


def _with_cache(piece: LoadedModel, kv: KVScheme, scales: KVScales, states: Sequence[Tensor]) -> Decoder:
    """A piece in float with a quantized cache."""
    rounded = QuantizedModel(
        piece.arch,
        piece.tensors,
        {},
        QuantPlan(None, kv=kv),
        piece.config,
        piece.tokenizer,
        piece.source,
        scales.k,
        scales.v,
        q_scale=scales.q,
    )
    return Decoder.from_quantized(rounded, max_length=longest(states))


def _outlying_channels(piece: LoadedModel, layer: str, states: Sequence[Tensor]) -> tuple[int, ...]:
    """Channels of the layer's keys (all heads, as `k_proj` counts them) that are far above its others."""
    decoder = Decoder.from_float(piece, max_length=longest(states))
    seen: list[Tensor] = []

    def observe(name: str, x: Tensor) -> None:
        if name.endswith(".k"):
            seen.append(x.abs().amax(1).flatten())

    decoder.observer = observe
    passed([decoder], states)
    amax = torch.stack(seen).amax(0)
    found = (amax > CHANNEL_RATIO * amax.median()).nonzero().flatten().tolist()
    return tuple(found) if len(found) <= FEW * len(amax) else ()
