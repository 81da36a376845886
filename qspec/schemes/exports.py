"""How vLLM and transformers run one half: its schemes, its KV cache. Versions: vLLM 0.33, transformers 5."""

from typing import Any

from qspec.plan import KVScheme
from qspec.schema.devices import DeviceSheet
from qspec.schema.manifest import Served
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schema.recipe import DraftLengthSpec
from qspec.scheme_table import ADA, SCHEMES
from qspec.schemes.build import build_plan, kv_scheme
from qspec.schemes.device_rules import kv_flag, refusal, unread_fp8

HEAD = "; lm_head is quantized too, by a target pattern of its own: vLLM reads that, no run here proves it"
WHOLE_HEAD = "; it runs the whole head and drafts any id: draft_vocab is qspec's own engine's"


def by_batch(length: DraftLengthSpec) -> dict[str, Any]:
    """vLLM's schedule of draft lengths by batch size, if the recipe has one."""
    entries = [list(entry) for entry in length.by_batch]
    return {"num_speculative_tokens_per_batch_size": entries} if entries else {}


def kv_cache_dtype(kv: KVSpec | None) -> str:
    """vLLM's --kv-cache-dtype."""
    return kv_flag(kv_scheme(kv))


def vllm_weights(spec: QuantSpec, sheet: DeviceSheet, folder: str) -> tuple[bool, str]:
    """Whether a half's linear layers are served, and how or why not."""
    names = (spec.scheme,) if spec.mixed is None else spec.mixed.candidates
    scheme, cpu = ", ".join(names), sheet.capability is None
    detail = f"{folder}/, a compressed-tensors checkpoint ({scheme})"
    if all(SCHEMES[name].weight is None for name in names):
        detail = f"{folder}/, an ordinary checkpoint"
    if cpu:
        detail += "".join(row.vllm_cpu_note for row in spec.rows)
    if rounds_head(spec):
        detail += HEAD
    if not cpu and (sheet.capability or 0) < ADA and any(row.float8 for row in spec.rows):
        detail += ", run as W8A16: FP8 weights, 16-bit inputs"
    lacking = [f"{modifier.name}: {modifier.rule}" for modifier in spec.modifiers]
    for row in spec.rows:
        reason = row.vllm or (cpu and row.vllm_cpu)
        lacking += [f"{row.name}: {reason}"] if reason else []
    return not lacking, lacking[0] if lacking else detail


def rounds_head(spec: QuantSpec) -> bool:
    plan = build_plan(spec)
    return next((rule.scheme for rule in plan.rules if rule.matches("lm_head")), plan.default) is not None


def vllm_kv(kv: KVScheme | None, sheet: DeviceSheet) -> Served:
    if kv is None:
        return Served(runtime="vllm", part="kv", served=True, detail="KV in the model's dtype")
    reason = refusal(kv) or unread_fp8(kv, sheet)
    if reason is not None:
        detail = f"{reason}; qspec's engine runs it, vLLM keeps KV in the model's dtype"
        return Served(runtime="vllm", part="kv", served=False, detail=detail)
    served, flag = True, f"--kv-cache-dtype {kv_flag(kv)}"
    if kv.granularity == "token_head":
        detail = f"serve flag {flag}, scales made at run time; not in config.json, which may declare stored FP8 only"
        if sheet.capability is None:
            served, detail = False, "per-token-head KV on CPU loads and then writes garbage; use granularity: tensor"
    elif kv.scales == "cast":
        detail = f"kv_cache_scheme in config.json with every scale 1.0, flag {flag}"
    else:
        detail = f"kv_cache_scheme in config.json with stored k_scale and v_scale, flag {flag}"
        if kv.parts[0].granularity == "head" and sheet.capability is None:
            detail += "; per-head scales collapse to their maximum on CPU"
    if kv_flag(kv) == "fp8" and sheet.capability is None:
        detail += "; on x86 it needs AVX-512 or AMX"
    return Served(runtime="vllm", part="kv", served=served, detail=detail + _more(kv))


def _more(kv: KVScheme) -> str:
    """Settings for a server of stored scales: queries, and layers in float."""
    skipped = ""
    if kv.skip_layers:
        which = "that measurement keeps in float" if kv.skip_layers == "auto" else ", ".join(map(str, kv.skip_layers))
        skipped = f"; layers {which}: --kv-cache-dtype-skip-layers"
    if not kv.stored:
        return skipped
    return (
        "; q_scale stored" if kv.query else "; no q_scale: kernels that round queries use k_scale for them"
    ) + skipped


def transformers_lacks(spec: QuantSpec, experts: bool = False) -> str | None:
    """The first rule of a half's weights that transformers ignores, and the consequence; None if there is none."""
    lacking = [modifier.transformers for modifier in spec.modifiers]
    lacking += [row.experts for row in spec.rows if experts]
    return next(filter(None, lacking), None)
