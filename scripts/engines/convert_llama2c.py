"""Write a model of llama2.c (`*.bin` and its `tok*.bin`) as an ordinary transformers folder.

    python scripts/engines/convert_llama2c.py stories260K.bin tok512.bin runs/stories260K

Formats: karpathy/llama2.c, `export.py` (version 0, float32) and `tokenizer.py`.
"""

import argparse
from collections.abc import Iterator
import json
from math import prod
from pathlib import Path
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from qspec.bridges.tensors import write_tensors
from qspec.provenance import staged_dir

BOS, EOS, BYTES = 1, 2, 3  # ids: <unk>, <s>, </s>, then 256 bytes, then pieces
STANDARD = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
LAYER = "model.layers.{}."


class Header(NamedTuple):
    """The first seven int32 of a model file; a negative `vocab_size` says that the head is a matrix of its own."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int


def convert(model: Path, tokenizer: Path, folder: Path) -> Path:
    """Write `folder` whole or not at all, and return it."""
    header, tensors = read_model(model)
    with staged_dir(folder) as staged:
        write_tensors(staged / "model.safetensors", tensors)
        write_tokenizer(staged, read_pieces(tokenizer), header.context)
        config = json.dumps(config_of(header), indent=2)
        (staged / "config.json").write_text(config + "\n", encoding="utf-8")
    return folder


def config_of(header: Header) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": header.dim,
        "intermediate_size": header.hidden,
        "num_hidden_layers": header.layers,
        "num_attention_heads": header.heads,
        "num_key_value_heads": header.kv_heads,
        "vocab_size": abs(header.vocab_size),
        "max_position_embeddings": header.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": header.vocab_size > 0,
        "bos_token_id": BOS,
        "eos_token_id": [BOS, EOS],  # in training text, a story ends where the next one begins
        "dtype": "float32",
    }


def read_model(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Shape, and tensors by transformers' names."""
    data = bytearray(path.read_bytes())
    header = Header._make(struct.unpack_from("<7i", data))
    flat = torch.frombuffer(data, dtype=torch.float32, offset=struct.calcsize("<7i"))
    dim, hidden, n, vocab = header.dim, header.hidden, header.layers, abs(header.vocab_size)
    kv, rotary = dim // header.heads * header.kv_heads, dim // header.heads // 2
    stored = {
        "model.embed_tokens": (vocab, dim),
        LAYER + "input_layernorm": (n, dim),
        LAYER + "self_attn.q_proj": (n, dim, dim),
        LAYER + "self_attn.k_proj": (n, kv, dim),
        LAYER + "self_attn.v_proj": (n, kv, dim),
        LAYER + "self_attn.o_proj": (n, dim, dim),
        LAYER + "post_attention_layernorm": (n, dim),
        LAYER + "mlp.gate_proj": (n, hidden, dim),
        LAYER + "mlp.down_proj": (n, dim, hidden),
        LAYER + "mlp.up_proj": (n, hidden, dim),
        "model.norm": (dim,),
        "cosines and sines": (2, header.context, rotary),
        "lm_head": (vocab if header.vocab_size < 0 else 0, dim),
    }
    parts = flat.split([prod(shape) for shape in stored.values()])
    whole = {name: part.view(shape) for (name, shape), part in zip(stored.items(), parts, strict=True) if part.numel()}
    del whole["cosines and sines"]
    for name, heads in (("q_proj", header.heads), ("k_proj", header.kv_heads)):
        whole[LAYER + f"self_attn.{name}"] = half_split(whole[LAYER + f"self_attn.{name}"], heads)
    return header, dict(_by_layer(whole))


def half_split(w_LNK: Tensor, heads: int) -> Tensor:
    """Rows of each head reordered: llama2.c rotates neighbours, transformers row `i` with row `i + head_dim / 2`."""
    pairs: Tensor = w_LNK.unflatten(1, (heads, -1, 2))
    return pairs.transpose(2, 3).flatten(1, 3)


def _by_layer(whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in whole.items():
        if "{}" in name:
            yield from ((f"{name.format(i)}.weight", part) for i, part in enumerate(tensor))
        else:
            yield f"{name}.weight", tensor


def read_pieces(path: Path) -> list[tuple[str, float]]:
    """Text and score of every token behind the standard ones; of equal pieces the first counts."""
    data, pieces, at = path.read_bytes(), list[tuple[str, float]](), struct.calcsize("<i")
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        at += struct.calcsize("<fi") + length
        pieces.append((data[at - length : at].decode(), score))
    return pieces[len(STANDARD) :]


def write_tokenizer(folder: Path, pieces: list[tuple[str, float]], context: int) -> None:
    """Tokenizer files that encode as llama2.c does: a space first, then the pair of best score until none is left."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*STANDARD, *(text for text, _ in pieces)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocabulary, merges(pieces), unk_token=tokens[0], fuse_unk=False, byte_fallback=True)
    inner = Tokenizer(bpe)
    inner.normalizer = normalizers.Prepend(" ")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:BYTES]])
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=tokens[0],
        bos_token=tokens[BOS],
        eos_token=tokens[EOS],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best score first."""
    known = {text for text, _ in pieces}
    best_first = sorted(pieces, key=lambda piece: -piece[1])
    splits = ((text[:i], text[i:]) for text, _ in best_first for i in range(1, len(text)))
    return [(a, b) for a, b in splits if a in known and b in known]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    print(convert(**vars(parser.parse_args())))
