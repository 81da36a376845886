"""From sensitivity scores and a budget to a plan with a scheme for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from qspec.bridges.quant_config import in_few_rules
from qspec.errors import RecipeError
from qspec.numerics.quantization.allocate import allocate
from qspec.plan import LayerScheme, QuantPlan
from qspec.quantization.units import Sizes, candidate_plans, candidate_schemes, n_weights, open_units, sizes
from qspec.readable import number, size
from qspec.records import ArchMap
from qspec.schema.quantization import MixedSpec, QuantSpec
from qspec.schema.scores import Scores
from qspec.schemes.build import resolve_plan, scheme_label


@dataclass(frozen=True)
class Solution:
    """A candidate for every unit, by index; `sizes` and `scores` are what it was chosen from."""

    scores: Scores
    sizes: Sizes
    chosen: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.sizes.fixed + sum(unit[c] for unit, c in zip(self.sizes.units, self.chosen, strict=True))

    @property
    def bits(self) -> float:
        return self.sizes.bits(self.bytes)

    @property
    def error(self) -> float:
        """Sum of the units' errors."""
        return sum(unit.errors[c] for unit, c in zip(self.scores.units, self.chosen, strict=True))

    def members(self) -> list[list[str]]:
        """Layers by candidate, in forward order."""
        units = [unit.layers for unit in self.scores.units]
        return _members(units, self.chosen, len(self.scores.basis.candidates))


def allocate_plan(scores: Scores, spec: QuantSpec, plan: QuantPlan, arch: ArchMap) -> tuple[QuantPlan, list[str]]:
    """`plan` with rules for all that it leaves open, solved for the budget of `spec.mixed`, and notes for the report.

    Rules of the recipe come first. Raises `RecipeError` for a budget out of reach, or scores of other layers.
    """
    assert spec.mixed is not None
    candidates = candidate_schemes(spec)
    solution = solve(scores, spec, plan, arch)
    solved = _rules(dict(zip(candidates.values(), solution.members(), strict=True)), plan, arch)
    resolve_plan(solved, arch)
    return solved, _notes(solution, spec.mixed, list(candidates.values()))


def solve(scores: Scores, spec: QuantSpec, plan: QuantPlan, arch: ArchMap) -> Solution:
    """The candidates of least summed error within the budget of `spec.mixed`."""
    assert spec.mixed is not None
    units = open_units(plan, arch)
    if [unit.layers for unit in scores.units] != units or scores.basis.candidates != spec.mixed.candidates:
        rule = "are of other layers or candidates than the recipe leaves open"
        raise RecipeError("sensitivity scores", rule, "measure them again")
    table = sizes(units, candidate_schemes(spec), plan, arch, scores.basis.width)
    budget = table.budget(spec.mixed)
    errors = [unit.errors for unit in scores.units]
    return Solution(scores, table, tuple(allocate(table.units, errors, budget - table.fixed)))


def best_uniform(solution: Solution, most: int) -> Solution | None:
    """The one candidate of least error that, given to every unit, takes at most `most` bytes."""
    every = range(len(solution.scores.basis.candidates))
    uniform = [Solution(solution.scores, solution.sizes, (c,) * len(solution.chosen)) for c in every]
    return min((one for one in uniform if one.bytes <= most), key=lambda one: (one.error, one.bytes), default=None)


def assumed_plan(spec: QuantSpec, plan: QuantPlan, arch: ArchMap, width: int) -> QuantPlan:
    """A plan for the budget before anything is measured, as if every weight were equally sensitive.

    Raises `RecipeError` for a candidate that the model cannot have, or a budget out of reach. `width`: bytes of a value
    that is not quantized, as stored.
    """
    assert spec.mixed is not None
    for uniform in candidate_plans(spec).values():
        resolve_plan(uniform, arch)
    units, candidates = open_units(plan, arch), candidate_schemes(spec)
    table = sizes(units, candidates, plan, arch, width)
    budget = table.budget(spec.mixed)
    noise = [0.0 if scheme is None else 4.0**-scheme.weight.fmt.bits for scheme in candidates.values()]
    errors = [[sum(n_weights(layer, arch) for layer in unit) * each for each in noise] for unit in units]
    chosen = allocate(table.units, errors, budget - table.fixed)
    return _rules(dict(zip(candidates.values(), _members(units, chosen, len(noise)), strict=True)), plan, arch)


def _members(units: Sequence[tuple[str, ...]], chosen: Sequence[int], candidates: int) -> list[list[str]]:
    members: list[list[str]] = [[] for _ in range(candidates)]
    for unit, c in zip(units, chosen, strict=True):
        members[c].extend(unit)
    return members


def _rules(members: dict[LayerScheme | None, list[str]], plan: QuantPlan, arch: ArchMap) -> QuantPlan:
    """The recipe's own rules first, then what was solved in few."""
    default, rules = in_few_rules(members, arch.linears())
    return QuantPlan(default, (*plan.rules, *rules), plan.kv)


def _notes(solution: Solution, spec: MixedSpec, candidates: Sequence[LayerScheme | None]) -> list[str]:
    labels = [scheme_label(scheme) for scheme in candidates]
    budget = f"{spec.bits:g} bits a weight" if spec.bits is not None else f"{spec.megabytes:g} MB"
    counts = ", ".join(f"{label} in {len(layers)}" for label, layers in zip(labels, solution.members(), strict=True))
    notes = [
        f"Mixed precision: {budget} allowed, {solution.bits:.3f} bits a weight taken ({size(solution.bytes)}, scales "
        f"included); layers: {counts}.",
    ]
    sentence = f"Mixed precision: expected error {number(solution.error)} (metric {spec.metric}, summed)"
    uniform = best_uniform(solution, solution.sizes.budget(spec))
    if uniform is None:
        return [*notes, f"{sentence}; no single scheme fits the budget."]
    label, bits = labels[uniform.chosen[0]] if uniform.chosen else "none", uniform.bits
    return [*notes, f"{sentence}; {label} throughout, the best that fits, {number(uniform.error)} at {bits:.3f} bits."]
