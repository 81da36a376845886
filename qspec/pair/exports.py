"""Runtimes that serve parts of a pair, with commands, or the reason why not. Versions: vLLM 0.33, transformers 5."""

import json
import shlex
from typing import Any

from qspec.pair.drafters.registry import kind_of
from qspec.plan import KVScheme
from qspec.records import ArchMap, QuantizedModel
from qspec.schema.devices import DeviceSheet
from qspec.schema.drafts import DraftSpec
from qspec.schema.manifest import Served
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schema.recipe import Recipe
from qspec.scheme_table import ADA, SCHEMES
from qspec.schemes.build import kv_scheme
from qspec.schemes.device_rules import kv_flag, skip_flag
from qspec.schemes.exports import WHOLE_HEAD, transformers_lacks, vllm_kv, vllm_weights

_VLLM_LACKS = {
    "heuristic": "+2/-1 heuristic",
    "confidence": "threshold of draft confidence",
    "optimal": "draft length that follows measured cost",
}
HALF = ("--dtype", "bfloat16")
"""Arguments of vLLM on a CPU, whose INT8 kernels take 16-bit inputs only."""


def exports(recipe: Recipe, sheet: DeviceSheet, arch: ArchMap | None = None) -> tuple[Served, ...]:
    """Every part of the pair on vLLM and transformers; the manifest stores the same lines. `arch`: the target's."""
    return (*_vllm(recipe, sheet), *_transformers(recipe, arch))


def as_made(recipe: Recipe, target: QuantizedModel, draft: QuantizedModel | None) -> Recipe:
    """The recipe with the measured KV choices of its halves in place of those that it left open."""
    halves: dict[str, ModelSpec | DraftSpec] = {"target": recipe.target, "draft": recipe.draft}
    models = {"target": target, "draft": draft}
    made = {
        name: halves[name].model_copy(update={"quantization": _with_kv(spec, model)})
        for name, spec in recipe.quantized.items()
        if (model := models[name]) is not None
    }
    return recipe.model_copy(update=made)


def _with_kv(spec: QuantSpec, model: QuantizedModel) -> QuantSpec:
    kv = model.plan.kv
    if spec.kv is None or "auto" not in (spec.kv.granularity, spec.kv.skip_layers):
        return spec
    decided = kv and spec.kv.model_copy(update={"granularity": kv.granularity, "skip_layers": kv.skip_layers})
    return spec.model_copy(update={"kv": decided})


def vllm_speculative_config(recipe: Recipe, draft: str = "draft") -> dict[str, Any]:
    """The value of vLLM's --speculative-config; `draft` is the draft's folder."""
    return kind_of(recipe.draft).vllm_config(recipe, draft)


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
    if draft:
        arguments += kind_of(recipe.draft).vllm_arguments(f"{pair}/draft")
        config = vllm_speculative_config(recipe, f"{pair}/draft")
        arguments += ["--speculative-config", json.dumps(config)] if config else []
    return arguments


def vllm_command(recipe: Recipe, pair: str = "pair", kv: KVScheme | None = None, *, float32: bool = False) -> str:
    """The command that serves the pair, draft included where vLLM can."""
    return shlex.join(["vllm", "serve", f"{pair}/target", *vllm_arguments(recipe, pair, kv, float32=float32)])


def transformers_snippet(recipe: Recipe, capability: int | None, pair: str = "pair") -> str:
    """Python that loads the pair in transformers. It proves function, not speed."""
    optimized = capability is not None and capability >= ADA and SCHEMES[recipe.target.quantization.scheme].float8
    config = ", quantization_config=CompressedTensorsConfig(use_optimized_inference=True)" if optimized else ""
    names = "AutoModelForCausalLM, AutoTokenizer" + (", CompressedTensorsConfig" if optimized else "")
    lines = [
        f"from transformers import {names}",
        f'tokenizer = AutoTokenizer.from_pretrained("{pair}/target")',
        f'target = AutoModelForCausalLM.from_pretrained("{pair}/target", dtype="auto"{config})',
    ]
    assistant = kind_of(recipe.draft).snippet(recipe, pair)
    lines += assistant.lines
    arguments = ", ".join(["**inputs", "max_new_tokens=64", *([assistant.argument] if assistant.argument else [])])
    lines += [
        'inputs = tokenizer("Hello", return_tensors="pt")',
        f"print(tokenizer.decode(target.generate({arguments})[0]))",
    ]
    return "\n".join(lines)


def _vllm(recipe: Recipe, sheet: DeviceSheet) -> tuple[Served, ...]:
    served, detail = vllm_weights(recipe.target.quantization, sheet, "target")
    return (
        Served(runtime="vllm", part="target", served=served, detail=detail),
        vllm_kv(kv_scheme(recipe.target.quantization.kv), sheet),
        _vllm_draft(recipe, sheet),
    )


def _vllm_draft(recipe: Recipe, sheet: DeviceSheet) -> Served:
    draft, length = recipe.draft, recipe.speculation.draft_length
    served, detail = kind_of(draft).in_vllm(recipe, sheet)
    if served and (lacking := _VLLM_LACKS.get(length.policy)):
        k = min(length.k, draft.longest or length.k)
        detail += f"; draft length fixed at {k}, vLLM has no {lacking}"
    if served and draft.first != "none":
        who = "head" if draft.drafts_from == "states" else "model"
        detail += f"; it drafts with the {who} alone, without lookup: both together run in qspec's own engine only"
    if served and draft.branching:
        detail += "; chains, vLLM has no trees here"
    if served and draft.head_rows:
        detail += WHOLE_HEAD
    return Served(runtime="vllm", part="draft", served=served, detail=detail)


def _transformers(recipe: Recipe, arch: ArchMap | None) -> tuple[Served, ...]:
    target = recipe.target.quantization
    weights = "loads; all weights are decompressed on the first forward, so neither speed nor memory is gained"
    if SCHEMES[target.scheme].weight is None:
        weights = "loads as an ordinary checkpoint"
    if arch is not None and arch.attention_softcap is not None:
        weights += '; pass attn_implementation="eager", its other attention leaves out soft-capping'
    lacking = transformers_lacks(target, experts=arch is not None and arch.n_experts > 0)
    if lacking is not None:
        weights = lacking
    kv = "KV in the model's dtype"
    if target.kv is not None:
        kv = f"{target.kv.format} KV is not applied: its caches do not read these scales"
    drafts, detail = kind_of(recipe.draft).in_transformers()
    return (
        Served(runtime="transformers", part="target", served=lacking is None, detail=weights),
        Served(runtime="transformers", part="kv", served=target.kv is None, detail=kv),
        Served(runtime="transformers", part="draft", served=drafts, detail=detail),
    )
