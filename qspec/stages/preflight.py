"""What a device can run of a plan, known before any compute. Sources: vLLM 0.33's kernel selection and its issues."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from qspec.errors import RecipeError
from qspec.plan import KVScheme, LayerScheme
from qspec.records import ArchMap
from qspec.schema.devices import ADA, DeviceSheet
from qspec.schema.recipe import MlpDraft, ModelDraft, Recipe, SelfDraft

Schemes = Mapping[str, LayerScheme | None]


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
    """Raise the first refusal, if there is one."""
    for finding in findings:
        if finding.level == "refused":
            raise RecipeError(finding.value, finding.rule, finding.fix)


def refuse_unbuilt(recipe: Recipe) -> None:
    """Raise `RecipeError` for a draft that `plan` understands and `run` cannot make."""
    if isinstance(recipe.draft, MlpDraft):
        raise RecipeError(
            "draft.kind 'mlp_speculator'",
            "is planned only: qspec does not run MLP speculators, and vLLM serves none since 0.33",
            "use kind: model (a smaller model), self (a copy of the target) or ngram (prompt lookup)",
        )


def device_findings(
    sheet: DeviceSheet, schemes: Schemes, kv: KVScheme | None, dtype: str = "auto", arch: ArchMap | None = None
) -> Iterator[Finding]:
    """Remarks about one half of the pair on one device."""
    for scheme in dict.fromkeys(s for s in schemes.values() if s is not None):
        yield from _scheme_findings(sheet, scheme, dtype)
    if kv is not None:
        yield from _kv_findings(sheet, kv, arch)


def pair_findings(sheet: DeviceSheet, recipe: Recipe) -> Iterator[Finding]:
    """Remarks about target and draft together."""
    if isinstance(recipe.draft, MlpDraft):
        yield Finding(
            "warning",
            "draft.kind 'mlp_speculator'",
            "can be planned, not run; vLLM serves none since 0.33",
            "use kind: model, self or ngram to run the job",
        )
    if not isinstance(recipe.draft, ModelDraft | SelfDraft):
        return
    target, draft = (half.quantization.kv for half in (recipe.target, recipe.draft))
    formats = [kv.format if kv else recipe.dtype for kv in (target, draft)]
    if formats[0] != formats[1] and sheet.capability is None:
        yield Finding(
            "warning",
            f"KV formats {formats[0]} (target) and {formats[1]} (draft)",
            "vLLM on CPU aborts unless both halves have the same (qspec's own engine does not mind)",
            "give the draft the target's kv",
        )
    if draft is not None and draft.format == "fp8_e4m3" and sheet.capability == ADA:
        yield Finding(
            "warning",
            f"draft KV fp8 on {sheet.name} (SM89)",
            "vLLM has crashed with FP8 draft KV on Ada",
            "the export says kv_cache_dtype: auto for the draft; set its kv: null to plan for that",
        )


def _scheme_findings(sheet: DeviceSheet, scheme: LayerScheme, dtype: str) -> Iterator[Finding]:
    value, sm = f"{scheme.name} on {sheet.name} ({sheet.architecture})", sheet.capability
    fp8 = scheme.weight.fmt.is_float
    if scheme.activation is not None and not fp8 and sm is not None and not 75 <= sm <= 90:
        yield Finding("refused", value, "INT8 matmul kernels exist for SM75 to SM90 only", "use scheme: FP8_DYNAMIC")
    if fp8 and sm is not None and sm < ADA:
        yield Finding("refused", value, "FP8 matmul needs SM89 or newer", "use scheme: W8A8")
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
    value, sm = f"KV {kv.fmt.name} {kv.granularity} on {sheet.name} ({sheet.architecture})", sheet.capability
    if kv.fmt.name == "fp8_e5m2":
        yield Finding(
            "refused", value, "E5M2 KV is refused beside FP8 weights and has corrupted output", "use fp8_e4m3"
        )
    if kv.fmt.is_float and sm is not None and sm < ADA:
        fix = "use kv: {format: int8, granularity: token_head}"
        yield Finding("warning", value, "fast attention kernels read FP8 KV from SM89 on", fix)
    if kv.fmt.is_float and kv.granularity == "tensor" and arch is not None and arch.qkv_bias:
        rule = "key biases (Qwen2 family) make outliers that one FP8 scale per layer can lose"
        yield Finding(
            "warning", value, rule, "use granularity: head, or kv: null; the report measures the KL either way"
        )
    if kv.granularity == "token_head" and sm is None:
        rule = "vLLM on CPU loads per-token-head KV without error and then writes garbage (qspec's own engine runs it)"
        yield Finding("warning", value, rule, "serve with qspec, or use granularity: tensor")
