"""What a device can run of a plan, known before any compute. Sources: vLLM 0.33's kernel selection and its issues."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from qspec.errors import RecipeError
from qspec.numerics.quantization.blocks import PerGroup
from qspec.numerics.quantization.formats import FP8_E5M2, INT4, INT8
from qspec.plan import KVScheme, LayerScheme
from qspec.records import ArchMap
from qspec.schema.devices import ADA, DeviceSheet
from qspec.schema.recipe import Recipe

Schemes = Mapping[str, LayerScheme | None]


NO_E5M2 = "servers read float8 as E4M3; E5M2 runs in qspec's own engine on CPU only"


@dataclass(frozen=True)
class Finding:
    """One remark about a plan. `refused` stops the job before compute, `warning` costs something, `note` informs."""

    level: Literal["refused", "warning", "note"]
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.value}: {self.rule}; {self.fix}"


def raise_refused(findings: Iterable[Finding]) -> None:
    """Raise all refusals as one error, the first in front, if there are any."""
    refused = list(dict.fromkeys(finding for finding in findings if finding.level == "refused"))
    if refused:
        first, *others = refused
        also = "".join(f"; also refused: {finding}" for finding in others)
        raise RecipeError(first.value, first.rule, first.fix + also)


def device_findings(
    sheet: DeviceSheet, schemes: Schemes, kv: KVScheme | None, dtype: str = "auto", arch: ArchMap | None = None
) -> Iterator[Finding]:
    """Remarks about one half of the pair on one device."""
    for scheme in dict.fromkeys(s for s in schemes.values() if s is not None):
        yield from _scheme_findings(sheet, scheme, dtype)
    if kv is not None:
        yield from _kv_findings(sheet, kv, arch)


def outlier_findings(sheet: DeviceSheet, recipe: Recipe) -> Iterator[Finding]:
    """Remarks about weights that are kept apart."""
    sparse = [half for half, spec in recipe.quantized.items() if spec.outliers is not None]
    rule = "no server runs dense + sparse weights, only qspec's own engine (CPU)"
    if sparse and sheet.capability is not None:
        yield Finding("refused", f"outliers on {sheet.name}", rule, "set device: cpu, or outliers: null")
    if "target" in sparse and recipe.asks_transformers:
        rule = "transformers cannot load dense + sparse weights"
        yield Finding("refused", "evaluation.tasks backend hf with outliers", rule, "use backends: [qspec]")


def format_findings(sheet: DeviceSheet, recipe: Recipe) -> Iterator[Finding]:
    """Remarks about float formats that data chooses."""
    adaptive = [half for half, spec in recipe.quantized.items() if spec.fp8_format == "adaptive"]
    if adaptive and sheet.capability is not None:
        fix = "use fp8_format: e4m3, or device: cpu"
        yield Finding("refused", f"fp8_format adaptive on {sheet.name}", NO_E5M2, fix)
    if "target" in adaptive and recipe.asks_transformers:
        rule = "transformers refuses a checkpoint in which a layer got E5M2"
        yield Finding("refused", "evaluation.tasks backend hf with fp8_format adaptive", rule, "use backends: [qspec]")


def rotation_findings(sheet: DeviceSheet, recipe: Recipe) -> Iterator[Finding]:
    """Remarks about transforms that a half needs at run time."""
    transformed = [half for half, spec in recipe.quantized.items() if spec.transforms_inputs]
    rule = "needs a Hadamard transform at run time, which is proven in qspec's own engine (CPU) alone"
    if transformed and sheet.capability is not None:
        yield Finding("refused", f"rotation.r4 on {sheet.name}", rule, "set rotation: {r4: false}; r1 and r2 need none")
    if "target" in transformed and recipe.asks_transformers:
        yield Finding("refused", "evaluation.tasks backend hf of rotation.r4", rule, "use backends: [qspec]")


def _scheme_findings(sheet: DeviceSheet, scheme: LayerScheme, dtype: str) -> Iterator[Finding]:
    value, sm = f"{scheme.name} on {sheet.name} ({sheet.architecture})", sheet.capability
    fp8 = scheme.weight.fmt.is_float
    if scheme.activation is not None and scheme.weight.fmt == INT4:
        rule = "no server multiplies INT4 weights with INT8 inputs but vLLM on Arm CPUs; qspec's own engine (CPU) does"
        fix = "use scheme: W4A16 or W8A8 to serve it elsewhere"
        yield Finding("note" if sm is None else "refused", value, rule, fix)
    elif scheme.weight.fmt == INT8 and isinstance(scheme.weight.granularity, PerGroup):
        rule = "no server multiplies INT8 in groups; qspec's own engine (CPU) does"
        yield Finding("note" if sm is None else "refused", value, rule, "leave group_size out to serve it elsewhere")
    elif scheme.activation is not None and not fp8 and sm is not None and not 75 <= sm <= 90:
        yield Finding("refused", value, "INT8 matmul kernels exist for SM75 to SM90 only", "use scheme: FP8_DYNAMIC")
    if fp8 and sm is not None and sm < ADA:
        yield Finding("refused", value, "FP8 matmul needs SM89 or newer", "use scheme: W8A8")
    if sm is not None and any(part.fmt == FP8_E5M2 for part in (scheme.weight, scheme.activation) if part):
        yield Finding("refused", value, NO_E5M2, "use fp8_format: e4m3, or device: cpu")
    if scheme.name == "FP8_BLOCK" and sm == ADA:
        rule = "block FP8 has no kernel of its own on Ada and runs slower there than 16-bit weights"
        yield Finding("refused", value, rule, "use scheme: FP8_DYNAMIC or W8A8")
    if fp8 and dtype == "float16":
        level: Literal["refused", "warning"] = "refused" if scheme.name == "FP8_BLOCK" else "warning"
        rule = "block FP8 kernels return bfloat16 only" if level == "refused" else "FP8 scales below 6e-5 lose bits"
        yield Finding(level, f"{scheme.name} with dtype float16", rule, "use dtype: auto (bfloat16)")
    if fp8 and sm is None:
        rule = "a CPU has no FP8 matmul: weights are decoded at load, so files shrink and speed does not rise"
        yield Finding("note", value, rule, "use scheme: W8A8 for speed on CPU")
    if scheme.name == "FP8" and sm is not None and sm >= 100:
        yield Finding("note", value, "per-tensor FP8 has been slower than BF16 in prefill there", "try FP8_DYNAMIC")
    if fp8 and sheet.name == "rtx4090":
        rule = "with float32 accumulation INT8 has twice FP8's matmul rate there (prefill, large batches)"
        yield Finding("note", value, rule, "compare scheme: W8A8")


def _kv_findings(sheet: DeviceSheet, kv: KVScheme, arch: ArchMap | None) -> Iterator[Finding]:
    key, sm = kv.parts[0], sheet.capability
    value, reason = f"KV {kv.label} on {sheet.name} ({sheet.architecture})", refusal(kv)
    if reason is not None and sm is not None:
        yield Finding("refused", value, reason, "use device: cpu, or kv: {format: fp8_e4m3}")
        return
    if reason is not None:
        yield Finding("note", value, reason, "serve with qspec, or use kv: {format: fp8_e4m3}")
    if key.fmt.is_float and sm is not None and sm < ADA:
        fix = "use kv: {format: int8, granularity: token_head}"
        yield Finding("warning", value, "fast attention kernels read FP8 KV from SM89 on", fix)
    if key.fmt.is_float and key.stored and not kv.open and arch is not None and arch.qkv_bias:
        rule = "key biases (Qwen2 family) make keys so large that rounding them to FP8 can change every score"
        fix = "use granularity: auto or skip_layers: auto, which measure it, or kv: null"
        yield Finding("warning", value, rule, fix)
    if key.granularity == "token_head" and sm is None and reason is None:
        rule = "vLLM on CPU loads per-token-head KV without error and then writes garbage (qspec's own engine runs it)"
        yield Finding("warning", value, rule, "serve with qspec, or use granularity: tensor")


_SHORT = {"fp8_e4m3": "fp8", "int8": "int8"}


def refusal(kv: KVScheme) -> str | None:
    """Why vLLM cannot serve the scheme; None: it can."""
    key, value = kv.parts
    own = {
        "channel scales": "channel" in (key.granularity, value.granularity),
        "piecewise codes": key.piecewise or value.piecewise,
        "KV outliers": bool(key.outliers or value.outliers),
        "a residual window": kv.residual > 0,
        "INT4 KV": 4 in (key.fmt.bits, value.fmt.bits),
    }
    found = [what for what, asked in own.items() if asked]
    if found:
        return f"only qspec's cache has {' and '.join(found)}"
    if "fp8_e5m2" in (key.fmt.name, value.fmt.name):
        return "vLLM refuses E5M2 KV beside FP8 weights, and has corrupted output with it"
    return None if key == value else "vLLM stores keys and values in one format"


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
