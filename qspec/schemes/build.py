"""From the recipe's scheme names to a plan, and the rules a plan must keep for one architecture."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from qspec.bridges.compressed import refuse_tied_head
from qspec.errors import Problems, RecipeError
from qspec.numerics.quantization.blocks import PerBlock, PerGroup
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FORMATS
from qspec.plan import KVPart, KVScheme, LayerScheme, QuantPlan, Rule
from qspec.records import ArchMap
from qspec.schema.devices import read_device
from qspec.schema.quantization import KVPartSpec, KVSpec, QuantSpec
from qspec.scheme_table import GROUP, SCHEMES, in_groups
from qspec.schemes.device_rules import device_findings, raise_refused

KV_GRANULARITIES: tuple[Literal["tensor", "head", "token_head"], ...] = ("tensor", "head", "token_head")
"""Granularities that `kv.granularity: auto` tries, the preferred first: fewer scales, more servers that read them."""
INDEXED = 1 << 15
"""Values of a block among which KV outliers are indexed by int16."""


def build_plan(spec: QuantSpec) -> QuantPlan:
    """The plan that a recipe's `quantization` means: `ignore` first, then `rules`, then the scheme for the rest."""
    clip = Clip(spec.clip.method, spec.clip.percentile)
    ignored = tuple(Rule(match, None) for match in spec.ignore)
    rules = tuple(Rule(r.match, _scheme(r.scheme, r.group_size, spec, clip)) for r in spec.rules)
    default = _scheme(spec.scheme, spec.group_size if spec.mixed is None else None, spec, clip)
    return QuantPlan(default, ignored + rules, kv_scheme(spec.kv))


def _scheme(name: str, own_group: int | None, spec: QuantSpec, clip: Clip) -> LayerScheme | None:
    """The scheme as the recipe has it; one that may be in groups is where a size stands beside its name."""
    row = SCHEMES[name]
    scheme = row.layer(own_group or spec.group_size or GROUP, clip)
    if scheme is None:
        return None
    weight = replace(scheme.weight, symmetric=spec.symmetric or not row.zero_points)
    scheme = replace(scheme, weight=weight, outliers=spec.outliers.share if spec.outliers is not None else 0.0)
    return in_groups(scheme, own_group) if row.grouped and own_group is not None else scheme


def resolve_plan(plan: QuantPlan, arch: ArchMap) -> dict[str, LayerScheme | None]:
    """Schemes by layer: fused groups have one, a tied head none, groups and tiles divide. Raises `RecipeError`."""
    schemes, problems = plan.resolve(arch.linears()), Problems()
    with problems.kept():
        refuse_tied_head(arch, {layer for layer, scheme in schemes.items() if scheme is not None})
    with problems.kept():
        _one_scheme_per_kernel(schemes, arch)
    with problems.kept():
        if plan.kv is not None:
            _check_kv(plan.kv, arch)
    with problems.kept():  # the first layer speaks for all of its shape
        for layer, scheme in schemes.items():
            if scheme is not None:
                _divides(layer, scheme, arch.linear_shape(layer))
    problems.tell()
    return schemes


def validate_plan(plan: QuantPlan, arch: ArchMap, device: str = "cpu") -> dict[str, LayerScheme | None]:
    """`resolve_plan`, and the device can run what is asked: every rule that can be checked without weights."""
    schemes = resolve_plan(plan, arch)
    raise_refused(device_findings(read_device(device), schemes, plan.kv))
    return schemes


def scheme_label(scheme: LayerScheme | None) -> str:
    """Short name for people: `W8A8`, `W4A16 g64 +0.5%`, `FP8 mse`; `none` for a layer that keeps its dtype."""
    if scheme is None:
        return "none"
    group = f" g{scheme.weight.granularity.size}" if isinstance(scheme.weight.granularity, PerGroup) else ""
    zeros = "" if scheme.weight.symmetric else " asymmetric"
    clip = "" if scheme.weight.clip.method == "absmax" else f" {scheme.weight.clip.method}"
    sparse = f" +{scheme.outliers:g}%" if scheme.outliers else ""
    return scheme.name + group + zeros + clip + sparse


def needs_statistics(schemes: Mapping[str, LayerScheme | None], plan: QuantPlan, spec: QuantSpec) -> list[str]:
    """Why this half must see calibration text; empty when round-to-nearest of the weights is all there is."""
    reasons = {
        "static activation scales": any(scheme is not None and scheme.static_input for scheme in schemes.values()),
        "KV scales": plan.kv is not None and (plan.kv.calibrated or plan.kv.open),
        "smoothing": spec.smoothing is not None,
        "mixed precision": spec.mixed is not None,
        "outliers": spec.outliers is not None,
        spec.method: spec.method != "rtn",
    }
    needing = [reason for reason, needed in reasons.items() if needed]
    if needing and spec.engine == "qspec" and _weighs_errors(schemes):
        needing.append("clip mse (weighted by inputs)")
    return needing


def _weighs_errors(schemes: Mapping[str, LayerScheme | None]) -> bool:
    """Whether a clip uses what inputs look like where text is read anyway; it is no reason to read any."""
    return any(scheme is not None and scheme.weight.clip.method == "mse" for scheme in schemes.values())


def kv_scheme(spec: KVSpec | None) -> KVScheme | None:
    """The KV cache that a recipe's `kv` means."""
    if spec is None:
        return None
    key, value = (_kv_part(part) for part in (spec.key, spec.value))
    skipped = spec.skip_layers if spec.skip_layers == "auto" else tuple(sorted(set(spec.skip_layers)))
    kv = KVScheme(FORMATS[spec.format], "tensor", spec.scales, key, value, spec.query, spec.residual, skipped)
    if spec.granularity == "auto":
        return replace(kv, granularities=KV_GRANULARITIES, skip_layers=skipped or "auto")
    return replace(kv, granularity=spec.granularity)


def _kv_part(spec: KVPartSpec | None) -> KVPart | None:
    if spec is None:
        return None
    return KVPart(FORMATS[spec.format], spec.granularity, spec.group, spec.outliers)


def _check_kv(kv: KVScheme, arch: ArchMap) -> None:
    """Check rules that depend on the model: layers exist, and an int16 can index the outliers."""
    if kv.skip_layers != "auto":
        for layer in kv.skip_layers:
            if not arch.first_layer <= layer < arch.first_layer + arch.n_layers:
                rule = f"the model has layers {arch.first_layer} … {arch.first_layer + arch.n_layers - 1}"
                raise RecipeError(f"kv.skip_layers {layer}", rule, "name one of those")
    for part in kv.parts:
        most = INDEXED // arch.head_dim
        if part.outliers and part.granularity == "channel" and part.group > most:
            rule = f"times head size {arch.head_dim} is more than outliers can index ({INDEXED})"
            raise RecipeError(f"kv group {part.group}", rule, f"use group: {most} or less")


def _one_scheme_per_kernel(schemes: dict[str, LayerScheme | None], arch: ArchMap) -> None:
    for names in arch.one_scheme_groups():
        if len({schemes[name] for name in names}) > 1:
            labels = dict.fromkeys(scheme_label(schemes[name]) for name in names)
            block, expert, _ = names[0].partition(".experts.")
            what = f"{names[0].rpartition('.')[0]}.{{{', '.join(n.rpartition('.')[2] for n in names)}}}"
            raise RecipeError(
                f"{block}.experts" if expert else what,
                f"has the schemes {' and '.join(labels)}, but servers merge these layers into one matmul",
                "give all of them the same rule",
            )


def _divides(layer: str, scheme: LayerScheme, shape: tuple[int, int]) -> None:
    rows, columns = shape
    match scheme.weight.granularity:
        case PerGroup(size) if columns % size:
            fits = [g for g in (128, 64, 32, 16) if columns % g == 0]
            advice = f"use group_size: {fits[0]}" if fits else "add the layer to ignore"
            raise RecipeError(f"{layer} [{rows}, {columns}]", f"does not divide into groups of {size}", advice)
        case PerBlock(r, c) if rows % r or columns % c:
            raise RecipeError(
                f"{layer} [{rows}, {columns}]", f"does not divide into tiles of {r}x{c}", "use scheme: FP8_DYNAMIC"
            )
