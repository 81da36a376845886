"""Open choices of a KV scheme, decided by measurement: granularity, cast or calibrated scales, layers in float.

Every layer's cache is quantized alone, on the float model's hidden states; the rest of the model runs, and its logits'
divergence is the error (the whole model is in memory). A layer is compared with the others and with a fixed limit:
where all are bad, none is out of line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
import math
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from qspec.nn.eager.decoder import Decoder
from qspec.plan import KVScheme, QuantPlan
from qspec.progress import Progress
from qspec.quantization.calibrate import calibrate
from qspec.quantization.kv_scales import KVScales, kv_scales, listed_channels
from qspec.quantization.pieces import longest
from qspec.quantization.sensitivity import Judge, judged_pieces, passed, sampled
from qspec.records import LayerStats, LoadedModel, QuantizedModel, layer_number

OUT_OF_LINE, LEAST = 10.0, 0.1
"""A layer stays in float when its error is above both: that many medians of all layers, and that share of `MOST`."""
MOST = 0.05
"""The most that the caches of all layers may cost, their errors added; the worst layers beyond it stay in float.

In nats a quarter of what `report.quality` lets 8 bits cost: FP8 caches of SmolLM2 cost .007 to .014, of stories260K .02
to .07 (docs/fidelity.md), and one of .1 to .2 names half of the likeliest tokens only.
"""
CHANNEL_RATIO = 8.0
"""A key channel is an outlier when its largest magnitude is that many times the median channel's of its layer."""

Candidate = Literal["calibrated", "cast"]


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer's cache by candidate scales, and the channels of its keys that are outliers."""

    layer: str
    errors: Mapping[Candidate, float]
    channels: tuple[int, ...]

    @property
    def least(self) -> float:
        """Error under the better scales."""
        return min(self.errors.values())


def choose_kv(
    model: LoadedModel, plan: QuantPlan, rows: Sequence[list[int]], progress: Progress | None = None
) -> tuple[QuantPlan, tuple[str, ...]]:
    """The plan with a KV scheme that leaves nothing open, and what was chosen, in sentences.

    A few of `rows` of token ids are measured on; ranges are those of the float model on all of them.
    """
    if plan.kv is None or not plan.kv.open:
        return plan, ()
    stats, sample = calibrate(model, rows) if plan.kv.calibrated else None, sampled(rows, "kl")
    open_kvs = _alternatives(plan.kv)
    layers, count = [list[LayerError]() for _ in open_kvs], model.arch.n_layers + 1
    measured = judged_pieces(model, sample, "kl")
    for piece, states, _, judge in (progress or Progress(quiet=True)).track(measured, "kv", count, "layers"):
        for layer in piece.arch.layers:
            channels = _outlying_channels(piece, layer, states)
            for kv, errors in zip(open_kvs, layers, strict=True):
                errors.append(LayerError(layer, _errors(piece, states, kv, stats, judge), channels))
    which, notes = _granularity(open_kvs, layers)
    kv, decided = decide(open_kvs[which], layers[which])
    basis = f"KV choices were measured on {sum(map(len, sample))} tokens (KL in nats)."
    whole = all(kv.skips(layer_number(layer)) for layer in model.arch.layers)
    return replace(plan, kv=None if whole else kv), (*notes, *decided, basis)


def _errors(
    piece: LoadedModel, states: Sequence[Tensor], kv: KVScheme, stats: LayerStats | None, judge: Judge
) -> dict[Candidate, float]:
    """Errors of one decoder layer alone by candidate scales, `states` being hidden states `[T, hidden]` before it.

    An error that is no number, of logits that are none, counts as infinite.
    """
    both = kv.stored and kv.scales == "auto"
    candidates: tuple[Candidate, ...] = ("calibrated", "cast") if both else (_only(kv.scales),)
    errors: dict[Candidate, float] = {}
    for candidate in candidates:
        scheme = replace(kv, scales=candidate, skip_layers=(), cast_layers=())
        scales = kv_scales(piece.arch, scheme, stats, [])
        error = judge(passed([_with_cache(piece, scheme, scales, states)], states))
        errors[candidate] = error if math.isfinite(error) else math.inf
    return errors


def decide(kv: KVScheme, errors: Sequence[LayerError]) -> tuple[KVScheme, tuple[str, ...]]:
    """The scheme with what the errors of all layers say, and notes. Ties stay calibrated."""
    notes: list[str] = []
    cast: tuple[int, ...] = ()
    if kv.stored and kv.scales == "auto":
        cast = tuple(layer_number(x.layer) for x in errors if x.errors["cast"] < x.errors["calibrated"])
        notes.append(f"KV scales: 1.0 (cast) in {len(cast)} of {len(errors)} layers, calibrated in the others.")
    least = {x.layer: x.least for x in errors}
    skipped = kv.skip_layers
    if skipped == "auto":
        in_float = _in_float(least)
        skipped = tuple(sorted(map(layer_number, in_float)))
        which = ", ".join(f"{layer_number(x.layer)} ({x.least:.2g})" for x in errors if x.layer in in_float)
        notes.append(f"KV in float: {f'layers {which}' if which else 'no layer'}; {_sums(least, in_float)}.")
    outliers = {x.layer: x.channels for x in errors if x.channels}
    if outliers:
        notes.append(f"Key channels above {CHANNEL_RATIO:g} times the median: {listed_channels(outliers)}.")
    scales = "calibrated" if kv.scales == "auto" else kv.scales
    return replace(kv, scales=scales, skip_layers=skipped, cast_layers=cast), tuple(notes)


def _alternatives(kv: KVScheme) -> list[KVScheme]:
    """The scheme with each granularity that it leaves open, or as it is."""
    tried = [replace(kv, granularity=granularity, granularities=()) for granularity in kv.granularities]
    return tried or [kv]


def _granularity(open_kvs: Sequence[KVScheme], layers: Sequence[Sequence[LayerError]]) -> tuple[int, tuple[str, ...]]:
    """Which of several schemes to take: the first that costs at most `MOST`, else the cheapest; and a note."""
    costs = [
        sum(x.least for x in errors if not kv.skips(layer_number(x.layer)))
        for kv, errors in zip(open_kvs, layers, strict=True)
    ]
    if len(costs) == 1:
        return 0, ()
    which = next((i for i, cost in enumerate(costs) if cost <= MOST), costs.index(min(costs)))
    shown = ", ".join(f"{kv.granularity} {cost:.2g}" for kv, cost in zip(open_kvs, costs, strict=True))
    return which, (f"KV granularity: {open_kvs[which].granularity}, of {shown} (layers added; at most {MOST:g}).",)


def _in_float(least: Mapping[str, float]) -> set[str]:
    """Layers out of line, then the worst until the others cost at most `MOST` together."""
    limit = max(LEAST * MOST, OUT_OF_LINE * median(least.values()))
    in_float: set[str] = set()
    for layer in sorted(least, key=lambda layer: -least[layer]):
        if least[layer] <= limit and sum(least[other] for other in least.keys() - in_float) <= MOST:
            break
        in_float.add(layer)
    return in_float


def _sums(least: Mapping[str, float], in_float: set[str]) -> str:
    rest = sum(error for layer, error in least.items() if layer not in in_float)
    return f"the others cost {rest:.2g} together (at most {MOST:g}), the median layer {median(least.values()):.2g}"


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
    return tuple((amax > CHANNEL_RATIO * amax.median()).nonzero().flatten().tolist())
