"""GPTQ piece by piece: each layer is rounded for the inputs that its quantized predecessors give it.

Hidden states of all rows are kept, and the float weights and second moments of one piece at a time. Some rows are held
out of the second moments: on them feedback must beat rounding to nearest, or is not taken. Where it does, it is then
fitted to all rows.
"""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
import logging
from statistics import median

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization import gptq
from qspec.numerics.quantization.affine import QTensor
from qspec.ops.reference import fake_quantize
from qspec.quantization.calibrate import advanced
from qspec.quantization.pieces import longest
from qspec.quantization.rtn import finite_weight
from qspec.records import LoadedModel, QLinear, QuantizedModel

DAMPING = 1.0
"""Share of the mean diagonal, a hundred times the paper's: that fits the calibration text and loses on other scripts.

SmolLM2-135M, FP8_DYNAMIC, English calibration, KL in nats/token on WikiText-2 and Chinese: rounding to nearest .032 and
.062; damping 0.01 to 0.1, whichever was best on held-out English, .023 and .069; damping 1 .023 and .061.
"""
HELD_OUT = slice(1, None, 4)
"""Rows that are kept out of the second moments."""

_PHASES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",))
"""Layers of a piece in the order in which they read: later ones see what earlier ones make of their inputs.

Those of one phase share an input (of each expert), which the decoder reports under the first one's name.
"""

log = logging.getLogger("qspec")


@dataclass(frozen=True)
class Choice:
    """A layer's rounding, and its error on held-out rows over that of rounding to nearest.

    damping None: rounding to nearest, for `reason`. raised: the damping asked for was too little.
    """

    layer: str
    damping: float | None
    raised: bool
    reason: str
    ratio: float


def require_judge(rows: Sequence[object]) -> None:
    """Raise `RecipeError` for fewer than two rows: one to fit, one to judge by."""
    if len(rows) < 2:
        raise RecipeError("method gptq", "needs two calibration texts, one of them to judge by", "raise samples")


def refine(
    piece: LoadedModel, rounded: QuantizedModel, states: Sequence[Tensor]
) -> tuple[QuantizedModel, list[Choice], list[Tensor]]:
    """`rounded`, the rounding to nearest of `piece`, with codes chosen by error feedback, and how they were chosen.

    `states`: hidden states `[T, hidden]` per row as the quantized layers before give them; those after the piece are
    returned. Scales, plan and all that is not a code stay.
    """
    done, choices = dict[str, QLinear](), list[Choice]()
    for phase in _PHASES:
        members = {name: linear for name, linear in rounded.linears.items() if name.rpartition(".")[2] in phase}
        inputs = _inputs(piece, replace(rounded, linears=done), members, states) if members else {}
        for layer, linear in members.items():
            prefix = layer.removesuffix(layer.rpartition(".")[2])
            seen = inputs.get(prefix + phase[0])
            if seen is None:  # an expert that no token was sent to
                done[layer] = linear
                continue
            codes, choice = _best(layer, finite_weight(piece, layer), linear, seen)
            done[layer] = replace(linear, weight=codes)
            choices.append(choice)
            log.info("%s: %s, held-out error %.3f of rounding's", layer, choice.reason, choice.ratio)
    refined = replace(rounded, linears={layer: done[layer] for layer in rounded.linears})
    return refined, choices, advanced(_decoder(refined, states), states)


class _Inputs:
    """`X^T X` of what a layer reads: over the rows to fit, and over those to judge by."""

    def __init__(self, width: int) -> None:
        self.fit_KK, self.held_out_KK = torch.zeros(width, width), torch.zeros(width, width)

    def add(self, x_TK: Tensor, held_out: bool) -> None:
        (self.held_out_KK if held_out else self.fit_KK).addmm_(x_TK.T, x_TK)

    def error(self, w_NK: Tensor, answer_NK: Tensor) -> float:
        """Squared error of the outputs of `answer` against those of `w`, over the rows to judge by."""
        delta_NK = w_NK - answer_NK
        return float(((delta_NK @ self.held_out_KK) * delta_NK).sum(dtype=torch.float64))

    @cached_property
    def trial(self) -> gptq.Factor | None:
        """The factor of the rows to fit."""
        return gptq.factor(self.fit_KK, DAMPING)

    @cached_property
    def final(self) -> gptq.Factor | None:
        """The factor of all rows."""
        return gptq.factor(self.fit_KK + self.held_out_KK, DAMPING)


def _inputs(
    piece: LoadedModel, done: QuantizedModel, members: Mapping[str, QLinear], states: Sequence[Tensor]
) -> dict[str, _Inputs]:
    """Inputs of `members` by name, while what is `done` of the piece is quantized; the KV cache as it will run."""
    decoder = _decoder(replace(done, tensors=piece.tensors), states)
    held_out, inputs = range(len(states))[HELD_OUT], dict[str, _Inputs]()
    for row, state_TK in enumerate(states):
        for layer, x_TK in _observed(decoder, members, state_TK).items():
            linear = members[layer]
            read = x_TK if linear.activation is None else fake_quantize(x_TK, linear.activation, linear.input_scale)
            inputs.setdefault(layer, _Inputs(x_TK.shape[1])).add(read, row in held_out)
    return inputs


def _observed(decoder: Decoder, members: Container[str], x_TK: Tensor) -> dict[str, Tensor]:
    """Inputs of `members` while a piece runs over one row, float32; a window of the KV cache cuts the row.

    The pass ends where they have read the whole row: what comes after is not of interest.
    """
    seen: dict[str, list[Tensor]] = {}
    whole = x_TK.shape[0]

    def keep(name: str, x: Tensor) -> None:
        if name in members:
            parts = seen.setdefault(name, [])
            parts.append(x.float())
            if ".experts." not in name and sum(part.shape[0] for part in parts) == whole:
                raise _Seen

    decoder.observer = keep
    with suppress(_Seen):
        advanced(decoder, [x_TK])
    return {name: torch.cat(parts) for name, parts in seen.items()}


class _Seen(Exception):
    """Ends a pass whose rest nobody looks at."""


def _decoder(model: QuantizedModel, states: Sequence[Tensor]) -> Decoder:
    return Decoder.from_quantized(model, max_length=longest(states))


def _best(layer: str, w_NK: Tensor, linear: QLinear, seen: _Inputs) -> tuple[QTensor, Choice]:
    """Feedback where it beats rounding to nearest on the rows to judge by, and rounding where it does not."""
    rounded, dense_NK = linear.weight, linear.rounded_part(w_NK)
    if seen.trial is None or seen.final is None:
        return rounded, Choice(layer, None, False, "rounding to nearest, no factor of the second moments", 1.0)
    rounding = seen.error(dense_NK, rounded.dequantize())
    fed = gptq.feed_back(dense_NK, rounded, seen.trial)
    ratio = seen.error(dense_NK, fed.dequantize()) / rounding if rounding else 1.0
    if not ratio < 1:
        return rounded, Choice(layer, None, False, "rounding to nearest, no gain on held-out rows", ratio)
    damping = seen.final.damping
    raised = damping != DAMPING
    reason = f"gptq, damping {damping:g}{' (raised)' if raised else ''}"
    return gptq.feed_back(dense_NK, rounded, seen.final), Choice(layer, damping, raised, reason, ratio)


def notes(choices: Sequence[Choice], rows: int) -> list[str]:
    """Sentences for the report: how many layers gained, by how much, and which were exceptions."""
    taken = [choice for choice in choices if choice.damping is not None]
    judged = len(range(rows)[HELD_OUT])
    fitted = f"chosen on {judged} of {rows} rows that the others were fitted to, then fitted to all"
    lines = [f"GPTQ: {len(taken)} of {len(choices)} layers, {fitted}."]
    if taken:
        ratio = median(choice.ratio for choice in taken)
        lines.append(f"GPTQ: held-out output error {ratio:.2f} of rounding's (median), damping {DAMPING:g}.")
    by_reason: dict[str, list[str]] = {}
    for choice in choices:
        if choice.damping is None:
            by_reason.setdefault(choice.reason, []).append(choice.layer)
        elif choice.raised:
            by_reason.setdefault("damping raised", []).append(choice.layer)
    return lines + [f"GPTQ, {reason}: {_listed(layers)}." for reason, layers in by_reason.items()]


def _listed(layers: Sequence[str], most: int = 8) -> str:
    rest = len(layers) - most
    return ", ".join(layers[:most]) + (f" and {rest} more" if rest > 0 else "")
