"""Decisions of mixed precision: units of layers that must share a scheme, their candidates, and the bytes of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math

from qspec.errors import RecipeError
from qspec.plan import LayerScheme, QuantPlan
from qspec.records import ArchMap
from qspec.schema.quantization import MixedSpec, QuantSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import build_plan, scheme_label
from qspec.schemes.footprint import weight_bytes

Schemes = Mapping[str, LayerScheme | None]


@dataclass(frozen=True)
class Sizes:
    """Weights and bytes that a budget is about: all linear layers but those that the recipe keeps in float.

    fixed: bytes of those that its rules quantize. units: bytes per unit and candidate.
    """

    weights: int
    fixed: int
    units: tuple[tuple[int, ...], ...]

    @property
    def least(self) -> int:
        return self.fixed + sum(map(min, self.units))

    @property
    def most(self) -> int:
        return self.fixed + sum(map(max, self.units))

    def bits(self, size: int) -> float:
        """Mean bits of a weight at `size` bytes in all, scales included."""
        return 8 * size / self.weights

    def budget(self, spec: MixedSpec) -> int:
        """Bytes that `spec` allows. Raises `RecipeError` where no plan reaches it, or every plan stays below it."""
        by_bits = spec.bits is not None
        allowed = spec.bits * self.weights / 8 if spec.bits is not None else (spec.megabytes or 0) * 1e6
        if not self.least <= math.floor(allowed) <= self.most:
            value = f"mixed.bits {spec.bits:g}" if spec.bits is not None else f"mixed.megabytes {spec.megabytes:g}"
            ends = [f"{self.bits(n):.3f}" if by_bits else f"{n / 1e6:.3f}" for n in (self.least, self.most)]
            rule = f"{' and '.join(spec.candidates)} reach {ends[0]} to {ends[1]}"
            raise RecipeError(value, rule, "give a budget in that range, or other candidates")
        return math.floor(allowed)


def candidate_plans(spec: QuantSpec) -> dict[str, QuantPlan]:
    """By candidate of `spec.mixed`: the recipe's plan with it as the scheme of all that the rules leave open."""
    assert spec.mixed is not None
    sizes = {name: None if SCHEMES[name].grouped else spec.group_size for name in spec.mixed.candidates}
    parts = {name: {"scheme": name, "group_size": size} for name, size in sizes.items()}
    return {name: build_plan(spec.model_copy(update={"mixed": None, **part})) for name, part in parts.items()}


def candidate_schemes(spec: QuantSpec) -> dict[str, LayerScheme | None]:
    """Scheme of every candidate of `spec.mixed`, by name, with all that the recipe says about schemes."""
    return {name: plan.default for name, plan in candidate_plans(spec).items()}


def open_units(plan: QuantPlan, arch: ArchMap) -> list[tuple[str, ...]]:
    """Layers that no rule of `plan` names, as units in forward order. Raises `RecipeError` if there are none.

    q/k/v and gate/up are one matmul when served. All experts of a layer are one unit: servers run them in one kernel.
    """
    owner = {layer: group for group in arch.fused_groups() for layer in group}
    units: dict[tuple[str, ...] | str, list[str]] = {}
    for layer in arch.linears():
        if not any(rule.matches(layer) for rule in plan.rules):
            experts, inside, _ = layer.partition(".experts.")
            units.setdefault(experts if inside else owner.get(layer, layer), []).append(layer)
    if not units:
        raise RecipeError("mixed", "rules and ignore name every linear layer", "leave some open, or leave mixed out")
    return [tuple(layers) for layers in units.values()]


def sizes(units: Sequence[Sequence[str]], candidates: Schemes, plan: QuantPlan, arch: ArchMap, width: int) -> Sizes:
    """Bytes of all that a budget counts; `width` bytes for a value that is not quantized."""
    free = {layer for unit in units for layer in unit}
    ruled = {layer: scheme for layer, scheme in plan.resolve(arch.linears()).items() if layer not in free and scheme}
    return Sizes(
        weights=sum(n_weights(layer, arch) for layer in (*free, *ruled)),
        fixed=sum(weight_bytes(arch.linear_shape(layer), scheme, width) for layer, scheme in ruled.items()),
        units=tuple(tuple(unit_bytes(unit, scheme, arch, width) for scheme in candidates.values()) for unit in units),
    )


def unit_bytes(unit: Sequence[str], scheme: LayerScheme | None, arch: ArchMap, width: int) -> int:
    return sum(weight_bytes(arch.linear_shape(layer), scheme, width) for layer in unit)


def n_weights(layer: str, arch: ArchMap) -> int:
    return math.prod(arch.linear_shape(layer))


def labels(candidates: Schemes) -> tuple[str, ...]:
    """Names for people, group sizes and clips included."""
    return tuple(scheme_label(scheme) for scheme in candidates.values())
