"""Which models qspec reads, and what it says of those that it does not."""

from collections.abc import Mapping
import math
from typing import Any

from qspec.errors import SourceError
from qspec.records import ArchMap

SUPPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3")
FIX_CONFIG = "correct config.json, or download the model again"
USE_SUPPORTED = "use a model of type " + ", ".join(SUPPORTED)

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000

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
    if kind not in SUPPORTED:
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


def require_sizes(arch: ArchMap) -> None:
    """Refuse sizes that no model has, and rotary frequencies that are not finite; raises `SourceError`."""
    sizes = {
        "num_hidden_layers": arch.n_layers,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_attention_heads": arch.n_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_positions,
    }
    for name, size in sizes.items():
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        if not 1 <= size <= most:
            raise SourceError(f"config.json: {name} {size}", f"must be 1 to {most}", FIX_CONFIG)
    if arch.n_experts and not 1 <= arch.experts_per_token <= arch.n_experts:
        rule = f"must be 1 to the number of experts, {arch.n_experts}"
        raise SourceError(f"config.json: num_experts_per_tok {arch.experts_per_token}", rule, FIX_CONFIG)
    if arch.n_experts and not 1 <= arch.expert_size <= _MOST:
        raise SourceError(f"config.json: size {arch.expert_size} of an expert", f"must be 1 to {_MOST}", FIX_CONFIG)
    if arch.head_dim % 2:
        raise SourceError(f"config.json: head_dim {arch.head_dim}", "must be even to be rotated", FIX_CONFIG)
    if not all(math.isfinite(frequency) for frequency in arch.rope_inv_freq + arch.window_inv_freq):
        raise SourceError("config.json: rope_parameters", "give frequencies that are not finite", FIX_CONFIG)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Name of the method that quantized a checkpoint (`unnamed` if it does not say); None for a float model."""
    entry = config.get("quantization_config")
    if not entry:
        return None
    return str(entry.get("quant_method", "unnamed") if isinstance(entry, Mapping) else "unnamed")
