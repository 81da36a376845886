"""Fields of a recipe that are set and change nothing under its plan: a person meant something by them."""

from collections.abc import Iterator

from qspec.numerics.quantization.blocks import PerGroup, PerTensor
from qspec.plan import LayerScheme
from qspec.planning.planned import PlannedHalf, PlannedPair
from qspec.schema.quantization import RANDOM_ROWS, ClipSpec, KVPartSpec, KVSpec, QuantSpec
from qspec.schema.recipe import CalibrationSpec, DraftLengthSpec, Recipe
from qspec.scheme_table import SCHEMES, named, rows_that
from qspec.schemes.device_rules import PlanFinding

IdleField = tuple[str, str, str]
"""Field, why it has no effect, and what to do."""


def idle_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    """A warning per field that differs from its default and has no effect."""
    halves = {"target": pair.target, "draft": pair.draft}
    for name, half in halves.items():
        if half is not None:
            for field, rule, fix in (*_quantization(half), *_rewrites(half), *_kv(half.spec.kv)):
                yield PlanFinding("warning", f"{name}.quantization.{field}", rule, fix)
    for field, rule, fix in (*_calibration(pair), *_fusion(pair), *_rest(pair.recipe)):
        yield PlanFinding("warning", field, rule, fix)


def _quantization(half: PlannedHalf) -> Iterator[IdleField]:
    spec, schemes = half.spec, [scheme for scheme in half.possible.values() if scheme is not None]
    sized = named(rows_that(lambda row: row.sized))
    if spec.mixed is not None and spec.scheme != QuantSpec().scheme:
        yield f"scheme {spec.scheme}", "mixed solves every layer's scheme in its place", "name it in mixed.candidates"
    if spec.group_size is not None and not any(map(_in_groups, schemes)):
        yield f"group_size {spec.group_size}", "no layer has scales per group", f"omit it, or use {sized}"
    for own in spec.rules:
        if own.group_size is not None and not SCHEMES[own.scheme].sized:
            value = f"rules: group_size {own.group_size} of {own.match}"
            yield value, f"{own.scheme} has no scales per group", f"omit it, or use {sized}"
    if spec.clip.percentile != ClipSpec().percentile and spec.clip.method != "percentile":
        rule = f"clip.method is {spec.clip.method}"
        yield f"clip.percentile {spec.clip.percentile:g}", rule, "omit it, or use method: percentile"
    if spec.random_rows != RANDOM_ROWS and not half.reasons:
        yield f"random_rows {spec.random_rows}", "nothing in this half is measured on text", "omit it"
    if schemes:
        return
    given_fields = {f"method {spec.method}": spec.method != "rtn", "smoothing": spec.smoothing is not None}
    given_fields[f"clip.method {spec.clip.method}"] = spec.clip.method != "absmax"
    for field in (field for field, given in given_fields.items() if given):
        yield field, "no linear layer is quantized", "omit it, or give a scheme"


def _in_groups(scheme: LayerScheme | None) -> bool:
    return scheme is not None and isinstance(scheme.weight.granularity, PerGroup)


def _rewrites(half: PlannedHalf) -> Iterator[IdleField]:
    """`untie_head`, which is for heads that are tied and quantized."""
    spec = half.spec
    if not spec.untie_head:
        return
    if not half.original.tied:
        yield "untie_head", "the model's head is a matrix of its own already", "omit it"
    elif spec.rotation is not None and spec.rotation.r1:
        yield "untie_head", "rotation.r1 unties the head by itself", "omit it"
    elif half.possible["lm_head"] is None and spec.mixed is None:
        rule = "the head stays in float, and is only stored twice"
        yield "untie_head", rule, "omit it, or take lm_head out of ignore"


def _kv(kv: KVSpec | None) -> Iterator[IdleField]:
    if kv is None:
        return
    parts = [part or kv for part in (kv.key, kv.value)]
    if kv.key and kv.value and (kv.format, kv.granularity) != (KVSpec().format, KVSpec().granularity):
        yield "kv.format and granularity", "key and value both have their own", "omit them"
    if kv.scales == "cast" and all(part.granularity in ("token_head", "channel") for part in parts):
        yield "kv.scales cast", "all scales are made at run time, none is stored", "omit it, or use granularity: tensor"
    for name, part in (("key", kv.key), ("value", kv.value)):
        if (
            part is not None
            and part.granularity != "channel"
            and part.group != KVPartSpec.model_fields["group"].default
        ):
            rule = f"granularity {part.granularity} has no groups of tokens"
            yield f"kv.{name}.group {part.group}", rule, "omit it, or use granularity: channel"


def _calibration(pair: PlannedPair) -> Iterator[IdleField]:
    spec = pair.recipe.calibration
    if spec != CalibrationSpec() and not pair.calibrates:
        yield "calibration", "nothing in either half is measured on text", "omit it"
    elif len(spec.data) == 1 and spec.data[0].weight != 1:
        yield f"calibration.data[0].weight {spec.data[0].weight:g}", "it is the only source", "omit it"


def _fusion(pair: PlannedPair) -> Iterator[IdleField]:
    fusion = pair.recipe.fusion
    own = [half for half in pair.halves if half.spec.engine == "qspec"]
    per_tensor = any(_per_tensor(scheme) for half in own for scheme in half.possible.values())
    if not fusion.share_scales and not per_tensor:
        yield "fusion.share_scales false", "no layer has a scale per tensor that could be shared", "omit it"
    if not fusion.fold_norms:
        return
    if not own:
        yield "fusion.fold_norms", "engine llmcompressor folds by its own rules", "omit it, or use engine: qspec"
    elif all(half.spec.rotation is not None and half.spec.rotation.r1 for half in own):
        yield "fusion.fold_norms", "rotation.r1 has folded every gain before", "omit it"


def _per_tensor(scheme: LayerScheme | None) -> bool:
    return scheme is not None and (scheme.static_input or isinstance(scheme.weight.granularity, PerTensor))


def _rest(recipe: Recipe) -> Iterator[IdleField]:
    length, budget = recipe.speculation.draft_length, recipe.budget
    if length.policy == "fixed" and length.max_k != DraftLengthSpec().max_k:
        yield f"speculation.draft_length.max_k {length.max_k}", f"policy fixed always drafts {length.k}", "omit it"
    if budget.max_kl is not None and recipe.evaluation.fidelity is None:
        yield "budget.max_kl", "evaluation.fidelity is off, and nothing measures it", "omit it, or set fidelity: {}"
    if budget.min_recovery is not None and not recipe.evaluation.tasks:
        yield "budget.min_recovery", "evaluation.tasks is empty, and nothing measures it", "omit it, or name a task"
