"""GPTQ layer by layer: each decoder layer is rounded for the inputs that its quantized predecessors give it.

Hidden states of all rows are kept, and the float weights and second moments of one layer at a time. Some rows are held
out of the second moments: on them damping is chosen, and there feedback must beat rounding to nearest, or is not taken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
import logging
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.errors import RecipeError
from qspec.nn.decoder import Decoder
from qspec.numerics import gptq
from qspec.numerics.affine import QTensor
from qspec.ops.reference import fake_quantize
from qspec.progress import Progress
from qspec.records import FUSED_GROUPS, LoadedModel, QLinear, QuantizedModel

DAMPINGS = (0.01, 0.1, 1.0)
"""Tried for every layer: the paper's 0.01 overfits a few thousand tokens where inputs are many (`down_proj`)."""
HELD_OUT = slice(1, None, 4)
"""Rows that are kept out of the second moments."""

_READERS = {group[0].rpartition(".")[2]: [part.rpartition(".")[2] for part in group] for group in FUSED_GROUPS}
"""Layers that share an input, by the one under whose name the decoder reports it; all others read alone."""
_ALONE = "model.layers.0."

V = TypeVar("V")

log = logging.getLogger("qspec")


@dataclass(frozen=True)
class _Choice:
    """What a layer got, and its error on held-out rows over that of rounding to nearest.

    damping None: rounding to nearest, for `reason`. raised: the damping asked for was too little.
    """

    layer: str
    weight: QTensor
    damping: float | None
    raised: bool
    reason: str
    ratio: float


def refine(
    model: LoadedModel, rounded: QuantizedModel, rows: Sequence[list[int]], progress: Progress | None = None
) -> QuantizedModel:
    """`rounded`, the rounding to nearest of `model`, with codes chosen by error feedback on `rows` of token ids.

    Scales, plan and all that is not a code stay. Notes sum up what was chosen, the log has every layer. Raises
    `RecipeError` for fewer than two rows.
    """
    if len(rows) < 2:
        raise RecipeError("method gptq", "needs two calibration texts, one of them to judge by", "raise samples")
    linears, choices = dict(rounded.linears), list[_Choice]()

    def take(moments: Mapping[str, "_Moments"]) -> None:
        for choice in _choices(model, linears, moments):
            linears[choice.layer] = replace(linears[choice.layer], weight=choice.weight)
            choices.append(choice)

    states = _embedded(model, rows)
    count = model.arch.n_layers
    for i in (progress or Progress(quiet=True)).track(range(count), "gptq", count, "layers"):
        take(_layer_moments(_one_layer(model, rounded, i, {}, states), i, linears, states))
        states = _advanced(_one_layer(model, rounded, i, linears, states), states)
    if "lm_head" in linears:
        take(_head_moments(model, linears, states))
    return replace(rounded, linears=linears, notes=(*rounded.notes, *_notes(choices, rows)))


class _Moments:
    """`X^T X` of an input: over the rows to fit, and over those to judge by."""

    def __init__(self, width: int) -> None:
        self.fit_KK, self.held_out_KK = torch.zeros(width, width), torch.zeros(width, width)

    def add(self, x_TK: Tensor, held_out: bool) -> None:
        (self.held_out_KK if held_out else self.fit_KK).addmm_(x_TK.T, x_TK)


class _Recorder:
    """Observer of one layer alone that sums the moments of what quantized linears read, rounded as they will read it.

    `prefix` is the layer's own, `held_out` says of which kind the current row is.
    """

    def __init__(self, prefix: str, linears: Mapping[str, QLinear]) -> None:
        self._prefix, self._linears = prefix, linears
        self.held_out = False
        self.moments: dict[str, _Moments] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        layer = self._prefix + name.removeprefix(_ALONE) if name.startswith(_ALONE) else name
        linear = self._linears.get(layer)
        if linear is None:  # keys and values, and layers that stay in float
            return
        x_TK = x.float() if linear.activation is None else fake_quantize(x, linear.activation, linear.input_scale)
        self.moments.setdefault(layer, _Moments(x.shape[1])).add(x_TK, self.held_out)


def _layer_moments(
    decoder: Decoder, i: int, linears: Mapping[str, QLinear], states: Sequence[Tensor]
) -> dict[str, _Moments]:
    recorder = decoder.observer = _Recorder(f"model.layers.{i}.", linears)
    held_out = range(len(states))[HELD_OUT]
    for row, x_TK in enumerate(states):
        recorder.held_out = row in held_out
        decoder.truncate(0)
        decoder.run_layers(x_TK)
    return recorder.moments


def _head_moments(model: LoadedModel, linears: Mapping[str, QLinear], states: Sequence[Tensor]) -> dict[str, _Moments]:
    """What the head reads, by a decoder without layers whose embeddings are a row's hidden states."""
    arch = replace(model.arch, n_layers=0, embed_scale=1.0, tied=True)
    recorder, held_out = _Recorder("", linears), range(len(states))[HELD_OUT]
    for row, x_TK in enumerate(states):
        tensors = {"model.embed_tokens.weight": x_TK, "model.norm.weight": model.tensors["model.norm.weight"]}
        decoder = Decoder.from_float(replace(model, arch=arch, tensors=tensors), max_length=x_TK.shape[0])
        decoder.observer, recorder.held_out = recorder, row in held_out
        decoder.forward(torch.arange(x_TK.shape[0]), last=1)
    return recorder.moments


def _advanced(decoder: Decoder, states: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states after the decoder's layers, each row by itself."""
    out = []
    for x_TK in states:
        decoder.truncate(0)
        out.append(decoder.run_layers(x_TK))
    return out


def _embedded(model: LoadedModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    embed_VK, scale = model.tensors["model.embed_tokens.weight"], model.arch.embed_scale
    return [F.embedding(torch.tensor(row), embed_VK).float() * scale for row in rows]


def _one_layer(
    model: LoadedModel, rounded: QuantizedModel, i: int, linears: Mapping[str, QLinear], states: Sequence[Tensor]
) -> Decoder:
    """Layer `i` as a model of its own, with the KV cache as it will run; what is not in `linears` is in float."""
    prefix, hidden = f"model.layers.{i}.", model.arch.hidden_size

    unused = {"model.embed_tokens.weight": torch.zeros(1, hidden), "model.norm.weight": torch.ones(hidden)}
    alone = replace(
        rounded,
        arch=replace(model.arch, n_layers=1, tied=True),
        tensors=_own(model.tensors, prefix) | unused,
        linears=_own(linears, prefix),
        k_scale=_own(rounded.k_scale, prefix),
        v_scale=_own(rounded.v_scale, prefix),
    )
    return Decoder.from_quantized(alone, max_length=max(x_TK.shape[0] for x_TK in states))


def _own(items: Mapping[str, V], prefix: str) -> dict[str, V]:
    """What belongs to one layer, under the names of the first."""
    return {_ALONE + name.removeprefix(prefix): items[name] for name in items if name.startswith(prefix)}


def _choices(model: LoadedModel, linears: Mapping[str, QLinear], moments: Mapping[str, _Moments]) -> list[_Choice]:
    """Codes of every layer that reads one of the inputs; their factors are made once."""
    found = []
    for first, seen in moments.items():
        block, _, part = first.rpartition(".")
        layers = [f"{block}.{reader}" for reader in _READERS[part]] if part in _READERS else [first]
        factors = [gptq.factor(seen.fit_KK, damping) for damping in DAMPINGS]
        for layer in layers:
            weight = model.lm_head() if layer == "lm_head" else model.tensors[f"{layer}.weight"]
            choice = _best(layer, weight, linears[layer].weight, seen, factors)
            log.info("%s: %s, held-out error %.3f of rounding's", layer, choice.reason, choice.ratio)
            found.append(choice)
    return found


def _best(layer: str, w_NK: Tensor, rounded: QTensor, seen: _Moments, factors: Sequence[gptq.Factor | None]) -> _Choice:
    """The damping of least error on held-out rows, and rounding to nearest where none is better than that."""
    rounding = gptq.output_error(w_NK, rounded, seen.held_out_KK)
    reason = "no gain on held-out rows" if any(factors) else "no factor of the second moments"
    best = _Choice(layer, rounded, None, False, f"rounding to nearest, {reason}", 1.0)
    for asked, factor in zip(DAMPINGS, factors, strict=True):
        solution = gptq.solve(w_NK, rounded, seen.fit_KK, factor)
        if factor is None or solution.outcome != "solved":
            continue
        ratio = gptq.output_error(w_NK, solution.weight, seen.held_out_KK) / rounding if rounding else 1.0
        if ratio < best.ratio:
            raised = factor.damping != asked
            reason = f"gptq, damping {factor.damping:g}{' (raised)' if raised else ''}"
            best = _Choice(layer, solution.weight, factor.damping, raised, reason, ratio)
    return best


def _notes(choices: Sequence[_Choice], rows: Sequence[list[int]]) -> list[str]:
    """Sentences for the report: how many layers gained, by how much, and which were exceptions."""
    taken = [choice for choice in choices if choice.damping is not None]
    judged = rows[HELD_OUT]
    fitted = f"fitted to {len(rows) - len(judged)} texts, judged on {len(judged)} others"
    notes = [f"GPTQ: {len(taken)} of {len(choices)} layers, {fitted}."]
    if taken:
        ratio = median(choice.ratio for choice in taken)
        used = sorted(Counter(choice.damping for choice in taken if choice.damping is not None).items())
        dampings = ", ".join(f"{damping:g} in {count}" for damping, count in used)
        notes.append(f"GPTQ: held-out output error {ratio:.2f} of rounding's (median); damping {dampings} layers.")
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if choice.damping is None:
            by_reason.setdefault(choice.reason, []).append(choice.layer)
        elif choice.raised:
            by_reason.setdefault("damping raised", []).append(choice.layer)
    return notes + [f"GPTQ, {reason}: {_listed(layers)}." for reason, layers in by_reason.items()]


def _listed(layers: Sequence[str], most: int = 8) -> str:
    rest = len(layers) - most
    return ", ".join(layers[:most]) + (f" and {rest} more" if rest > 0 else "")
