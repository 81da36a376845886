"""GPTQ piece by piece: each layer answers the inputs of its quantized predecessors as the float model would have.

Hidden states of all rows are kept, and the float weights and second moments of one piece at a time. Some rows are held
out of the second moments: on them damping is chosen, and there feedback must beat rounding to nearest, or is not taken.
What was chosen is then fitted to all rows.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
import logging
from statistics import median

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.decoder import Decoder
from qspec.numerics import gptq
from qspec.numerics.affine import QTensor
from qspec.ops.reference import fake_quantize
from qspec.records import LoadedModel, QLinear, QuantizedModel
from qspec.stages.calibrate import advanced

DAMPINGS = (0.01, 0.1, 1.0)
"""Tried for every layer: the paper's 0.01 overfits a few thousand tokens where inputs are many (`down_proj`)."""
HELD_OUT = slice(1, None, 4)
"""Rows that are kept out of the second moments."""

_PHASES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",))
"""Layers of a piece in the order in which they read: later ones see what earlier ones make of their inputs.

Those of one phase share an input (of each expert), which the decoder reports under the first one's name.
"""

log = logging.getLogger("qspec")


@dataclass(frozen=True)
class Choice:
    """What a layer got, and its error on held-out rows over that of rounding to nearest.

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
    piece: LoadedModel, rounded: QuantizedModel, exact: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[QuantizedModel, list[Choice], list[Tensor]]:
    """`rounded`, the rounding to nearest of `piece`, with codes chosen by error feedback, and how they were chosen.

    Hidden states `[T, hidden]` per row before the piece: `exact` as the float model has them, `states` as the quantized
    layers before give them; the latter are returned as they are after it. Scales, plan and all that is not a code stay.
    """
    done, choices = dict[str, QLinear](), list[Choice]()
    for phase in _PHASES:
        members = {name: linear for name, linear in rounded.linears.items() if name.rpartition(".")[2] in phase}
        inputs = _inputs(piece, replace(rounded, linears=done), members, exact, states) if members else {}
        for layer, linear in members.items():
            prefix = layer.removesuffix(layer.rpartition(".")[2])
            seen = inputs.get(prefix + phase[0])
            if seen is None:  # an expert that no token was sent to
                done[layer] = linear
                continue
            weight = piece.lm_head() if layer == "lm_head" else piece.tensors[f"{layer}.weight"]
            codes, choice = _best(layer, weight.float(), linear, seen)
            done[layer] = replace(linear, weight=codes)
            choices.append(choice)
            log.info("%s: %s, held-out error %.3f of rounding's", layer, choice.reason, choice.ratio)
    refined = replace(rounded, linears={layer: done[layer] for layer in rounded.linears})
    return refined, choices, advanced(_decoder(refined, states), states)


class _Sums:
    """Over the tokens of some rows: `X^T X` of what a layer reads, and `D^T X` of what that lacks of exact inputs."""

    def __init__(self, width: int) -> None:
        self.read_KK, self.drift_KK = torch.zeros(width, width), torch.zeros(width, width)

    def add(self, x_TK: Tensor, lack_TK: Tensor) -> None:
        self.read_KK.addmm_(x_TK.T, x_TK)
        self.drift_KK.addmm_(lack_TK.T, x_TK)


class _Inputs:
    """What is known of one input: sums over the rows to fit, over those to judge by (with `D^T D`), and over all."""

    def __init__(self, width: int) -> None:
        self.fit, self.held_out = _Sums(width), _Sums(width)
        self.lack_KK = torch.zeros(width, width)
        self._final: dict[float, gptq.Factor | None] = {}

    def add(self, x_TK: Tensor, lack_TK: Tensor, held_out: bool) -> None:
        (self.held_out if held_out else self.fit).add(x_TK, lack_TK)
        if held_out:
            self.lack_KK.addmm_(lack_TK.T, lack_TK)

    @cached_property
    def whole(self) -> _Sums:
        sums = _Sums(0)
        sums.read_KK, sums.drift_KK = (
            self.fit.read_KK + self.held_out.read_KK,
            self.fit.drift_KK + self.held_out.drift_KK,
        )
        return sums

    @cached_property
    def trials(self) -> list[gptq.Factor | None]:
        """Factors of the rows to fit, one per damping that is tried."""
        return [gptq.factor(self.fit.read_KK, damping) for damping in DAMPINGS]

    def final(self, damping: float) -> gptq.Factor | None:
        """The factor of all rows, made once per damping."""
        if damping not in self._final:
            self._final[damping] = gptq.factor(self.whole.read_KK, damping)
        return self._final[damping]


class _Judge:
    """Squared error of answers on X against a weight on X + D: `|(W - A) X + W D|^2`, from sums."""

    def __init__(self, w_NK: Tensor, seen: _Inputs) -> None:
        self._w_NK, self._sums, self._moved_NK = w_NK, seen.held_out, w_NK @ seen.held_out.drift_KK
        self._least = _dot(w_NK @ seen.lack_KK, w_NK)

    def error(self, answer_NK: Tensor) -> float:
        delta_NK = self._w_NK - answer_NK
        error = _dot(delta_NK @ self._sums.read_KK, delta_NK) + 2 * _dot(delta_NK, self._moved_NK) + self._least
        return max(error, 0.0)


def _dot(a_NK: Tensor, b_NK: Tensor) -> float:
    return float((a_NK * b_NK).sum(dtype=torch.float64))


def _inputs(
    piece: LoadedModel,
    done: QuantizedModel,
    members: Mapping[str, QLinear],
    exact: Sequence[Tensor],
    states: Sequence[Tensor],
) -> dict[str, _Inputs]:
    """Inputs of `members` by name, while what is `done` of the piece is quantized; the KV cache as it will run.

    Experts are sent other tokens by either model, so that for them D is what rounding the activations takes.
    """
    reader = Decoder.from_float(piece, max_length=max(x_TK.shape[0] for x_TK in exact))
    runner = _decoder(replace(done, tensors=piece.tensors), states)
    held_out, found = range(len(states))[HELD_OUT], dict[str, _Inputs]()
    for row, (exact_TK, state_TK) in enumerate(zip(exact, states, strict=True)):
        seen = _observed(runner, members, state_TK)
        wanted = {} if any(".experts." in layer for layer in members) else _observed(reader, members, exact_TK)
        for layer, x_TK in seen.items():
            linear = members[layer]
            read = x_TK if linear.activation is None else fake_quantize(x_TK, linear.activation, linear.input_scale)
            lack_TK = wanted.get(layer, x_TK) - read
            found.setdefault(layer, _Inputs(x_TK.shape[1])).add(read, lack_TK, row in held_out)
    return found


def _observed(decoder: Decoder, members: Container[str], x_TK: Tensor) -> dict[str, Tensor]:
    """What `members` read while a piece runs over one row, float32; a window of the KV cache cuts the row.

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
    return Decoder.from_quantized(model, max_length=max(x_TK.shape[0] for x_TK in states))


def _best(layer: str, w_NK: Tensor, linear: QLinear, seen: _Inputs) -> tuple[QTensor, Choice]:
    """The dampings of least error on held-out rows, and rounding to nearest where none is better than that."""
    rounded, judge = linear.weight, _Judge(w_NK, seen)
    apart_NK = torch.zeros(()) if linear.outliers is None else linear.outliers.dense()
    rounding = judge.error(rounded.dequantize() + apart_NK)
    reason = "no gain on held-out rows" if any(seen.trials) else "no factor of the second moments"
    best = Choice(layer, None, False, f"rounding to nearest, {reason}", 1.0)
    aim_NK, aimed = _aim(w_NK, seen, judge)
    for asked, factor in zip(DAMPINGS, seen.trials, strict=True):
        if factor is None:
            continue
        fed = gptq.feed_back(aim_NK - apart_NK, rounded, factor)
        ratio = judge.error(fed.dequantize() + apart_NK) / rounding if rounding else 1.0
        if ratio < best.ratio:
            raised = factor.damping != asked
            reason = f"gptq, damping {factor.damping:g}{' (raised)' if raised else ''}"
            best = Choice(layer, factor.damping, raised, reason, ratio)
    final = None if best.damping is None else seen.final(best.damping)
    if final is None:
        return rounded, best
    return gptq.feed_back(_refitted(w_NK, seen, aimed) - apart_NK, rounded, final), best


def _aim(w_NK: Tensor, seen: _Inputs, judge: _Judge) -> tuple[Tensor, float | None]:
    """`w`, corrected for what was rounded before it as far as that helps on held-out rows, and the damping of that."""
    best_NK, damping, least, moved_NK = w_NK, None, judge.error(w_NK), w_NK @ seen.fit.drift_KK
    for factor in filter(None, seen.trials):
        tried_NK = gptq.corrected(w_NK, moved_NK, factor)
        error = judge.error(tried_NK)
        if error < least:
            best_NK, damping, least = tried_NK, factor.damping, error
    return best_NK, damping


def _refitted(w_NK: Tensor, seen: _Inputs, damping: float | None) -> Tensor:
    """`_aim` on all rows, at the damping that it chose."""
    factor = None if damping is None else seen.final(damping)
    return w_NK if factor is None else gptq.corrected(w_NK, w_NK @ seen.whole.drift_KK, factor)


def notes(choices: Sequence[Choice], rows: int) -> list[str]:
    """Sentences for the report: how many layers gained, by how much, and which were exceptions."""
    taken = [choice for choice in choices if choice.damping is not None]
    judged = len(range(rows)[HELD_OUT])
    fitted = f"chosen on {judged} of {rows} texts that the others were fitted to, then fitted to all"
    lines = [f"GPTQ: {len(taken)} of {len(choices)} layers, {fitted}."]
    if taken:
        ratio = median(choice.ratio for choice in taken)
        used = sorted(Counter(choice.damping for choice in taken if choice.damping is not None).items())
        dampings = ", ".join(f"{damping:g} in {count}" for damping, count in used)
        lines.append(f"GPTQ: held-out output error {ratio:.2f} of rounding's (median); damping {dampings} layers.")
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
