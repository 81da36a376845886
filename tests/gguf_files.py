"""Small GGUF files, written by the `gguf` library itself in llama.cpp's names and row order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from qspec.records import LoadedModel

Q = gguf.GGMLQuantizationType
TOKENS = ["<|end|>", "<|im|>", *sorted(gpt2 for gpt2 in map(chr, range(33, 127))), "Ġ", "ab", "Ġab"]
HEADER: dict[str, Any] = {"pre": "gpt-2", "model": "gpt2"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def ggml_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if not name.startswith(("model.", "lm_head")):
        return name
    if stem in NAMES:
        return f"{NAMES[stem]}.{leaf}"
    _, _, block, part = stem.split(".", 3)
    return f"blk.{block}.{NAMES[part]}.{leaf}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order, as its converter writes it."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path, model: LoadedModel, kind: Q = Q.F32, header: Mapping[str, Any] = HEADER, **extra: Any
) -> Path:
    """`model` as a GGUF file. `extra` are further float or text entries, `__` standing for a dot."""
    arch = model.arch
    out = gguf.GGUFWriter(str(path), arch.model_type)
    out.add_context_length(arch.max_positions)
    out.add_embedding_length(arch.hidden_size)
    out.add_block_count(arch.n_layers)
    out.add_feed_forward_length(arch.intermediate_size)
    out.add_head_count(arch.n_heads)
    out.add_head_count_kv(arch.n_kv_heads)
    out.add_key_length(arch.head_dim)
    out.add_layer_norm_rms_eps(arch.norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_tokenizer_model(header["model"])
    out.add_tokenizer_pre(header["pre"])
    out.add_token_list(TOKENS)
    out.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    out.add_token_merges(["a b", "Ġ ab"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(0)
    for key, value in extra.items():
        (out.add_string if isinstance(value, str) else out.add_float32)(key.replace("__", "."), value)
    for name, tensor in model.tensors.items():
        values = tensor.numpy()
        if arch.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permute(values, arch.n_heads if "q_proj" in name else arch.n_kv_heads)
        packed = kind if values.ndim == 2 else Q.F32
        out.add_tensor(ggml_name(name), gguf.quants.quantize(values, packed), raw_dtype=packed)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
