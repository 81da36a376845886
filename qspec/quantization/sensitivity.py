"""How much each scheme would harm each unit of layers, measured on text: the ground that mixed precision stands on.

`output`: the unit alone is quantized, and its decoder layer run on the float model's hidden states. The error is the
squared change of what the layer hands on over its squared size: averaged over tokens, each by its own size, plus
averaged over channels, each by its own. Later layers read the residual stream through a norm, which divides a token by
its size, and gains and weights that even channels out: equal shares are equal perturbations wherever they arise, tokens
and channels of huge activations hide no others, and the shares of independent roundings add up. One decoder layer is in
memory at a time.

`kl`: the unit alone is quantized, and the rest of the model run to its logits; the error is their KL divergence from
the float model's. It is of second order in a perturbation, so that small ones add up too. The whole model is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qspec.nn.eager.decoder import Decoder
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.plan import LayerScheme, QuantPlan, Rule
from qspec.progress import Progress
from qspec.provenance import digest_of
from qspec.quantization.allocate import assumed_plan
from qspec.quantization.calibrate import calibrate_piece
from qspec.quantization.gptq import HELD_OUT
from qspec.quantization.pieces import embedded, longest, pieces
from qspec.quantization.rtn import quantize
from qspec.quantization.units import Schemes, candidate_schemes, n_weights, open_units, unit_bytes
from qspec.records import LayerStats, LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.scores import Basis, Scores, UnitScore
from qspec.scheme_table import GROUP
from qspec.schemes.build import build_plan

TOKENS = {"output": 1024, "kl": 512}
"""Tokens that a metric looks at, in whole rows: layers differ by orders of magnitude, texts do not."""

TINY = 1e-30
"""Smallest squared size that is divided by."""

Unit = tuple[str, ...]
Judge = Callable[[Sequence[Tensor]], float]
"""Error of what a piece hands on when some of it is quantized: hidden states per row, logits after the head."""


def sensitivity(
    model: LoadedModel,
    rows: Sequence[list[int]],
    spec: QuantSpec,
    width: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Scores:
    """Scores of all units that the recipe leaves open, by `spec.mixed.metric`, on a sample of `rows` of token ids.

    width: bytes of a value that is not quantized, as stored. seed: the one that `rows` were drawn with, for the record.
    Raises `RecipeError` at once for a candidate that the model cannot have or a budget out of reach.
    """
    assert spec.mixed is not None
    assumed_plan(spec, build_plan(spec), model.arch, width)
    units, candidates = open_units(build_plan(spec), model.arch), candidate_schemes(spec)
    errors = dict[Unit, tuple[float, ...]]()
    count = model.arch.n_layers + 1
    judged = judged_pieces(model, sampled(rows, spec.mixed.metric), spec.mixed.metric)
    for piece, states, stats, judge in (progress or Progress(quiet=True)).track(judged, "sensitivity", count, "layers"):
        own = set(piece.arch.linears())
        here = [unit for unit in units if unit[0] in own]
        errors |= _score(piece, states, stats, here, candidates, judge)
    return Scores(
        basis=basis(model, rows, spec, width, seed),
        units=tuple(
            UnitScore(
                layers=unit,
                weights=sum(n_weights(layer, model.arch) for layer in unit),
                bytes=tuple(unit_bytes(unit, scheme, model.arch, width) for scheme in candidates.values()),
                errors=errors[unit],
            )
            for unit in units
        ),
    )


def basis(model: LoadedModel, rows: Sequence[list[int]], spec: QuantSpec, width: int, seed: int) -> Basis:
    """The text and the settings that scores of this model under this recipe are measured on and with."""
    assert spec.mixed is not None
    sample = sampled(rows, spec.mixed.metric)
    shaping = spec.model_dump(mode="json", exclude={"engine", "scheme", "method", "smoothing", "mixed", "kv"})
    return Basis(
        model=model.source.get("sha256", ""),
        metric=spec.mixed.metric,
        candidates=spec.mixed.candidates,
        group_size=spec.group_size or GROUP,
        width=width,
        settings=digest_of(shaping | {"layers": model.arch.linears()}),
        text=digest_of(sample),
        rows=len(sample),
        tokens=sum(map(len, sample)),
        seed=seed,
    )


def sampled(rows: Sequence[list[int]], metric: str) -> list[list[int]]:
    """The rows that are looked at: whole ones up to `TOKENS`, of those that error feedback is not fitted to."""
    held_out, taken = list(rows[HELD_OUT]) or list(rows), list[list[int]]()
    for row in held_out:
        if taken and sum(map(len, taken)) + len(row) > TOKENS[metric]:
            break
        taken.append(row)
    return taken


def judged_pieces(
    model: LoadedModel, rows: Sequence[list[int]], metric: str
) -> Iterator[tuple[LoadedModel, list[Tensor], LayerStats, Judge]]:
    """Every piece, the hidden states before it, what it sees of them, and who judges what it hands on."""
    states, length = embedded(model, rows), max(map(len, rows))
    rest = [Decoder.from_float(piece, max_length=length) for piece in pieces(model)] if metric == "kl" else []
    logits = passed(rest, states)
    for i, piece in enumerate(pieces(model)):
        stats, after = calibrate_piece(piece, states)
        if rest:
            yield piece, states, stats, _divergence(rest[i + 1 :], logits)
        else:
            yield piece, states, stats, _relative(passed([Decoder.from_float(piece, max_length=length)], states))
        states = after


def _score(
    piece: LoadedModel,
    states: Sequence[Tensor],
    stats: LayerStats,
    units: Sequence[Unit],
    candidates: Schemes,
    judge: Judge,
) -> dict[Unit, tuple[float, ...]]:
    """Errors by candidate of each unit of a piece, the others in float."""
    errors: dict[Unit, list[float]] = {unit: [] for unit in units}
    for scheme in candidates.values():
        rounded = _rounded(piece, stats, units, scheme)
        for unit in units:
            if rounded is None:
                errors[unit].append(0.0)
                continue
            alone = {layer: rounded.linears[layer] for layer in unit}
            decoder = Decoder.from_quantized(
                replace(rounded, linears=alone, tensors=piece.tensors), max_length=longest(states)
            )
            errors[unit].append(judge(passed([decoder], states)))
    return {unit: tuple(costs) for unit, costs in errors.items()}


def _rounded(
    piece: LoadedModel, stats: LayerStats, units: Sequence[Unit], scheme: LayerScheme | None
) -> QuantizedModel | None:
    """All units under one scheme, rounded to nearest; None if it keeps them."""
    if scheme is None or not units:
        return None
    return quantize(piece, stats, QuantPlan(None, tuple(Rule(layer, scheme) for unit in units for layer in unit)))


def passed(decoders: Sequence[Decoder], states: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states, or logits after a head, that pieces in a row make of hidden states."""
    for decoder in decoders:
        after = []
        for x_TK in states:
            decoder.truncate(0)
            x_TK = decoder.run_layers(x_TK.to(decoder.device))
            after.append(decoder.run_head(x_TK) if decoder.arch.has_head else x_TK)
        states = after
    return list(states)


def _relative(exact: Sequence[Tensor]) -> Judge:
    """Squared change over squared size: mean over tokens, plus mean over channels."""
    size_TK = torch.cat(list(exact)).square()

    def judge(outputs: Sequence[Tensor]) -> float:
        change_TK = torch.cat([y_TK - x_TK for x_TK, y_TK in zip(exact, outputs, strict=True)]).square()
        return sum(_mean_share(change_TK.sum(over), size_TK.sum(over)) for over in (0, 1))

    return judge


def _mean_share(change: Tensor, size: Tensor) -> float:
    return float((change.double() / size.double().clamp_min(TINY)).mean())


def _divergence(rest: Sequence[Decoder], logits: Sequence[Tensor]) -> Judge:
    """KL divergence of the final logits, nats per token, once the rest of the model has run."""

    def judge(outputs: Sequence[Tensor]) -> float:
        pairs = zip(logits, passed(rest, outputs), strict=True)
        return float(torch.cat([kl_divergence(exact_TV, quantized_TV) for exact_TV, quantized_TV in pairs]).mean())

    return judge
