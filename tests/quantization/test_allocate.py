"""From scores and a budget to a plan."""

from pathlib import Path

import pytest

from qspec.errors import RecipeError
from qspec.quantization.allocate import allocate_plan, assumed_plan, best_uniform, solve
from qspec.quantization.units import candidate_schemes, n_weights, open_units, unit_bytes
from qspec.records import ArchMap
from qspec.schema.quantization import MixedSpec, QuantSpec, RuleSpec
from qspec.schema.scores import Basis, Scores, UnitScore
from qspec.schemes.build import build_plan, resolve_plan
from qspec.schemes.footprint import footprint
from tests.observed import load
from tests.tiny import tiny_model

HARD = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> ArchMap:
    return load(tiny_model("llama", tmp_path_factory.mktemp("source"))).arch


def mixed(bits: float | None = 6, **fields: object) -> QuantSpec:
    mix = MixedSpec.model_validate({"bits": bits} | fields.pop("mixed", {}))  # type: ignore[operator]
    return QuantSpec.model_validate({"group_size": 32, "mixed": mix} | fields)


def scored(spec: QuantSpec, arch: ArchMap, hard: str = HARD) -> Scores:
    """Every unit loses as much as it has weights, times 1, 0.01, 0; `hard` a thousand times more."""
    assert spec.mixed is not None
    schemes = candidate_schemes(spec)
    units = []
    for layers in open_units(build_plan(spec), arch):
        weights = sum(n_weights(layer, arch) for layer in layers)
        factor = weights * (1000 if hard in layers else 1)
        size = tuple(unit_bytes(layers, scheme, arch, 2) for scheme in schemes.values())
        errors = tuple({"W4A16": 1.0, "W8A8": 0.01, "none": 0.0}[name] * factor for name in schemes)
        units.append(UnitScore(layers=layers, weights=weights, bytes=size, errors=errors))
    basis = Basis(
        model="",
        metric="output",
        candidates=spec.mixed.candidates,
        group_size=32,
        width=2,
        settings="",
        text="",
        rows=1,
        tokens=1,
        seed=0,
    )
    return Scores(basis=basis, units=tuple(units))


@pytest.mark.parametrize("bits", [5.2, 6, 7, 8.5, 12])
def test_plan_keeps_the_budget_with_scales(arch: ArchMap, bits: float) -> None:
    """Would catch a budget that forgets scales, or counts the ignored head; and schemes that split q/k/v."""
    spec = mixed(bits)
    plan, notes = allocate_plan(scored(spec, arch), spec, build_plan(spec), arch)
    schemes = resolve_plan(plan, arch)
    groups = footprint(arch, {name: s for name, s in schemes.items() if name != "lm_head"} | {"lm_head": None}, None, 2)
    body = sum(n_weights(layer, arch) for layer in arch.linears() if layer != "lm_head")
    head = 2 * n_weights("lm_head", arch)
    size = sum(group.bytes for group in groups.groups.values()) - head
    assert bits - 1 < 8 * size / body <= bits  # the largest unit is a fourth of all weights, a step of 4 bits
    assert schemes["lm_head"] is None
    assert f"{bits:g} bits a weight allowed, {8 * size / body:.3f} bits" in notes[0]
    assert len(plan.rules) <= 1 + 7 * 2  # patterns, not names


def test_what_is_sensitive_is_spared(arch: ArchMap) -> None:
    """Would catch errors and layers that are paired wrongly; the plan beats the best single scheme of its size."""
    spec = mixed(6)
    scores = scored(spec, arch)
    plan, notes = allocate_plan(scores, spec, build_plan(spec), arch)
    assert plan.resolve(arch.linears())[HARD] != candidate_schemes(spec)["W4A16"]
    solution = solve(scores, spec, build_plan(spec), arch)
    uniform = best_uniform(solution, solution.bytes)
    assert uniform is not None
    assert solution.error < uniform.error / 10
    assert "W4A16 g32 throughout" in notes[1]


def test_rules_of_the_recipe_win_and_count(arch: ArchMap) -> None:
    """Would catch a solver that overrides a rule, or a ruled layer whose bytes come on top of the budget."""
    spec = mixed(6, rules=(RuleSpec(match="o_proj", scheme="W8A8"), RuleSpec(match=HARD, scheme="none")))
    scores = scored(spec, arch)
    plan, _ = allocate_plan(scores, spec, build_plan(spec), arch)
    schemes = resolve_plan(plan, arch)
    assert schemes[HARD] is None
    assert schemes["model.layers.1.self_attn.o_proj"] == candidate_schemes(spec)["W8A8"]
    counted = {layer: s for layer, s in schemes.items() if layer not in (HARD, "lm_head")}
    size = sum(unit_bytes((layer,), s, arch, 2) for layer, s in counted.items())
    assert 8 * size <= 6 * sum(n_weights(layer, arch) for layer in counted)
    with pytest.raises(RecipeError, match="measure them again"):
        allocate_plan(scores, mixed(6), build_plan(mixed(6)), arch)


def test_budgets_out_of_reach_name_the_range(arch: ArchMap) -> None:
    """Would catch a budget that is cut to what exists without a word."""
    for bits, given in ((4.5, "mixed.bits 4.5"), (17, "mixed.bits 17")):
        with pytest.raises(RecipeError, match=f"{given}.*reach 5.000 to 16.000"):
            assumed_plan(mixed(bits), build_plan(mixed(bits)), arch, 2)
    in_megabytes = mixed(None, mixed={"megabytes": 0.001})
    with pytest.raises(RecipeError, match=r"mixed.megabytes 0.001.*reach 0\.046 to 0\.147"):
        assumed_plan(in_megabytes, build_plan(in_megabytes), arch, 2)
    too_wide = mixed(6, group_size=48)
    with pytest.raises(RecipeError, match="groups of 48"):
        assumed_plan(too_wide, build_plan(too_wide), arch, 2)


def test_assumed_plan_has_the_size_that_was_asked_for(arch: ArchMap) -> None:
    """Would catch an estimate of memory that ignores the budget."""
    schemes = resolve_plan(assumed_plan(mixed(6), build_plan(mixed(6)), arch, 2), arch)
    found = footprint(arch, schemes, None, 2)
    body = [group for label, group in found.groups.items() if label != "none"]
    assert 5 < 8 * sum(g.bytes for g in body) / sum(g.parameters for g in body) <= 6


def test_only_these_mixes_are_recipes() -> None:
    """Would catch two budgets, none, a candidate twice, and mixed precision that llmcompressor would ignore."""
    for fields, part in (
        ({"mixed": {}}, "neither bits nor megabytes"),
        ({"mixed": {"bits": 6, "megabytes": 1}}, "both bits and megabytes"),
        ({"mixed": {"bits": 6, "candidates": ["W8A8", "W8A8"]}}, "name each once"),
        ({"mixed": {"bits": 6, "candidates": ["W8A8"]}}, "at least 2"),
        ({"mixed": {"bits": 6}, "engine": "llmcompressor"}, "mixed belongs to engine qspec"),
    ):
        with pytest.raises(ValueError, match=part):
            QuantSpec.model_validate(fields)


def test_plan_shows_what_will_be_solved(tmp_path: Path) -> None:
    """Would catch a preview that shows the default scheme for all layers, or a refusal that comes after compute."""
    from qspec.planning.preview import preview
    from qspec.planning.preview_text import render
    from tests.jobs import NGRAM_DRAFT, job

    folder = tiny_model("llama", tmp_path / "model")
    target = {"model": str(folder), "quantization": {"group_size": 32, "mixed": {"bits": 6}}}
    view = preview(job(tmp_path, folder, NGRAM_DRAFT, target=target))
    text = render(view)
    assert "solved at run time for 6 bits among W4A16 g32, W8A8, none" in text
    assert "mixed precision" in view["target"]["calibrated_for"]
    target["quantization"] = {"group_size": 32, "mixed": {"bits": 4}}
    with pytest.raises(RecipeError, match=r"reach 5\.000"):
        preview(job(tmp_path, folder, NGRAM_DRAFT, target=target))
    target["quantization"] = {"mixed": {"bits": 8.2, "candidates": ["FP8", "W8A8"]}}
    exports = preview(job(tmp_path, folder, NGRAM_DRAFT, target=target))["exports"]
    assert next(e for e in exports if (e["runtime"], e["part"]) == ("vllm", "target"))["served"] is False
