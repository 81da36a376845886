"""From the recipe's scheme names to a plan, and the rules a plan must keep for one architecture."""

from collections.abc import Mapping

from qspec.bridges.compressed import refuse_tied_head
from qspec.errors import RecipeError
from qspec.numerics.blocks import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.clipping import ABSMAX, Clip
from qspec.numerics.formats import FORMATS, FP8_E4M3, INT4, INT8
from qspec.plan import KVScheme, LayerScheme, QuantPlan, Rule, TensorScheme
from qspec.records import ArchMap
from qspec.schema.devices import read_device
from qspec.schema.recipe import KVSpec, QuantSpec
from qspec.stages.preflight import device_findings, raise_refused

BLOCK = 128
"""Rows and columns of an FP8_BLOCK tile, and the activation group beside it: the only size that servers run."""


def build_plan(spec: QuantSpec) -> QuantPlan:
    """The plan that a recipe's `quantization` means: `ignore` first, then `rules`, then the scheme for the rest."""
    clip = Clip(spec.clip.method, spec.clip.percentile)
    ignored = tuple(Rule(match, None) for match in spec.ignore)
    rules = tuple(Rule(r.match, layer_scheme(r.scheme, r.group_size or spec.group_size, clip)) for r in spec.rules)
    return QuantPlan(layer_scheme(spec.scheme, spec.group_size, clip), ignored + rules, _kv_scheme(spec.kv))


def layer_scheme(name: str, group_size: int = BLOCK, clip: Clip = ABSMAX) -> LayerScheme | None:
    """Formats behind a scheme name (compressed-tensors' presets of that name). `clip` is for weights; none: None."""
    match name:
        case "W8A8":
            weight = TensorScheme(INT8, PerChannel(), clip=clip)
            activation = TensorScheme(INT8, PerToken(), dynamic=True)
        case "FP8":
            weight = TensorScheme(FP8_E4M3, PerTensor(), clip=clip)
            activation = TensorScheme(FP8_E4M3, PerTensor())
        case "FP8_DYNAMIC":
            weight = TensorScheme(FP8_E4M3, PerChannel(), clip=clip)
            activation = TensorScheme(FP8_E4M3, PerToken(), dynamic=True)
        case "FP8_BLOCK":
            weight = TensorScheme(FP8_E4M3, PerBlock(BLOCK, BLOCK), clip=clip)
            activation = TensorScheme(FP8_E4M3, PerGroup(BLOCK), dynamic=True)
        case "W4A16":
            return LayerScheme(name, TensorScheme(INT4, PerGroup(group_size), clip=clip))
        case "none":
            return None
        case _:
            raise AssertionError(f"scheme {name}")
    return LayerScheme(name, weight, activation)


def resolve_plan(plan: QuantPlan, arch: ArchMap) -> dict[str, LayerScheme | None]:
    """Schemes by layer: fused groups have one, a tied head none, groups and tiles divide. Raises `RecipeError`."""
    schemes = plan.resolve(arch.linears())
    refuse_tied_head(arch, {layer for layer, scheme in schemes.items() if scheme is not None})
    _one_scheme_per_fused_group(schemes, arch)
    for layer, scheme in schemes.items():
        if scheme is not None:
            _divides(layer, scheme, arch.linear_shape(layer))
    return schemes


def validate_plan(plan: QuantPlan, arch: ArchMap, device: str = "cpu") -> dict[str, LayerScheme | None]:
    """`resolve_plan`, and the device can run what is asked: every rule that can be checked without weights."""
    schemes = resolve_plan(plan, arch)
    raise_refused(device_findings(read_device(device), schemes, plan.kv))
    return schemes


def scheme_label(scheme: LayerScheme | None) -> str:
    """Short name for people: `W8A8`, `W4A16 g64`, `FP8 mse`; `none` for a layer that keeps its dtype."""
    if scheme is None:
        return "none"
    group = f" g{scheme.weight.granularity.size}" if isinstance(scheme.weight.granularity, PerGroup) else ""
    clip = "" if scheme.weight.clip.method == "absmax" else f" {scheme.weight.clip.method}"
    return scheme.name + group + clip


def needs_statistics(schemes: Mapping[str, LayerScheme | None], plan: QuantPlan, spec: QuantSpec) -> list[str]:
    """Why this half must see calibration text; empty when round-to-nearest of the weights is all there is."""
    reasons = {
        "static activation scales": any(scheme is not None and scheme.static_input for scheme in schemes.values()),
        "KV scales": plan.kv is not None and plan.kv.calibrated,
        "smoothing": spec.smoothing is not None,
        spec.method: spec.method != "rtn",
    }
    return [reason for reason, needed in reasons.items() if needed]


def _kv_scheme(spec: KVSpec | None) -> KVScheme | None:
    return None if spec is None else KVScheme(FORMATS[spec.format], spec.granularity, spec.scales)


def _one_scheme_per_fused_group(schemes: dict[str, LayerScheme | None], arch: ArchMap) -> None:
    for names in arch.fused_groups():
        if len({schemes[name] for name in names}) > 1:
            found = dict.fromkeys(scheme_label(schemes[name]) for name in names)
            raise RecipeError(
                f"{names[0].rpartition('.')[0]}.{{{', '.join(n.rpartition('.')[2] for n in names)}}}",
                f"has the schemes {' and '.join(found)}, but servers merge these layers into one matmul",
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
