"""`qspec sensitivity`: scores of a model, and the plans that they give for several budgets."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
import math
from pathlib import Path
from typing import Any

from qspec.bridges.text import calibration_rows
from qspec.errors import RecipeError
from qspec.inspection.model import fitting_group
from qspec.models.load import load, read_header, resolve_arch, stored_width
from qspec.progress import Progress
from qspec.provenance import atomic_write
from qspec.quantization.allocate import Solution, assumed_plan, best_uniform, solve
from qspec.quantization.rotate import prepare, prepared_arch
from qspec.quantization.sensitivity import basis, sensitivity
from qspec.quantization.units import candidate_schemes, labels
from qspec.readable import number, size
from qspec.records import ArchMap
from qspec.report.document import Block, Document, Heading, Table
from qspec.schema.overrides import set_value
from qspec.schema.problems import validate
from qspec.schema.quantization import MixedSpec, QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schema.scores import Basis, Scores, UnitScore
from qspec.scheme_table import GROUP
from qspec.schemes.build import build_plan

RECIPES = (".yaml", ".yml")
BITS = (5.0, 6.0)
"""Budgets that are solved for a model without a recipe."""


@dataclass(frozen=True)
class SensitivityView:
    """Scores of one model; `labels` name the candidates, `solutions` are the plans by budget."""

    model: str
    labels: tuple[str, ...]
    scores: Scores
    budgets: tuple[MixedSpec, ...]
    solutions: tuple[Solution, ...]


def look(
    reference: str,
    bits: Sequence[float] = (),
    overrides: Sequence[str] = (),
    out: Path | None = None,
    progress: Progress | None = None,
) -> SensitivityView:
    """Measure the target of a recipe (`*.yaml`), or a model as a recipe names it, once, and solve for every budget.

    `out`: scores are written there, or read from there if they are of the same model, settings and text. Raises
    `QspecError`.
    """
    progress, recipe = progress or Progress(), _recipe(reference, bits, overrides)
    spec = recipe.target.quantization
    budgets = _budgets(spec, bits)
    header = read_header(recipe.target)
    planned, width = prepared_arch(header.arch, spec), header.width(recipe.dtype)
    for budget in budgets:
        assumed_plan(_with(spec, budget), build_plan(spec), planned, width)
    model = load(recipe.target)
    rows = calibration_rows(recipe.calibration, model.tokenizer, recipe.seed)
    model, _ = prepare(model, spec, recipe.seed)
    measured = model, rows, _with(spec, budgets[0]), stored_width(recipe.dtype, model.config), recipe.seed
    scores = known(out, basis(*measured)) or sensitivity(*measured, progress)
    if out is not None:
        atomic_write(out, scores.model_dump_json(indent=1))
    progress.close()
    solutions = tuple(solve(scores, _with(spec, budget), build_plan(spec), model.arch) for budget in budgets)
    names = labels(candidate_schemes(_with(spec, budgets[0])))
    return SensitivityView(recipe.target.model, names, scores, budgets, solutions)


def known(path: Path | None, basis: Basis) -> Scores | None:
    """The scores that a file holds, if they are of this basis."""
    with suppress(OSError, ValueError):  # there is none, or it is damaged
        known = None if path is None else Scores.model_validate_json(path.read_bytes())
        return known if known is not None and known.basis == basis else None
    return None


def as_data(view: SensitivityView) -> dict[str, Any]:
    """The view as JSON holds it."""
    return {
        "kind": "sensitivity",
        "model": view.model,
        "labels": list(view.labels),
        "scores": view.scores.model_dump(mode="json"),
        "plans": [
            {
                "budget": budget.model_dump(mode="json", include={"bits", "megabytes"}),
                "bits": solution.bits,
                "bytes": solution.bytes,
                "error": solution.error,
                "layers": dict(zip(view.labels, solution.members(), strict=True)),
            }
            for budget, solution in zip(view.budgets, view.solutions, strict=True)
        ],
    }


def document(view: SensitivityView) -> Document:
    """A line per budget, then a line per unit of layers."""
    basis = view.scores.basis
    subtitle = f"metric {basis.metric}, measured on {basis.tokens:,} tokens ({basis.rows} texts)"
    blocks: list[Block] = [Heading("Plans"), _plans(view), Heading("Sensitivity"), _units(view)]
    return Document(view.model, subtitle, tuple(blocks))


def _plans(view: SensitivityView) -> Table:
    rows = [_plan(view, *pair) for pair in zip(view.budgets, view.solutions, strict=True)]
    caption = "Layers of each scheme within a budget, bits of a weight with scales, and the summed error"
    names = tuple(f"layers\n{label}" for label in view.labels)
    columns = ("budget", "bits", "size", *names, "error", "best one scheme\nthat fits", "\nits error")
    return Table(caption, columns, tuple(rows))


def _plan(view: SensitivityView, budget: MixedSpec, solution: Solution) -> tuple[str, ...]:
    uniform = best_uniform(solution, solution.sizes.budget(budget))
    name = "–" if uniform is None else "none" if not uniform.chosen else view.labels[uniform.chosen[0]]
    return (
        f"{budget.bits:g} bits" if budget.bits is not None else f"{budget.megabytes:g} MB",
        f"{solution.bits:.3f}",
        size(solution.bytes),
        *(str(len(layers)) for layers in solution.members()),
        number(solution.error),
        name,
        "–" if uniform is None else number(uniform.error),
    )


def _units(view: SensitivityView) -> Table:
    """Errors by candidate, and the candidate's initial of every plan."""
    caption = "Error of each candidate where only these layers have it, and what they get within each budget"
    budgets = tuple(f"at\n{b.bits:g} bits" if b.bits is not None else f"at\n{b.megabytes:g} MB" for b in view.budgets)
    rows = tuple(
        (
            unit_name(unit),
            f"{unit.weights:,}",
            *map(number, unit.errors),
            *(view.labels[solution.chosen[i]] for solution in view.solutions),
        )
        for i, unit in enumerate(view.scores.units)
    )
    return Table(caption, ("", "weights", *(f"error\n{label}" for label in view.labels), *budgets), rows)


def unit_name(unit: UnitScore) -> str:
    """`0.self_attn.{q,k,v}_proj`; many layers by the first and their number."""
    names = [name.removeprefix("model.layers.") for name in unit.layers]
    block, parts = names[0].rpartition(".")[0], [name.rpartition(".")[2] for name in names]
    if len(names) == 1:
        return names[0]
    if len(names) > 3 or any(name.rpartition(".")[0] != block for name in names):
        return f"{block.partition('.experts.')[0]}, {len(names)} layers"
    return f"{block}.{{{','.join(part.removesuffix('_proj') for part in parts)}}}_proj"


def _recipe(reference: str, bits: Sequence[float], overrides: Sequence[str]) -> Recipe:
    """The recipe itself, or the least one that says what a model's name alone does not."""
    if reference.endswith(RECIPES):
        return Recipe.read(reference, tuple(overrides))
    quantization: dict[str, Any] = {"mixed": {"bits": (*bits, *BITS)[0]}}
    data: dict[str, Any] = {
        "name": "sensitivity",
        "target": {"model": reference, "quantization": quantization},
        "draft": {"kind": "ngram"},
        "calibration": {"samples": 16, "length": 256},
    }
    for override in overrides:
        set_value(data, override)
    recipe = validate(Recipe, data, "sensitivity")
    if "group_size" not in quantization:
        quantization["group_size"] = _group(resolve_arch(recipe.target))
    return validate(Recipe, data, "sensitivity")


def _group(arch: ArchMap) -> int:
    """Largest usual group size that divides the inputs of every layer; else the default, whose refusal says more."""
    common = math.gcd(*(arch.linear_shape(layer)[1] for layer in arch.linears()))
    return fitting_group(common) or GROUP


def _budgets(spec: QuantSpec, bits: Sequence[float]) -> tuple[MixedSpec, ...]:
    """Those that were asked for, else the recipe's own; `BITS` where it has none."""
    own = spec.mixed or MixedSpec(bits=BITS[0])
    if not bits and spec.mixed is not None:
        return (spec.mixed,)
    for value in bits:
        if not 0 < value <= 32:
            raise RecipeError(
                f"--bits {value:g}", "a weight takes more than 0 and at most 32 bits", "give for example 6"
            )
    return tuple(own.model_copy(update={"bits": value, "megabytes": None}) for value in bits or BITS)


def _with(spec: QuantSpec, mixed: MixedSpec) -> QuantSpec:
    return spec.model_copy(update={"mixed": mixed})
