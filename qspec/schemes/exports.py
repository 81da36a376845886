"""What of a pair which runtime serves, how, and why not, and the commands. Versions: vLLM 0.33, transformers 5."""

import json
import shlex
from typing import Any

from qspec.bridges.vllm.heads import FOLDER_KEY, PROPOSER
from qspec.plan import KVScheme
from qspec.records import ArchMap, QuantizedModel
from qspec.schema.devices import ADA, DeviceSheet, read_device
from qspec.schema.manifest import Served
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schema.recipe import MlpDraft, ModelDraft, ModelSpec, NgramDraft, Recipe, SelfDraft, SuffixDraft
from qspec.schemes.build import build_plan, kv_scheme
from qspec.schemes.device_rules import kv_flag, refusal, skip_flag

_NO_SPARSE = "no server runs dense + sparse weights (outliers); qspec's own engine does"
_STOPS_AT_SPARSE = "stops at format dense-and-sparse: it cannot run outliers"
_STOPS_AT_E5M2 = "stops at type float8_e5m2 where a layer has it (the notes tell): it reads float8 as E4M3 only"
_NO_W4A8 = "W4A8: vLLM has a kernel for it on Arm CPUs alone, not proven here; qspec's own engine runs it, or use W4A16"
_NO_INT8_GROUPS = "W8A8 in groups: vLLM refuses the checkpoint at load; qspec's own engine runs it, or omit group_size"
_HEAD = "; lm_head is quantized too, by a target pattern of its own: vLLM reads that, no run here proves it"
_WHOLE_HEAD = "; it runs the whole head and drafts any id: draft_vocab is qspec's own engine's"
_READS_NO_INT8_EXPERTS = "stops at INT8 experts: it unpacks those in INT4 and FP8 only"
_VLLM_LACKS = {
    "heuristic": "+2/-1 heuristic",
    "confidence": "threshold of draft confidence",
    "optimal": "draft length that follows measured cost",
}
HALF = ("--dtype", "bfloat16")
"""Of vLLM on a CPU, whose INT8 kernels take 16-bit inputs only."""
_IGNORES_TRANSFORMS = "loads without rotation.r4's transform (it ignores transform_config) and computes garbage"


def exports(recipe: Recipe, sheet: DeviceSheet, arch: ArchMap | None = None) -> tuple[Served, ...]:
    """Every part of the pair on vLLM and transformers; the manifest stores the same lines. `arch`: the target's."""
    return (*_vllm(recipe, sheet), *_transformers(recipe, arch))


def as_made(recipe: Recipe, target: QuantizedModel, draft: QuantizedModel | None) -> Recipe:
    """The recipe with the KV caches that measurements gave its halves, in place of what it left open."""
    made: dict[str, ModelSpec | SelfDraft] = {"target": _with_kv(recipe.target, target)}
    if draft is not None and isinstance(recipe.draft, ModelDraft | SelfDraft):
        made["draft"] = _with_kv(recipe.draft, draft)
    return recipe.model_copy(update=made)


def _with_kv(half: ModelSpec | SelfDraft, model: QuantizedModel) -> ModelSpec | SelfDraft:
    spec, kv = half.quantization, model.plan.kv
    if spec.kv is None or "auto" not in (spec.kv.granularity, spec.kv.skip_layers):
        return half
    decided = kv and spec.kv.model_copy(update={"granularity": kv.granularity, "skip_layers": kv.skip_layers})
    return half.model_copy(update={"quantization": spec.model_copy(update={"kv": decided})})


def vllm_speculative_config(recipe: Recipe, draft: str = "draft") -> dict[str, Any]:
    """The value of vLLM's --speculative-config; `draft` is the draft's folder."""
    length = recipe.speculation.draft_length
    k, by_batch = length.k, [list(entry) for entry in length.by_batch]
    batches = {"num_speculative_tokens_per_batch_size": by_batch} if by_batch else {}
    match recipe.draft:
        case NgramDraft(min_ngram=low, max_ngram=high):
            lookup = {"method": "ngram", "num_speculative_tokens": k}
            return lookup | {"prompt_lookup_min": low, "prompt_lookup_max": high} | batches
        case SuffixDraft(max_match=most, across_requests=across):
            depth = {"num_speculative_tokens": k, "suffix_decoding_max_tree_depth": most + k}
            return {"method": "suffix", **depth} | ({} if across else {"suffix_decoding_max_cached_requests": 0})
        case MlpDraft(n_predict=most):
            return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": min(k, most)} | batches
    config: dict[str, Any] = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, **batches}
    if recipe.draft.quantization.scheme != "none":
        config["quantization"] = "compressed-tensors"
    return config | {"kv_cache_dtype": draft_kv_dtype(recipe)}


def kv_cache_dtype(kv: KVSpec | None) -> str:
    """vLLM's --kv-cache-dtype."""
    return kv_flag(kv_scheme(kv))


def draft_kv_dtype(recipe: Recipe) -> str:
    """The draft's KV dtype, always said aloud (unsaid it would be the target's).

    Ada crashes on an FP8 one, and vLLM takes no layers to skip for a draft.
    """
    if not isinstance(recipe.draft, ModelDraft | SelfDraft):
        return "auto"
    kv = recipe.draft.quantization.kv
    dtype = kv_cache_dtype(kv) if kv is None or not kv.skip_layers else "auto"
    return "auto" if dtype == "fp8" and read_device(recipe.device).capability == ADA else dtype


def vllm_arguments(
    recipe: Recipe, pair: str = "pair", kv: KVScheme | None = None, *, float32: bool = False, draft: bool = True
) -> list[str]:
    """Arguments of vLLM's server behind the model's folder; they say everything aloud.

    kv: the target's where it was measured. float32: whether the target's floats are stored so.
    """
    kv = kv or kv_scheme(recipe.target.quantization.kv)
    arguments = ["--served-model-name", recipe.name, "--kv-cache-dtype", kv_flag(kv), *skip_flag(kv)]
    if recipe.speculation.max_length:
        arguments += ["--max-model-len", str(recipe.speculation.max_length)]
    if recipe.device == "cpu" and float32:
        arguments += HALF
    if draft and isinstance(recipe.draft, MlpDraft):
        arguments += ["--additional-config", json.dumps({FOLDER_KEY: f"{pair}/draft"})]
    if draft:
        arguments += ["--speculative-config", json.dumps(vllm_speculative_config(recipe, f"{pair}/draft"))]
    return arguments


def vllm_command(recipe: Recipe, pair: str = "pair", kv: KVScheme | None = None, *, float32: bool = False) -> str:
    """The command that serves the pair, draft included where vLLM can."""
    return shlex.join(["vllm", "serve", f"{pair}/target", *vllm_arguments(recipe, pair, kv, float32=float32)])


def transformers_snippet(recipe: Recipe, capability: int | None, pair: str = "pair") -> str:
    """Python that loads the pair in transformers. It proves function, not speed."""
    optimized = capability is not None and capability >= ADA and recipe.target.quantization.scheme.startswith("FP8")
    config = ", quantization_config=CompressedTensorsConfig(use_optimized_inference=True)" if optimized else ""
    names = "AutoModelForCausalLM, AutoTokenizer" + (", CompressedTensorsConfig" if optimized else "")
    lines = [
        f"from transformers import {names}",
        f'tokenizer = AutoTokenizer.from_pretrained("{pair}/target")',
        f'target = AutoModelForCausalLM.from_pretrained("{pair}/target", dtype="auto"{config})',
    ]
    assistant = "assistant_model=draft"
    if isinstance(recipe.draft, NgramDraft):
        assistant = f"prompt_lookup_num_tokens={recipe.speculation.draft_length.k}"
    elif isinstance(recipe.draft, ModelDraft | SelfDraft):
        length = recipe.speculation.draft_length
        schedule = "heuristic" if length.policy == "heuristic" else "constant"
        first = length.max_k if length.policy == "confidence" else length.k
        lines += [
            f'draft = AutoModelForCausalLM.from_pretrained("{pair}/draft", dtype="auto")',
            f"draft.generation_config.num_assistant_tokens = {first}",
            f'draft.generation_config.num_assistant_tokens_schedule = "{schedule}"',
            "draft.generation_config.do_sample = False",
        ]
        if length.policy == "confidence":
            lines.append(f"draft.generation_config.assistant_confidence_threshold = {length.threshold}")
    else:
        assistant = ""
    lines += [
        'inputs = tokenizer("Hello", return_tensors="pt")',
        f"print(tokenizer.decode(target.generate(**inputs, max_new_tokens=64{assistant and ', ' + assistant})[0]))",
    ]
    return "\n".join(lines)


def _vllm(recipe: Recipe, sheet: DeviceSheet) -> tuple[Served, ...]:
    served, detail = _vllm_weights(recipe.target.quantization, sheet, "target")
    return (
        Served(runtime="vllm", part="target", served=served, detail=detail),
        _vllm_kv(kv_scheme(recipe.target.quantization.kv), sheet),
        _vllm_draft(recipe, sheet),
    )


def _vllm_weights(spec: QuantSpec, sheet: DeviceSheet, folder: str) -> tuple[bool, str]:
    """Whether a half's linear layers are served, and how or why not."""
    names = (spec.scheme,) if spec.mixed is None else spec.mixed.candidates
    scheme, cpu = ", ".join(names), sheet.capability is None
    served, detail = True, f"{folder}/, a compressed-tensors checkpoint ({scheme})"
    if scheme == "none":
        detail = f"{folder}/, an ordinary checkpoint"
    if cpu and any(name.startswith("FP8") for name in names):
        served, detail = False, f"{scheme}: no usable FP8 matmul on CPU; use W8A8"
    if cpu and "W4A16" in names:
        detail += ", run as W4A8 unless VLLM_CPU_INT4_W4A8=0"
    if _rounds_head(spec):
        detail += _HEAD
    if "W4A8" in spec.schemes:
        served, detail = False, _NO_W4A8
    if spec.int8_groups:
        served, detail = False, _NO_INT8_GROUPS
    if spec.outliers is not None:
        served, detail = False, _NO_SPARSE
    if spec.transforms_inputs:
        served, detail = False, "rotation.r4 needs a transform at run time, proven in qspec's own engine only"
    return served, detail


def _rounds_head(spec: QuantSpec) -> bool:
    plan = build_plan(spec)
    return next((rule.scheme for rule in plan.rules if rule.matches("lm_head")), plan.default) is not None


def _vllm_kv(kv: KVScheme | None, sheet: DeviceSheet) -> Served:
    if kv is None:
        return Served(runtime="vllm", part="kv", served=True, detail="KV in the model's dtype")
    reason = refusal(kv)
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
    """What a server of stored scales should know: queries, and layers in float."""
    skipped = ""
    if kv.skip_layers:
        which = "that measurement keeps in float" if kv.skip_layers == "auto" else ", ".join(map(str, kv.skip_layers))
        skipped = f"; layers {which}: --kv-cache-dtype-skip-layers"
    if not kv.stored:
        return skipped
    return (
        "; q_scale stored" if kv.query else "; no q_scale: kernels that round queries use k_scale for them"
    ) + skipped


def _vllm_draft(recipe: Recipe, sheet: DeviceSheet) -> Served:
    served, k = True, recipe.speculation.draft_length.k
    match recipe.draft:
        case MlpDraft(n_predict=most):
            k = min(k, most)
            detail = "by qspec's plugin only (custom_class; `pip install --no-deps qspec` beside vLLM), greedy drafts"
            if recipe.speculation.draft_length.by_batch:
                detail += "; by_batch through the plugin, the method itself does not know it"
        case NgramDraft():
            detail = "method ngram: needs no draft files"
        case SuffixDraft():
            detail = "method suffix: needs no draft files, but `pip install --no-deps arctic-inference==0.1.1`"
            if recipe.speculation.draft_length.by_batch:
                detail += "; by_batch is left out, it is not proven with this method"
        case SelfDraft() | ModelDraft() as draft:
            served, detail = _vllm_weights(draft.quantization, sheet, "draft")
            if served:
                detail = f"method draft_model: draft/ ({draft.quantization.scheme})"
                if isinstance(draft, SelfDraft) and draft.layers is not None:
                    detail += f" is an ordinary checkpoint with {draft.layers} layers"
                if _rounds_head(draft.quantization):
                    detail += _HEAD
    if served and isinstance(recipe.draft, ModelDraft | SelfDraft) and sheet.capability is None:
        if kv_cache_dtype(recipe.target.quantization.kv) != draft_kv_dtype(recipe):
            served, detail = False, "on CPU both halves need the same KV dtype, vLLM aborts otherwise"
        else:
            detail += "; on CPU greedy only (temperatures are lost there)"
    if served and (lacking := _VLLM_LACKS.get(recipe.speculation.draft_length.policy)):
        detail += f"; draft length fixed at {k}, vLLM has no {lacking}"
    if served and isinstance(recipe.draft, ModelDraft | SelfDraft | MlpDraft) and recipe.draft.lookup != "none":
        who = "head" if isinstance(recipe.draft, MlpDraft) else "model"
        detail += f"; it drafts with the {who} alone, without lookup: both together run in qspec's own engine only"
    if served and recipe.drafts_trees:
        detail += "; chains, vLLM has no trees here"
    if served and isinstance(recipe.draft, ModelDraft | SelfDraft) and recipe.draft.draft_vocab:
        detail += _WHOLE_HEAD
    return Served(runtime="vllm", part="draft", served=served, detail=detail)


def _transformers(recipe: Recipe, arch: ArchMap | None) -> tuple[Served, ...]:
    target = recipe.target.quantization
    weights = "loads; all weights are decompressed on the first forward, so neither speed nor memory is gained"
    if target.scheme == "none":
        weights = "loads as an ordinary checkpoint"
    if arch is not None and arch.attention_softcap is not None:
        weights += '; pass attn_implementation="eager", its other attention leaves out soft-capping'
    lacking = _transformers_lacks(target)
    if arch is not None and arch.n_experts and target.scheme == "W8A8":
        lacking = lacking or _READS_NO_INT8_EXPERTS
    if lacking is not None:
        weights = lacking
    kv = "KV in the model's dtype"
    if target.kv is not None:
        kv = f"{target.kv.format} KV is not applied: its caches do not read these scales"
    match recipe.draft:
        case NgramDraft():
            draft = Served(runtime="transformers", part="draft", served=True, detail="prompt_lookup_num_tokens")
        case SuffixDraft():
            detail = "has no suffix lookup; prompt_lookup_num_tokens is nearest to it"
            draft = Served(runtime="transformers", part="draft", served=False, detail=detail)
        case MlpDraft():
            draft = Served(runtime="transformers", part="draft", served=False, detail="has no MLP speculator")
        case _:
            detail = "assistant_model, batch 1, dynamic cache: proves function, not speed"
            detail += _WHOLE_HEAD if recipe.draft.draft_vocab else ""
            draft = Served(runtime="transformers", part="draft", served=True, detail=detail)
            lacks = _transformers_lacks(recipe.draft.quantization)
            if lacks is not None:
                draft = Served(runtime="transformers", part="draft", served=False, detail=lacks)
    return (
        Served(runtime="transformers", part="target", served=lacking is None, detail=weights),
        Served(runtime="transformers", part="kv", served=target.kv is None, detail=kv),
        draft,
    )


def _transformers_lacks(spec: QuantSpec) -> str | None:
    """What transformers cannot do of a half's weights, and what happens instead; None if nothing."""
    if spec.outliers is not None:
        return _STOPS_AT_SPARSE
    if spec.fp8_format == "adaptive":
        return _STOPS_AT_E5M2
    return _IGNORES_TRANSFORMS if spec.transforms_inputs else None
