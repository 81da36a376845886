"""Choices that only data can make, as rules by layer name: stored or run-time scales of inputs, E4M3 or E5M2.

q/k/v, and gate/up, are one decision, and so are all experts of a layer: servers run each of them as one kernel. A
decision tries its variants on inputs that calibration kept, and takes the one of least squared error of the outputs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
import logging
from statistics import median
from typing import Any

from torch import Tensor

from qspec.bridges.quant_config import canonical_plan
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    to_blocks,
)
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.codes import symmetric_scale
from qspec.numerics.quantization.distribution import below_share, kurtosis, peak_ratio
from qspec.numerics.quantization.formats import FORMATS, FP8_E4M3, FP8_E5M2, NumFormat
from qspec.ops import reference
from qspec.plan import LayerScheme, QuantPlan, Rule, TensorScheme
from qspec.quantization.rtn import finite_weight, quantize_unit, static_input_scale
from qspec.records import ArchMap, LayerStats, LoadedModel, QLinear, fused_with
from qspec.schema.quantization import QuantSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import scheme_label

MARGIN = 1.05
"""Output error over the least at which E4M3, then a stored scale, is still taken.

Errors over a few dozen rows scatter by some percent. E4M3 is what other runtimes read; a stored scale spares a pass
over the input, which decoding pays for in every layer.
"""

_FORMATS = (FP8_E4M3, FP8_E5M2)
_GRANULARITIES = {kind.__name__: kind for kind in (PerTensor, PerChannel, PerToken, PerGroup, PerBlock)}

log = logging.getLogger("qspec")

Unit = tuple[str, ...]
"""Layers that read one input and share what is per tensor."""


@dataclass(frozen=True)
class FormatProfile:
    """Why a float format suits a tensor: kurtosis, largest magnitude over RMS, share that E4M3 may lose.

    below: of the values other than 0, what is under E4M3's smallest subnormal at the scale that it would have.
    """

    kurtosis: float
    peak: float
    below: float

    def __str__(self) -> str:
        return f"kurtosis {self.kurtosis:.3g}, peak/rms {self.peak:.3g}, below E4M3 {self.below:.2%}"


@dataclass(frozen=True)
class Decision:
    """The variant that layers got, and its error on held-out rows over that of the default variant.

    ratio None: calibration did not see them, so they keep their scheme. Profiles: adaptive formats only.
    """

    layers: tuple[str, ...]
    scheme: LayerScheme
    ratio: float | None
    weight: FormatProfile | None = None
    input: FormatProfile | None = None

    def record(self) -> dict[str, Any]:
        """JSON values; `read` gives back an equal decision."""
        return asdict(self) | {"layers": list(self.layers), "scheme": encode_scheme(self.scheme)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Decision":
        """Inverse of `record`."""
        profiles = {key: record[key] and FormatProfile(**record[key]) for key in ("weight", "input")}
        return cls(tuple(record["layers"]), decode_scheme(record["scheme"]), record["ratio"], **profiles)


def encode_scheme(scheme: LayerScheme) -> dict[str, Any]:
    """A scheme as JSON values, complete by itself; `decode_scheme` gives back an equal one."""
    activation = None if scheme.activation is None else _encode(scheme.activation)
    return {
        "name": scheme.name,
        "weight": _encode(scheme.weight),
        "activation": activation,
        "outliers": scheme.outliers,
    }


def decode_scheme(body: Mapping[str, Any]) -> LayerScheme:
    """Inverse of `encode_scheme`."""
    activation = None if body["activation"] is None else _decode(body["activation"])
    return LayerScheme(body["name"], _decode(body["weight"]), activation, body["outliers"])


def _encode(tensor: TensorScheme) -> dict[str, Any]:
    granularity = {"kind": type(tensor.granularity).__name__, **asdict(tensor.granularity)}
    return {
        "format": tensor.fmt.name,
        "granularity": granularity,
        "symmetric": tensor.symmetric,
        "dynamic": tensor.dynamic,
        "clip": asdict(tensor.clip),
    }


def _decode(body: Mapping[str, Any]) -> TensorScheme:
    sizes = dict(body["granularity"])
    granularity: Granularity = _GRANULARITIES[sizes.pop("kind")](**sizes)
    clip = Clip(**body["clip"])
    return TensorScheme(FORMATS[body["format"]], granularity, body["symmetric"], body["dynamic"], clip)


def choose(model: LoadedModel, stats: LayerStats, plan: QuantPlan, spec: QuantSpec) -> tuple[QuantPlan, list[str]]:
    """`plan` with every choice made, by layer name, and notes for the report. `model` may be a piece."""
    decisions = decide(model, stats, plan, spec)
    return decided(plan, model.arch, decisions), choice_notes(decisions, spec)


def decide(model: LoadedModel, stats: LayerStats, plan: QuantPlan, spec: QuantSpec) -> list[Decision]:
    """Every decision that `spec` leaves to data, in forward order; each is logged."""
    resolved = plan.resolve(model.arch.linears())
    decisions = []
    for units in _decisions(model.arch, resolved):
        scheme = resolved[units[0][0]]
        variants = [] if scheme is None else _variants(scheme, spec)
        if scheme is not None and len(variants) > 1:
            decisions.append(_decide(model, stats, units, scheme, variants, spec))
    return decisions


def decided(plan: QuantPlan, arch: ArchMap, decisions: Sequence[Decision]) -> QuantPlan:
    """`plan` with `decisions` in it: a rule by full name for every layer that does not have the default scheme."""
    if not decisions:
        return plan
    schemes = plan.resolve(arch.linears())
    schemes |= {layer: decision.scheme for decision in decisions for layer in decision.layers}
    return replace(plan, rules=tuple(Rule(layer, s) for layer, s in schemes.items() if s != plan.default))


def compact(plan: QuantPlan, arch: ArchMap) -> QuantPlan:
    """The same schemes in few rules; for a whole model, since a pattern may stand for all of its layers."""
    return canonical_plan(plan.resolve(arch.linears()), plan.kv)


def choice_notes(decisions: Sequence[Decision], spec: QuantSpec) -> list[str]:
    """Sentences for the report."""
    if not decisions:
        return []
    unseen = [layer for decision in decisions if decision.ratio is None for layer in decision.layers]
    return [
        *(_scale_notes(decisions) if spec.activation_scales == "auto" else ()),
        *(_format_notes(decisions) if spec.fp8_format == "adaptive" else ()),
        *([f"Choices: {len(unseen)} layers were not seen in calibration and keep their scheme."] if unseen else ()),
    ]


def _decisions(arch: ArchMap, schemes: Mapping[str, LayerScheme | None]) -> list[list[Unit]]:
    """Units that must get one scheme."""
    units = dict.fromkeys(tuple(m for m in fused_with(layer) or (layer,) if m in schemes) for layer in arch.linears())
    together: dict[str, list[Unit]] = {}
    for unit in units:
        experts, inside, _ = unit[0].partition(".experts.")
        # Rules may tell experts' up and down projections apart; their schemes then stay apart too.
        key = f"{experts} {schemes[unit[0]]}" if inside else unit[0]
        together.setdefault(key, []).append(unit)
    return list(together.values())


def _variants(scheme: LayerScheme, spec: QuantSpec) -> list[LayerScheme]:
    """Schemes that `spec` allows for a layer, the preferred ones first."""
    clip = Clip(spec.clip.method, spec.clip.percentile)
    kinds = [scheme]
    if spec.activation_scales == "auto" and (twins := SCHEMES[scheme.name].twins) is not None:
        kinds = [scheme if name == scheme.name else _twin(name, scheme, clip) for name in twins]
    if spec.fp8_format != "adaptive" or not scheme.weight.fmt.is_float:
        return kinds
    return [_in_formats(kind, *formats) for formats in product(_FORMATS, repeat=2) for kind in kinds]


def _twin(name: str, scheme: LayerScheme, clip: Clip) -> LayerScheme:
    twin = SCHEMES[name].layer(clip=clip)
    assert twin is not None
    return replace(twin, outliers=scheme.outliers)


def _in_formats(scheme: LayerScheme, weight: NumFormat, activation: NumFormat) -> LayerScheme:
    inputs = scheme.activation and replace(scheme.activation, fmt=activation)
    return replace(scheme, weight=replace(scheme.weight, fmt=weight), activation=inputs)


def _decide(
    model: LoadedModel,
    stats: LayerStats,
    units: Sequence[Unit],
    scheme: LayerScheme,
    variants: Sequence[LayerScheme],
    spec: QuantSpec,
) -> Decision:
    """The first variant whose error is within `MARGIN` of the least."""
    layers = tuple(layer for unit in units for layer in unit)
    seen = [unit for unit in units if unit[0] in stats.inputs_TK and bool(stats.inputs_TK[unit[0]].any())]
    if not seen:
        log.info("%s: not seen in calibration, keeps %s", _named(layers), scheme_label(scheme))
        return Decision(layers, scheme, None)
    errors = [sum(column) for column in zip(*(_errors(model, unit, variants, stats) for unit in seen), strict=True)]
    least = min(errors)
    best = next(i for i, error in enumerate(errors) if error <= MARGIN * least)
    usual = errors[variants.index(scheme)]
    decision = Decision(layers, variants[best], errors[best] / usual if usual else 1.0)
    if spec.fp8_format == "adaptive" and scheme.weight.fmt.is_float:
        weight, inputs = _profiles(model, seen[0], variants[0], stats)
        decision = replace(decision, weight=weight, input=inputs)
    _log(decision)
    return decision


def _errors(model: LoadedModel, unit: Unit, variants: Sequence[LayerScheme], stats: LayerStats) -> list[float]:
    """Squared error of the unit's outputs under each variant, on rows that no clip of an input has seen."""
    x_TK = stats.inputs_TK[unit[0]].float()
    held_out = _held_out(len(x_TK))
    fitted = [row for row in range(len(x_TK)) if row not in set(held_out)] or held_out
    fit = replace(stats, inputs_TK=dict.fromkeys(unit, x_TK[fitted]))
    x_TK, known = x_TK[held_out], dict[tuple[TensorScheme, float], dict[str, QLinear]]()
    errors = []
    for variant in variants:
        weights = (variant.weight, variant.outliers)
        known[weights] = known.get(weights) or quantize_unit(model, unit, variant, fit, [])
        scale = static_input_scale(unit, variant.activation, fit, [])
        linears = {
            layer: replace(linear, activation=variant.activation, input_scale=scale)
            for layer, linear in known[weights].items()
        }
        errors.append(sum(_error(x_TK, finite_weight(model, layer), linear) for layer, linear in linears.items()))
    return errors


def _error(x_TK: Tensor, w_NK: Tensor, linear: QLinear) -> float:
    """Squared error of one layer's outputs, summed."""
    got_TN = reference.linear(x_TK, linear.weight, linear.activation, linear.input_scale)
    return float((got_TN - x_TK @ linear.rounded_part(w_NK).T).double().square().sum())


def _held_out(rows: int) -> list[int]:
    """A quarter of the rows, spread without a period: calibration keeps the same few positions of every text."""
    return [row for row in range(rows) if row * 0.6180339887 % 1 < 0.25]


def _profiles(
    model: LoadedModel, unit: Unit, scheme: LayerScheme, stats: LayerStats
) -> tuple[FormatProfile, FormatProfile | None]:
    """Profiles of the unit's weight that E4M3 serves worst, and of its input; `scheme` has E4M3 in both."""
    linears = quantize_unit(model, unit, scheme, stats, [])
    weights = [_weight_profile(finite_weight(model, layer), linear.weight) for layer, linear in linears.items()]
    worst = max(weights, key=lambda profile: (profile.below, profile.peak))
    if scheme.activation is None:
        return worst, None
    x_TK, stored = stats.inputs_TK[unit[0]].float(), linears[unit[0]].input_scale
    blocks = to_blocks(x_TK, scheme.activation.granularity)
    scale = symmetric_scale(blocks.abs().amax(1, keepdim=True), FP8_E4M3) if stored is None else stored.reshape(1, 1)
    return worst, FormatProfile(kurtosis(x_TK), peak_ratio(x_TK), below_share(blocks, scale, FP8_E4M3))


def _weight_profile(w_NK: Tensor, weight: QTensor) -> FormatProfile:
    blocks, scale = to_blocks(w_NK, weight.granularity), weight.scale.reshape(-1, 1)
    return FormatProfile(kurtosis(w_NK), peak_ratio(w_NK), below_share(blocks, scale, FP8_E4M3))


def _log(decision: Decision) -> None:
    inputs = decision.scheme.activation
    what = f"{decision.scheme.name}, weights {decision.scheme.weight.fmt.name}"
    if inputs is not None:
        what += f", inputs {inputs.fmt.name} {'dynamic' if inputs.dynamic else 'static'}"
    profiles = {"weights": decision.weight, "inputs": decision.input}
    why = "".join(f"; {name}: {profile}" for name, profile in profiles.items() if profile is not None)
    log.info("%s: %s, held-out error %.3f of the recipe's%s", _named(decision.layers), what, decision.ratio, why)


def _scale_notes(decisions: Sequence[Decision]) -> Iterator[str]:
    twins = {name for row in SCHEMES.values() for name in row.twins or ()}
    kinds = [d for d in decisions if d.scheme.activation is not None and d.scheme.name in twins]
    if not kinds:
        return
    dynamic = [d for d in kinds if not d.scheme.static_input]
    yield (
        f"Activation scales: {len(kinds) - len(dynamic)} of {len(kinds)} decisions static, {len(dynamic)} per token; "
        f"static is taken up to {MARGIN - 1:.0%} more held-out output error."
    )
    if dynamic and len(dynamic) < len(kinds):
        parts = Counter(_part(d.layers[0]) for d in dynamic)
        yield f"Activation scales per token: {', '.join(f'{part} in {n}' for part, n in parts.items())}."


def _format_notes(decisions: Sequence[Decision]) -> Iterator[str]:
    known = [d for d in decisions if d.weight is not None]
    if not known:
        return
    weights = [(d.scheme.weight.fmt, d.weight) for d in known]
    inputs = [(d.scheme.activation.fmt, d.input) for d in known if d.scheme.activation is not None]
    for what, formats in (("weights", weights), ("inputs", inputs)):
        wide = [profile for fmt, profile in formats if fmt == FP8_E5M2 and profile is not None]
        rest = [profile for fmt, profile in formats if fmt == FP8_E4M3 and profile is not None]
        yield f"FP8 formats, {what}: E4M3 in {len(rest)} decisions{_middle(rest)}, E5M2 in {len(wide)}{_middle(wide)}."


def _middle(profiles: Sequence[FormatProfile]) -> str:
    """Medians in words."""
    if not profiles:
        return ""
    fields = zip(*((p.kurtosis, p.peak, p.below) for p in profiles), strict=True)
    return f" (medians: {FormatProfile(*map(median, fields))})"


def _named(layers: Sequence[str], most: int = 3) -> str:
    rest = len(layers) - most
    first, others = layers[0], [_part(layer) for layer in layers[1:most]]
    return ", ".join([first, *others]) + (f" and {rest} more" if rest > 0 else "")


def _part(layer: str) -> str:
    return layer.rpartition(".")[2]
