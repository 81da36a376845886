"""transformers and tokenizers: what a `config.json` means, model folders, and tokenizers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
import copy
from dataclasses import dataclass
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch

from qspec.bridges.architectures import (
    ARCHITECTURES,
    FIX_CONFIG,
    USE_SUPPORTED,
    require_float,
    require_numbers,
    require_sizes,
    supported_type,
)
from qspec.bridges.companions import companions
from qspec.bridges.hub import TOKENIZER_FILES
from qspec.bridges.layout import select_tensors
from qspec.bridges.tensors import read_tensors, weights_sha256
from qspec.errors import OutputError, QspecError, RecipeError, SourceError
from qspec.limited import rehearse
from qspec.plain_files import read_bytes, read_json
from qspec.provenance import digest_of
from qspec.records import ArchMap, LoadedModel
from qspec.schema.sidecar import NAME

SPLITTERS = ("smollm", "gpt-2", "qwen2")
"""Pre-tokenizers of byte-level BPE, as GGUF names them."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FIX_TOKENIZER = "save it again with a current transformers (`tokenizer.save_pretrained`)"
_FIX_TEMPLATE = "correct its chat template, or remove it to use plain text"
_PROBE = "".join(map(chr, range(32, 127))) + " naïve Größe 模型 모델 🙂\n\t" + "".join(c * 64 for c in "aA1 !=.-_\n")
"""Text that asks something of a tokenizer: every printable character, and runs that patterns stumble on."""
_rehearsed: set[str] = set()


def arch_from_config(config: Mapping[str, Any]) -> ArchMap:
    """Shape and switches of a model from its `config.json`; transformers' own defaults for what it omits.

    Raises `SourceError` naming the model type and what is missing for it, or the field that makes no sense.
    """
    kind = supported_type(config)
    try:
        arch = _arch(kind, _typed_config(kind, config))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # a field of a type that it cannot have
        raise SourceError("config.json", f"is not a valid {kind} config ({_one_line(error)})", FIX_CONFIG) from error
    require_numbers(arch)
    return arch


def _arch(kind: str, typed: Any) -> ArchMap:
    heads, hidden = int(typed.num_attention_heads), int(typed.hidden_size)
    kv_heads = int(getattr(typed, "num_key_value_heads", None) or heads)
    if kv_heads < 1 or heads % kv_heads:
        raise SourceError(f"{heads} heads, {kv_heads} KV heads", "heads must be a multiple of KV heads", FIX_CONFIG)
    row = ARCHITECTURES[kind]
    inv_freq, rope_factor = _rope(kind, typed)
    window, full = _windows(kind, typed)
    bias = bool(getattr(typed, "attention_bias", False))
    return ArchMap(
        model_type=kind,
        architecture=_architecture(typed),
        n_layers=int(typed.num_hidden_layers),
        hidden_size=hidden,
        intermediate_size=int(typed.intermediate_size),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=_head_dim(typed),
        vocab_size=int(typed.vocab_size),
        max_positions=int(typed.max_position_embeddings),
        rope_inv_freq=inv_freq,
        rope_factor=rope_factor,
        norm_eps=float(typed.rms_norm_eps),
        norm_offset=1.0 if row.gemma else 0.0,
        embed_scale=hidden**0.5 if row.gemma else 1.0,
        activation=_activation(kind, typed),
        qk_norm=row.qk_norm,
        qkv_bias=row.qkv_bias or bias,
        o_bias=not row.qkv_bias and bias,
        mlp_bias=bool(getattr(typed, "mlp_bias", False)),
        tied=bool(typed.tie_word_embeddings),
        sliding_window=window,
        full_attention=full,
        window_inv_freq=_window_rope(kind, typed) if window else (),
        eos_ids=_eos_ids(typed.eos_token_id),
        **_post_normed(kind, typed),
        **_mixture(kind, typed),
    )


def _post_normed(kind: str, typed: Any) -> dict[str, Any]:
    """Scales and soft caps of kinds with norms behind their blocks."""
    row = ARCHITECTURES[kind]
    if not row.post_norms:
        return {}
    attention_cap, logit_cap = typed.attn_logit_softcapping, typed.final_logit_softcapping
    if not row.capped and attention_cap is not None:
        rule = "is not supported: transformers ignores it for this type"
        raise SourceError(f"model_type {kind!r} with attn_logit_softcapping", rule, USE_SUPPORTED)
    return {
        "post_norms": True,
        "attention_scale": float(typed.query_pre_attn_scalar) ** -0.5,
        "attention_softcap": None if attention_cap is None else float(attention_cap),
        "logit_softcap": None if logit_cap is None else float(logit_cap),
    }


def _mixture(kind: str, typed: Any) -> dict[str, Any]:
    """Sizes and rules of a mixture of experts; empty for a model without."""
    spelling = ARCHITECTURES[kind].experts
    if spelling == "none" or not int(typed.num_local_experts):
        return {}
    mixtral = spelling == "mixtral"
    layers = range(0 if mixtral else int(typed.num_hidden_layers))
    dense = [i for i in layers if i in typed.mlp_only_layers or (i + 1) % int(typed.decoder_sparse_step)]
    return {
        "n_experts": int(typed.num_local_experts),
        "experts_per_token": int(typed.num_experts_per_tok),
        "expert_size": int(typed.intermediate_size if mixtral else typed.moe_intermediate_size),
        "normed_routing": mixtral or bool(typed.norm_topk_prob),
        "dense_layers": tuple(dense),
    }


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder, with the stop tokens of its `generation_config.json` merged in."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise SourceError(str(folder), "holds no config.json", "give the folder of a transformers model")
    config = read_json(path, SourceError, FIX_CONFIG)
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        ids = sorted({*_eos_ids(config.get("eos_token_id")), *_eos_ids(read_json(generation).get("eos_token_id"))})
        if ids:
            config["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return config


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` to write back: no quantization state, no path it came from, no code to run."""
    dropped = ("quantization_config", "_name_or_path", "auto_map", "_source")
    clean = {key: copy.deepcopy(value) for key, value in config.items() if key not in dropped}
    if clean.get("model_type") == "gemma" and clean.get("hidden_act") == "gelu":
        clean["hidden_act"] = "gelu_pytorch_tanh"  # what old Gemma files mean; transformers 5 takes them at their word
    return clean


def load_folder(folder: str | Path, source: Mapping[str, str] | None = None) -> LoadedModel:
    """A float model from a transformers folder; tensors are memory-mapped when they are used.

    `source` overrides what the model records about its origin. Raises `SourceError` for a quantized or unsupported
    model, and for weights that are not exactly those of the architecture.
    """
    folder = Path(folder)
    rehearse_files(folder, "a model", lambda: _try_out_folder(folder))
    config = read_config(folder)
    arch = arch_from_config(config)
    require_float(str(folder), config)
    tensors = select_tensors(str(folder), read_tensors(folder), arch)
    origin = {"model": str(folder), "revision": "", "sha256": weights_sha256(folder), **(source or {})}
    beside = companions(folder)
    return LoadedModel(
        arch, tensors, clean_config(config), open_tokenizer(folder), origin, beside.files, beside.left_out
    )


def _try_out_folder(folder: Path) -> None:
    arch_from_config(read_config(folder))
    try_out(open_tokenizer(folder))


def open_trainable(folder: Path, arch: ArchMap) -> torch.nn.Module:
    """transformers' own model of a float folder, in float32, for gradients; layers that drop out at random are off."""
    from transformers import AutoModelForCausalLM

    capped = {} if arch.attention_softcap is None else {"attn_implementation": "eager"}  # others leave the cap out
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **capped)
    model: torch.nn.Module = loaded.eval()
    return model


def rehearse_files(folder: Path, what: str, work: Callable[[], object]) -> None:
    """`limited.rehearse` of work on a folder's files beside its weights: once in a process for each content."""
    files = {name: read_bytes(folder / name) for name in (*TOKENIZER_FILES, NAME) if os.path.lexists(folder / name)}
    key = digest_of([what, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}])
    if key not in _rehearsed:
        rehearse(work, str(folder), sum(map(len, files.values())))
        _rehearsed.add(key)


def load_tokenizer(folder: str | Path) -> "HFTokenizer":
    """The tokenizer saved in a model folder, as transformers (and the engines built on it) loads it.

    It, and its chat template, have been tried out in a process with limits.
    """
    path = Path(folder)
    rehearse_files(path, "a tokenizer", lambda: try_out(open_tokenizer(path)))
    return open_tokenizer(path)


@contextmanager
def _without_mistral_advice(folder: Path) -> Iterator[None]:
    """transformers tells every large tokenizer whose config has no version to mend Mistral's pattern; here those of
    Mistral kinds alone hear it.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    log = logging.getLogger("transformers.tokenization_utils_tokenizers")

    def other(record: logging.LogRecord) -> bool:
        return "fix_mistral_regex" not in record.getMessage()

    if "mistral" not in str(config.get("model_type", "mistral")):
        log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


def open_tokenizer(folder: Path) -> "HFTokenizer":
    """`load_tokenizer`, for files that were tried out before."""
    from transformers import AutoTokenizer

    path = folder
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise SourceError(str(path), "holds no tokenizer", "add tokenizer.json and tokenizer_config.json to the folder")
    try:
        with _without_mistral_advice(path):
            inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # from KeyError to the Rust parser's own type
        raise SourceError(str(path), f"has an unreadable tokenizer ({_one_line(error)})", _FIX_TOKENIZER) from error
    if getattr(inner, "backend_tokenizer", None) is None:
        raise SourceError(str(path), "has a tokenizer without a tokenizer.json form", _FIX_TOKENIZER)
    return HFTokenizer(inner, str(path))


def try_out(tokenizer: "HFTokenizer", rows: int | None = None) -> None:
    """Let a tokenizer and its chat template serve a few requests. rows: of the embedding that its ids index."""
    for ids in (tokenizer.encode(_PROBE), *(tokenizer.trial(text) for text in ("?", _PROBE))):
        tokenizer.decode(ids)
        if rows is not None and (beyond := [i for i in ids if not 0 <= i < rows]):
            rule = f"gives token {beyond[0]}, the embedding has {rows} rows"
            raise SourceError(tokenizer.where, rule, "give the tokenizer that belongs to the model")


class HFTokenizer:
    """`records.Tokenizer` on a transformers fast tokenizer. `where`: what messages call it."""

    def __init__(self, inner: Any, where: str = "tokenizer") -> None:
        self.inner, self.where = inner, where

    def encode(self, text: str, special: bool = True) -> list[int]:
        _require_unicode(text)
        return [int(i) for i in self.inner.encode(text, add_special_tokens=special, verbose=False)]

    def trial(self, text: str) -> list[int]:
        """A request through the chat template, if there is one; raises `SourceError` if the template is at fault."""
        if not self.inner.chat_template:
            return []
        try:
            tokens = self.chat([{"role": "user", "content": text}])
        except QspecError as error:
            rule = f"has a chat template that fails ({_one_line(error.__cause__ or error)})"
            raise SourceError(self.where, rule, _FIX_TEMPLATE) from error
        if not tokens:
            raise SourceError(self.where, "has a chat template that gives no tokens", _FIX_TEMPLATE)
        return tokens

    def decode(self, ids: list[int]) -> str:
        text: str = self.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.inner.chat_template:
            raise SourceError("tokenizer", "has no chat template", "use a chat (instruct) model, or plain text prompts")
        for message in messages:
            _require_unicode(message["content"])
        try:
            ids = self.inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # whatever the template's code raises
            rule = f"do not fit the chat template ({_one_line(error)})"
            raise RecipeError("messages", rule, "change their roles, or their order") from error
        return [int(i) for i in ids]

    def fingerprint(self) -> str:
        special, template = self._special(), self.inner.chat_template or ""
        parts = {"pipeline": self._pipeline(), "special": special, "template": template}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def parts(self) -> dict[str, Any]:
        pipeline = self._pipeline()
        model, added = dict(pipeline.pop("model")), pipeline.pop("added_tokens", [])
        vocabulary, merges = model.pop("vocab", {}), model.pop("merges", [])
        tables = {"vocabulary": vocabulary, "merges": merges, "added tokens": added, "special tokens": self._special()}
        return tables | {"splitting": [pipeline, model], "chat template": self.inner.chat_template or ""}

    def _pipeline(self) -> dict[str, Any]:
        state = json.loads(self.inner.backend_tokenizer.to_str())
        return {key: value for key, value in state.items() if key not in ("padding", "truncation")}

    def _special(self) -> dict[str, str]:
        return {name: str(token) for name, token in self.inner.special_tokens_map.items()}

    def vocabulary(self) -> dict[str, int]:
        """Id of every token, added ones included: what a target and its draft must agree on."""
        return {str(token): int(i) for token, i in self.inner.get_vocab().items()}

    def save(self, folder: Path) -> None:
        try:
            self.inner.save_pretrained(str(folder))
        except Exception as error:  # the Rust writer's own type
            rule = f"tokenizer cannot be written ({_one_line(error)})"
            raise OutputError(str(folder), rule, "choose an output folder with space and write permission") from error


@dataclass(frozen=True)
class ByteBPE:
    """A byte-level BPE tokenizer as plain data (what a GGUF header holds). `merges` are pairs of tokens."""

    tokens: Sequence[str]
    merges: Sequence[tuple[str, str]]
    special_ids: Collection[int]
    splitter: str  # one of SPLITTERS
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool = False
    chat_template: str | None = None
    max_length: int | None = None


def build_tokenizer(spec: ByteBPE) -> HFTokenizer:
    """A working tokenizer from its parts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spec.tokens)}, merges=list(spec.merges)))
    inner.normalizer, inner.pre_tokenizer = _splitter(spec.splitter)
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(spec.tokens[i], special=True, normalized=False) for i in sorted(spec.special_ids)]
    inner.add_special_tokens(special)
    if spec.add_bos and spec.bos_id is not None:
        bos = spec.tokens[spec.bos_id]
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, spec.bos_id)])
    named = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "pad_token": spec.pad_id}
    options: dict[str, Any] = {name: spec.tokens[i] for name, i in named.items() if i is not None}
    if spec.max_length is not None:
        options["model_max_length"] = spec.max_length
    if spec.chat_template is not None:
        options["chat_template"] = spec.chat_template
    backend: Any = PreTrainedTokenizerFast
    tokenizer = HFTokenizer(backend(tokenizer_object=inner, clean_up_tokenization_spaces=False, **options))
    rehearse(lambda: try_out(tokenizer), tokenizer.where)
    return tokenizer


def _splitter(name: str) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer that a byte-level BPE was trained with."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return None, gpt2
    if name == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([split, plain])


def _typed_config(kind: str, config: Mapping[str, Any]) -> Any:
    """transformers' config object, which fills in defaults and unifies old and new spellings."""
    from transformers import AutoConfig

    for name in _REQUIRED:
        if not isinstance(config.get(name), int):
            raise SourceError(f"config.json: {name}", "must be given, as a whole number", FIX_CONFIG)
    require_sizes(config)
    fields = {key: value for key, value in clean_config(config).items() if key != "model_type"}
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # its validators raise several unrelated types
        raise SourceError("config.json", f"is not a valid {kind} config ({_one_line(error)})", FIX_CONFIG) from error


def _head_dim(typed: Any) -> int:
    return int(getattr(typed, "head_dim", None) or typed.hidden_size // typed.num_attention_heads)


def _rope(kind: str, typed: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies of the rotated dimensions and the factor on cos and sin, by transformers' own functions.

    `dynamic` equals no scaling up to `max_position_embeddings`, and no longer context is ever used; the others do not
    depend on the length. `longrope` does, and is refused.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    by_type = ARCHITECTURES[kind].by_layer_type
    parameters = dict((typed.rope_parameters["full_attention"] if by_type else typed.rope_parameters) or {})
    method = str(parameters.get("rope_type", "default"))
    if method not in ROPE_TYPES:
        fix = "use a model with rotary scaling " + ", ".join(ROPE_TYPES)
        rule = "is not supported" + (": its frequencies change with the text's length" if method == "longrope" else "")
        raise SourceError(f"model_type {kind!r} with rope_type {method!r}", rule, fix)
    rotated = float(parameters.get("partial_rotary_factor", 1.0))
    if rotated != 1.0 and (not ARCHITECTURES[kind].partial_rotary or not 0 < rotated < 1):
        raise SourceError(f"model_type {kind!r} with partial_rotary_factor", "heads are rotated whole", USE_SUPPORTED)
    if method == "default":
        return _frequencies(int(_head_dim(typed) * rotated), float(parameters["rope_theta"])), 1.0
    options = {"layer_type": "full_attention"} if by_type else {}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[method](typed, torch.device("cpu"), **options)
    return tuple(inv_freq.tolist()), float(factor)


def _window_rope(kind: str, typed: Any) -> tuple[float, ...]:
    """Inverse frequencies of layers with a window, where these have their own; else empty."""
    if not ARCHITECTURES[kind].by_layer_type:
        return ()
    parameters = dict(typed.rope_parameters["sliding_attention"])
    method = str(parameters.get("rope_type", "default"))
    if method != "default":
        rule = "is not supported for sliding_attention"
        raise SourceError(f"model_type {kind!r} with rope_type {method!r}", rule, "use rope_type default there")
    return _frequencies(_head_dim(typed), float(parameters["rope_theta"]))


def _frequencies(dimensions: int, base: float) -> tuple[float, ...]:
    steps = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
    return tuple((1.0 / base**steps).tolist())


def _activation(kind: str, typed: Any) -> Literal["silu", "gelu_tanh"]:
    name = str(typed.hidden_activation if ARCHITECTURES[kind].post_norms else typed.hidden_act)
    if name in ("silu", "swish"):
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return "gelu_tanh"
    raise SourceError(
        f"model_type {kind!r} with hidden_act {name!r}", "is not supported", "use silu or gelu_pytorch_tanh"
    )


def _windows(kind: str, typed: Any) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window, or None, and the numbers of the layers that it does not bind."""
    if getattr(typed, "use_bidirectional_attention", None):
        raise SourceError(f"model_type {kind!r} with bidirectional attention", "is not causal", USE_SUPPORTED)
    window, types = getattr(typed, "sliding_window", None), list(getattr(typed, "layer_types", None) or ())
    for unknown in sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise SourceError(f"model_type {kind!r} with {unknown}", "is not supported", USE_SUPPORTED)
    full = tuple(i for i, name in enumerate(types) if name == "full_attention")
    if window is None or (types and len(full) == len(types)):
        return None, ()
    return int(window), full


def _architecture(typed: Any) -> str:
    name = str((typed.architectures or [f"{typed.model_type.capitalize()}ForCausalLM"])[0])
    if not name.endswith("ForCausalLM"):
        raise SourceError(f"architecture {name!r}", "is no causal language model", "give a …ForCausalLM checkpoint")
    return name


def _eos_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` of a config (absent, one id, or several) as sorted ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise SourceError(f"eos_token_id {value!r}", "must be a token id or a list of them", FIX_CONFIG)
    return tuple(sorted(ids))


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        value = repr(text[max(0, error.start - 10) : error.end + 10])
        raise SourceError(f"text at {value}", "is no Unicode text", "mend its encoding: UTF-8 is expected") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
