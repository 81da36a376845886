"""GGUF models: header to `config.json`, llama.cpp's tensor names and order to transformers', exact dequantization."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
import math
import mmap
from pathlib import Path
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qspec.bridges.architectures import ARCHITECTURES
from qspec.bridges.companions import notices
from qspec.bridges.hf import SPLITTERS, ByteBPE, HFTokenizer, arch_from_config, build_tokenizer
from qspec.bridges.layout import check_shapes
from qspec.errors import SourceError
from qspec.provenance import sha256_file
from qspec.records import ArchMap, LoadedModel

_AGAIN = "download it again"
_USE_FOLDER = "use the transformers folder (safetensors) of this model"


_SPECIAL = 3  # token type "control"


_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load_gguf(path: str | Path, source: Mapping[str, str] | None = None) -> LoadedModel:
    """A model from a GGUF file, dequantized exactly to float32 tensor by tensor when used.

    `source` overrides what the model records about its origin. Raises `SourceError` for what is not supported.
    """
    file = GGUFFile(path)
    config = config_from_gguf(file)
    arch = arch_from_config(config)
    tensors = GGUFTensors(file, arch)
    check_shapes(str(path), arch, {name: tensors.shape(name) for name in tensors})
    origin = {"model": str(path), "revision": "", "sha256": sha256_file(path), **(source or {})}
    return LoadedModel(arch, tensors, config, tokenizer_from_gguf(file), origin, notices(Path(path).parent).files)


class GGUFFile:
    """Header of a GGUF file. Raises `SourceError` if it is none, or is cut off."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._parse()
        except MemoryError:  # a header that claims more than there is: no memory ran out
            raise SourceError(str(path), "is not a readable GGUF file (its sizes make no sense)", _AGAIN) from None
        except (ArithmeticError, OSError, RecursionError, TypeError, ValueError, struct.error) as error:
            raise SourceError(str(path), f"is not a readable GGUF file ({error})", _AGAIN) from error

    def read(self, name: str, size: int) -> memoryview:
        """The `size` bytes of a tensor, mapped, not copied."""
        start = self.tensors[name].offset
        if start + size > len(self._map):
            raise SourceError(f"{self.path}: {name}", "lies beyond the end of the file", _AGAIN)
        return memoryview(self._map)[start : start + size]

    def _parse(self) -> None:
        cursor = _Cursor(self._map)
        magic, version = cursor.numbers("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        n_tensors, n_values = cursor.numbers("QQ")
        for _ in range(n_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.numbers("I")[0])
        infos = [cursor.tensor_info() for _ in range(n_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that transformers would need for this file."""
    kind = str(file.metadata.get("general.architecture"))
    row = ARCHITECTURES.get(kind)
    if row is None or row.gguf is None:
        known = (name for name, other in ARCHITECTURES.items() if other.gguf)
        rule = "is not supported from a GGUF file, only " + ", ".join(known)
        raise SourceError(f"{file.path}: architecture {kind!r}", rule, _USE_FOLDER)
    if any(name.startswith("rope_freqs") for name in file.tensors):
        raise SourceError(f"{file.path}: rope_freqs", "stores rotary factors without their rule (llama3)", _USE_FOLDER)
    if file.metadata.get(f"{kind}.expert_count"):
        raise SourceError(f"{file.path}: architecture {kind!r}", "has a mixture of experts", _USE_FOLDER)
    heads = int(_need(file, f"{kind}.attention.head_count"))
    hidden = int(_need(file, f"{kind}.embedding_length"))
    head_dim = file.metadata.get(f"{kind}.attention.key_length", hidden // heads)
    config = {
        "architectures": [row.gguf],
        "model_type": kind,
        "vocab_size": _embedding(file).shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(_need(file, f"{kind}.feed_forward_length")),
        "num_hidden_layers": int(_need(file, f"{kind}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.metadata.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": int(head_dim),
        "max_position_embeddings": int(_need(file, f"{kind}.context_length")),
        "rms_norm_eps": _shortest(_need(file, f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(file, kind, int(head_dim)),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": not row.qkv_bias and "blk.0.attn_q.bias" in file.tensors,
        "dtype": "float32",
    }
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_KEYS.items()}
    return config | {name: int(i) for name, i in ids.items() if i is not None}


def tokenizer_from_gguf(file: GGUFFile) -> HFTokenizer:
    """The model's tokenizer rebuilt from tokens, merges and token types; only byte-level BPE."""
    data = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    splitter = str(data.get("pre"))
    if data.get("model") != "gpt2" or splitter not in SPLITTERS:
        rule = "is not supported from a GGUF file, only byte-level BPE split as " + ", ".join(SPLITTERS)
        raise SourceError(f"{file.path}: tokenizer {data.get('model')!r} / {data.get('pre')!r}", rule, _USE_FOLDER)
    try:
        return build_tokenizer(_byte_bpe(file, data, splitter))
    except SourceError:
        raise
    except Exception as error:  # from IndexError to the Rust parser's own type
        rule = f"cannot be built ({' '.join(str(error).split())[:120]})"
        raise SourceError(f"{file.path}: tokenizer", rule, _AGAIN) from error


def _byte_bpe(file: GGUFFile, data: Mapping[str, Any], splitter: str) -> ByteBPE:
    first, _, second = zip(*(merge.partition(" ") for merge in _need(file, "tokenizer.ggml.merges")), strict=True)
    types = _need(file, "tokenizer.ggml.token_type")
    return ByteBPE(
        tokens=_need(file, "tokenizer.ggml.tokens"),
        merges=list(zip(first, second, strict=True)),
        special_ids=[i for i, kind in enumerate(types) if kind == _SPECIAL],
        splitter=splitter,
        bos_id=data.get("bos_token_id"),
        eos_id=data.get("eos_token_id"),
        pad_id=data.get("padding_token_id"),
        add_bos=bool(data.get("add_bos_token", False)),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        max_length=file.metadata.get(f"{file.metadata['general.architecture']}.context_length"),
    )


class GGUFTensors(Mapping[str, Tensor]):
    """float32 tensors by transformers' name, each dequantized anew when it is asked for."""

    def __init__(self, file: GGUFFile, arch: ArchMap) -> None:
        self._file, self._arch = file, arch

    @cached_property
    def _names(self) -> dict[str, str]:
        return {_transformers_name(self._file, name): name for name in self._file.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def __getitem__(self, name: str) -> Tensor:
        values = torch.from_numpy(_dequantize(self._file, self._names[name]))
        heads = {"q_proj": self._arch.n_heads, "k_proj": self._arch.n_kv_heads}.get(name.split(".")[-2])
        interleaved = ARCHITECTURES[self._arch.model_type].interleaved
        return _unpermute(values, heads) if interleaved and heads is not None else values

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _rope_parameters(file: GGUFFile, kind: str, head_dim: int) -> dict[str, Any]:
    data = file.metadata
    rotated = int(data.get(f"{kind}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise SourceError(f"{file.path}: rope.dimension_count {rotated}", "heads are rotated whole", _USE_FOLDER)
    parameters = {"rope_type": "default", "rope_theta": _shortest(data.get(f"{kind}.rope.freq_base", 10000.0))}
    scaling = data.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        return parameters | {"rope_type": "linear", "factor": _shortest(_need(file, f"{kind}.rope.scaling.factor"))}
    if scaling != "none":
        raise SourceError(f"{file.path}: rope scaling {scaling!r}", "is not supported from a GGUF file", _USE_FOLDER)
    return parameters


def _transformers_name(file: GGUFFile, name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{leaf}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or part not in _PARTS:
        raise SourceError(f"{file.path}: {name}", "is no part of a supported model", _USE_FOLDER)
    return f"model.layers.{block}.{_PARTS[part]}.{leaf}"


def _dequantize(file: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    import gguf

    info = file.tensors[name]
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.frombuffer(file.read(name, info.numel // block * size), dtype=np.uint8)
        values = gguf.quants.dequantize(rows.reshape(*info.shape[:-1], -1), kind)
    except (KeyError, ValueError, NotImplementedError) as error:
        rule = f"is stored in a type that gguf cannot read ({error})"
        raise SourceError(f"{file.path}: {name}", rule, _USE_FOLDER) from error
    return np.array(values, dtype=np.float32).reshape(info.shape)


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from llama.cpp's interleaved rotary order back to transformers' two halves."""
    split = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order (GGUF writes it reversed); `kind` is ggml's type number."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _embedding(file: GGUFFile) -> TensorInfo:
    if "token_embd.weight" not in file.tensors:
        raise SourceError(f"{file.path}: token_embd.weight", "is missing", "download the file again")
    return file.tensors["token_embd.weight"]


def _need(file: GGUFFile, key: str) -> Any:
    if key not in file.metadata:
        raise SourceError(f"{file.path}: {key}", "the header lacks this entry", _USE_FOLDER)
    return file.metadata[key]


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32 (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{codes}", self.data, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return values

    def string(self) -> str:
        (size,) = self.numbers("Q")
        if self.at + size > len(self.data):
            raise ValueError("text beyond the end of the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if of in _CODES:
                return list(self.numbers(f"{count}{_CODES[of]}"))
            return [self.value(of) for _ in range(count)]
        if kind not in _CODES:
            raise ValueError(f"value type {kind}")
        return self.numbers(_CODES[kind])[0]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (n_dims,) = self.numbers("I")
        shape = self.numbers(f"{n_dims}Q")
        kind, offset = self.numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset
