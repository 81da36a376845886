"""Which models qspec reads, one row each of what they do otherwise than Llama, and what it says of the others.

A model that differs in nothing else is supported by its row alone: `hf` reads its config by it, `layout` its tensors,
`gguf` its GGUF file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qspec.errors import SourceError
from qspec.records import ArchMap


@dataclass(frozen=True)
class Architecture:
    """Differences to Llama. Fields of configs are transformers' names.

    gguf: the class that a GGUF file of this kind becomes in transformers; None: read from folders alone.
    interleaved: llama.cpp stores the rotary halves of queries and keys in turns.
    gemma: norms add one to their gain, embeddings are scaled by the root of the hidden size.
    post_norms: norms behind attention and MLP too, a scale of its own and soft caps (Gemma 2 and 3).
    qkv_bias: q, k and v have a bias, and o has none, whatever `attention_bias` says.
    by_layer_type: rotary frequencies differ between windowed and full layers.
    partial_rotary: heads may be rotated in part.
    capped: attention scores may be soft-capped.
    experts: the spelling of a mixture in its config. stored: how layers are joined or named on disk.
    """

    gguf: str | None = None
    interleaved: bool = False
    gemma: bool = False
    post_norms: bool = False
    capped: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    by_layer_type: bool = False
    partial_rotary: bool = False
    experts: Literal["none", "mixtral", "qwen3"] = "none"
    stored: Literal["apart", "joined", "mixtral"] = "apart"


ARCHITECTURES = {
    "llama": Architecture(gguf="LlamaForCausalLM", interleaved=True),
    "mistral": Architecture(),
    "mixtral": Architecture(experts="mixtral", stored="mixtral"),
    "qwen2": Architecture(gguf="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture(gguf="Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Architecture(qk_norm=True, experts="qwen3"),
    "gemma": Architecture(gemma=True),
    "gemma2": Architecture(gemma=True, post_norms=True, capped=True),
    "gemma3_text": Architecture(gemma=True, post_norms=True, qk_norm=True, by_layer_type=True),
    "phi3": Architecture(partial_rotary=True, stored="joined"),
}

FIX_CONFIG = "correct config.json, or download the model again"
USE_SUPPORTED = "use a model of type " + ", ".join(ARCHITECTURES)

_FLOATS = ("float32", "bfloat16", "float16", "float64")

SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "sliding_window": (1 << 31) - 1,
    "num_local_experts": 1 << 12,
    "num_experts": 1 << 12,
    "moe_intermediate_size": 1 << 20,
    "num_labels": 1 << 16,
}
"""The most of each size in a `config.json`, several times what any model has: lists as long are made before weights are
seen."""
_MOST_EXPERTS = 1 << 20
"""The most experts of all layers together."""
_NUMBERS = {
    "rms_norm_eps": (1e-12, 1.0),
    "attention scale": (1e-6, 1e3),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
    "rotary frequency": (1e-12, 1e3),
    "rotary attention factor": (1e-3, 1e3),
}
"""Ranges in which float32 computes with a setting, far outside of what models have."""

# What stands between qspec and a model: known types, then config fields whose presence shows it.
_TYPES = {
    "gemma3": "a vision tower",
    "gpt2": "learned positions and LayerNorm",
    "mamba": "a state-space layer",
    "mamba2": "a state-space layer",
    "qwen2_moe": "an expert that every token goes to",
    "t5": "an encoder",
}
_FIELDS = {
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "kv_lora_rank": "multi-head latent attention",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "state_size": "a state-space layer",
    "ssm_cfg": "a state-space layer",
    "mamba_d_state": "a state-space layer",
    "attn_logit_softcapping": "logit soft-capping",
    "final_logit_softcapping": "logit soft-capping",
    "is_encoder_decoder": "an encoder",
    "auto_map": "code that comes with the model, which is never run",
}


def supported_type(config: Mapping[str, Any]) -> str:
    """`model_type` of a `config.json`, or `SourceError` naming the type and what is missing for it."""
    kind = str(config.get("model_type") or "")
    if not kind:
        raise SourceError("config.json", "does not name its model_type", USE_SUPPORTED)
    if kind not in ARCHITECTURES:
        present = (what for field, what in _FIELDS.items() if config.get(field))
        missing = _TYPES.get(kind) or next(present, "a layer layout that qspec does not know")
        raise SourceError(f"model_type {kind!r}", f"is not supported: it needs {missing}", USE_SUPPORTED)
    method = quantization_method(config)
    if method not in (None, "compressed-tensors"):
        raise SourceError(
            f"model_type {kind!r} quantized by {method!r}",
            "only float models and compressed-tensors checkpoints are read",
            "give the float model that it was made from",
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _FLOATS:
        raise SourceError(f"config.json: dtype {dtype!r}", f"must be one of {', '.join(_FLOATS)}", FIX_CONFIG)
    return kind


def require_sizes(sizes: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, of those that are given; raises `SourceError`."""
    for name, most in SIZES.items():
        size, least = sizes.get(name), 0 if "expert" in name or "moe" in name else 1
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not least <= size <= most):
            raise SourceError(f"config.json: {name} {size!r:.60}", f"must be {least} to {most}", FIX_CONFIG)


def require_numbers(arch: ArchMap) -> None:
    """Refuse settings with which nothing can be computed; raises `SourceError`."""
    sizes = {
        "num_hidden_layers": arch.n_layers,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_positions,
        "sliding_window": arch.sliding_window,
        "num_experts": arch.n_experts,
        "moe_intermediate_size": arch.expert_size,
    }
    require_sizes(sizes)
    if arch.n_experts and not 1 <= arch.experts_per_token <= arch.n_experts:
        rule = f"must be 1 to the number of experts, {arch.n_experts}"
        raise SourceError(f"config.json: num_experts_per_tok {arch.experts_per_token}", rule, FIX_CONFIG)
    if arch.n_experts and not arch.expert_size:
        raise SourceError("config.json: experts of size 0", "must be 1 at least", FIX_CONFIG)
    if arch.n_experts * arch.n_layers > _MOST_EXPERTS:
        value = f"config.json: {arch.n_experts} experts in {arch.n_layers} layers"
        raise SourceError(value, f"must be {_MOST_EXPERTS} at most", FIX_CONFIG)
    if arch.head_dim % 2 or 2 * len(arch.rope_inv_freq) > arch.head_dim:
        value = f"config.json: head_dim {arch.head_dim}, {2 * len(arch.rope_inv_freq)} dimensions to rotate"
        raise SourceError(value, "both must be even, and the first not the smaller one", FIX_CONFIG)
    if arch.window_inv_freq and len(arch.window_inv_freq) != len(arch.rope_inv_freq):
        raise SourceError("config.json: rope_parameters", "rotate other dimensions within windows", FIX_CONFIG)
    frequencies = arch.rope_inv_freq + arch.window_inv_freq
    numbers = [
        ("rms_norm_eps", arch.norm_eps),
        ("attention scale", arch.attention_scale),
        ("attn_logit_softcapping", arch.attention_softcap),
        ("final_logit_softcapping", arch.logit_softcap),
        ("rotary attention factor", arch.rope_factor),
        *(("rotary frequency", frequency) for frequency in frequencies),
    ]
    for name, number in numbers:
        low, high = _NUMBERS[name]
        if number is not None and not (isinstance(number, float) and low <= number <= high):
            raise SourceError(f"config.json: {name} {number}", f"must be {low:g} to {high:g}", FIX_CONFIG)


def require_float(source: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that is quantized already; raises `SourceError`."""
    method = quantization_method(config)
    if method is not None:
        fix = "give the float model that it was made from"
        raise SourceError(source, f"is already quantized (method {method!r})", fix)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Name of the method that quantized a checkpoint (`unnamed` if it does not say); None for a float model."""
    entry = config.get("quantization_config")
    if not entry:
        return None
    return str(entry.get("quant_method", "unnamed") if isinstance(entry, Mapping) else "unnamed")
