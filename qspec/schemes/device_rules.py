"""Rules of devices for plans, checked before any compute. Sources: vLLM 0.33's kernel selection and its issues."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from qspec.errors import Problems, RecipeError
from qspec.plan import KVScheme, LayerScheme
from qspec.records import ArchMap
from qspec.schema.devices import DeviceSheet
from qspec.schema.recipe import Recipe
from qspec.scheme_table import ADA, IN_GROUPS, MODIFIERS, SCHEMES, Level, Modifier, Place

Schemes = Mapping[str, LayerScheme | None]


@dataclass(frozen=True)
class PlanFinding:
    """One remark about a plan. `refused` stops the job before compute, `warning` costs something, `note` informs."""

    level: Level
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.value}: {self.rule}; {self.fix}"


def raise_refused(findings: Iterable[PlanFinding]) -> None:
    """Raise all refusals as one error, a line each, if there are any."""
    problems = Problems()
    for finding in findings:
        if finding.level == "refused":
            problems.errors.append(RecipeError(finding.value, finding.rule, finding.fix))
    problems.tell()


def device_findings(
    sheet: DeviceSheet, schemes: Schemes, kv: KVScheme | None, dtype: str = "auto", arch: ArchMap | None = None
) -> Iterator[PlanFinding]:
    """Remarks about one half of the pair on one device."""
    for scheme in dict.fromkeys(s for s in schemes.values() if s is not None):
        yield from _scheme_findings(sheet, scheme, dtype)
    if kv is not None:
        yield from _kv_findings(sheet, kv, arch)


def modifier_findings(sheet: DeviceSheet, recipe: Recipe) -> Iterator[PlanFinding]:
    """Remarks about what a recipe adds to its schemes and no server runs."""
    for half, spec in recipe.quantized.items():
        for modifier in spec.modifiers:
            yield _own_alone(sheet, modifier)
            if half == "target" and recipe.asks_transformers and modifier.transformers is not None:
                value = f"evaluation.tasks backend hf with {modifier.name}"
                yield PlanFinding("refused", value, f"transformers {modifier.transformers}", "use backends: [qspec]")


def _scheme_findings(sheet: DeviceSheet, scheme: LayerScheme, dtype: str) -> Iterator[PlanFinding]:
    modifiers = [modifier for modifier in MODIFIERS if modifier.has(scheme)]
    at, row = Place(sheet.name, sheet.capability, dtype), SCHEMES.get(scheme.name)
    for remark in row.remarks if row is not None and IN_GROUPS not in modifiers else ():
        if remark.where(at):
            yield PlanFinding(remark.level, _on(sheet, scheme.name), remark.rule, remark.fix)
    yield from (_own_alone(sheet, modifier) for modifier in modifiers)


def _own_alone(sheet: DeviceSheet, modifier: Modifier) -> PlanFinding:
    """qspec's own engine runs it on a CPU."""
    if sheet.capability is None:
        return PlanFinding("note", _on(sheet, modifier.name), modifier.rule, f"{modifier.fix} to serve it elsewhere")
    return PlanFinding("refused", _on(sheet, modifier.name), modifier.rule, f"{modifier.fix}, or set device: cpu")


def _on(sheet: DeviceSheet, what: str) -> str:
    return f"{what} on {sheet.name} ({sheet.architecture})"


def _kv_findings(sheet: DeviceSheet, kv: KVScheme, arch: ArchMap | None) -> Iterator[PlanFinding]:
    key, sm = kv.parts[0], sheet.capability
    value, reason = _on(sheet, f"KV {kv.label}"), refusal(kv)
    if reason is not None and sm is not None:
        yield PlanFinding("refused", value, reason, "use device: cpu, or kv: {format: fp8_e4m3}")
        return
    if reason is not None:
        yield PlanFinding("note", value, reason, "serve with qspec, or use kv: {format: fp8_e4m3}")
    int8 = "use kv: {format: int8, granularity: token_head}"
    if (unread := unread_fp8(kv, sheet)) is not None:
        yield PlanFinding("refused", value, unread, int8)
    elif key.fmt.is_float and sm is not None and sm < ADA:
        rule = "of vLLM's attention kernels FlashInfer alone reads FP8 KV before SM89"
        yield PlanFinding("warning", value, rule, f"serve with --attention-backend FLASHINFER, or {int8}")
    if key.fmt.is_float and key.stored and not kv.open and arch is not None and arch.qkv_bias:
        rule = "key biases (Qwen2 family) make keys so large that rounding them to FP8 can change every score"
        fix = "use granularity: auto or skip_layers: auto, which measure it, or kv: null"
        yield PlanFinding("warning", value, rule, fix)
    if key.granularity == "token_head" and sm is None and reason is None:
        rule = "vLLM on CPU loads per-token-head KV without error and then writes garbage (qspec's own engine runs it)"
        yield PlanFinding("warning", value, rule, "serve with qspec, or use granularity: tensor")


_SHORT = {"fp8_e4m3": "fp8", "int8": "int8"}
_FIRST_READER = {"tensor": (80, "FlashInfer"), "head": (90, "FlashAttention"), "token_head": (ADA, "Triton")}
"""By the granularity of FP8 scales, vLLM's attention kernel that reads them on the oldest devices, and the oldest."""


def refusal(kv: KVScheme) -> str | None:
    """Why vLLM cannot serve the scheme; None: it can."""
    key, value = kv.parts
    own = {
        "channel scales": "channel" in (key.granularity, value.granularity),
        "KV outliers": bool(key.outliers or value.outliers),
        "a residual window": kv.residual > 0,
        "INT4 KV": 4 in (key.fmt.bits, value.fmt.bits),
    }
    parts = [what for what, used in own.items() if used]
    if parts:
        return f"only qspec's cache has {' and '.join(parts)}"
    return None if key == value else "vLLM stores keys and values in one format"


def unread_fp8(kv: KVScheme, sheet: DeviceSheet) -> str | None:
    """Why no attention kernel of vLLM reads the FP8 codes of a cache on a GPU; None: one does, or there are none."""
    key, sm = kv.parts[0], sheet.capability
    if sm is None or not key.fmt.is_float or key.granularity not in _FIRST_READER:
        return None
    first, kernel = _FIRST_READER[key.granularity]
    rule = f"vLLM reads no FP8 KV by {key.granularity} there: {kernel} is the first kernel that does, from SM{first} on"
    return rule if sm < first else None


def kv_flag(kv: KVScheme | None) -> str:
    """The value of --kv-cache-dtype; `auto` for what vLLM cannot serve."""
    if kv is None or refusal(kv) is not None:
        return "auto"
    part = kv.parts[0]
    return f"{_SHORT[part.fmt.name]}_per_token_head" if part.granularity == "token_head" else _SHORT[part.fmt.name]


def skip_flag(kv: KVScheme | None) -> list[str]:
    """The arguments that keep layers in float; none where none are kept or known yet."""
    if kv is None or not kv.skip_layers or kv.skip_layers == "auto" or refusal(kv) is not None:
        return []
    return ["--kv-cache-dtype-skip-layers", *map(str, kv.skip_layers)]
