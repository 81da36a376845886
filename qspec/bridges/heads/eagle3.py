"""EAGLE-3 heads on disk, in both formats: SafeAILab's, which vLLM calls native, and that of the library speculators.

| | native | speculators |
|---|---|---|
| told by | `architectures: [LlamaForCausalLMEagle3]` | `speculators_model_type: eagle3` |
| sizes | at the top | in `transformer_layer_config` |
| the only layer | `midlayer.*` | `layers.0.*` |
| ids of layers | `eagle_config.eagle_aux_hidden_state_layer_ids` | the same name at the top |
| no `norm_before_residual` | false | true |
| no `draft_vocab_size` | all ids | 32000 |

Absent in both: `norm_before_fc`, `fc_norm`, `norm_output` are false, `rope_theta` is 10000, layers are 2, L / 2 and
L - 3 of the target's L; ids count the residual that *enters* a layer, as vLLM does. `d2t`, `t2d`: what to add to a
draft's id, and which of the target's ids can be drafted. An embedding and output rows that are not stored are the
target's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qspec.bridges.architectures import SIZES
from qspec.bridges.heads.files import HeadReader, stored_modules, stored_tensors
from qspec.bridges.hf import arch_from_config
from qspec.bridges.quant_config import encode
from qspec.bridges.tensors import SINGLE, LazyTensors, read_tensors, rising_ids, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.cpp.int8_map import INPUTS, Int8Map
from qspec.nn.eagle3 import Eagle3, Eagle3Shape
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import INT8
from qspec.plain_files import read_json
from qspec.plan import LayerScheme, TensorScheme
from qspec.records import ArchMap

Format = Literal["native", "speculators"]

NATIVE, LIBRARY = "LlamaForCausalLMEagle3", "Eagle3Speculator"
_NATIVE = ([NATIVE], ["Eagle3LlamaForCausalLM"])
_LIBRARY_VERSION = "0.9.0"
"""The release of speculators whose fields are written."""
_IDS, _DRAFT_VOCAB = "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"
_LIBRARY_VOCAB = 32000
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MOST_LAYERS = 64
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "mask_hidden", "rotary_emb.inv_freq")
"""Tensors that heads may carry and this forward pass does not read; `t2d` is compared with `d2t`."""
_FIX = "give an EAGLE-3 head of this target, in SafeAILab's format or that of speculators"
_OTHER_TARGET = "use a head that was trained for this target"
_INT8 = LayerScheme("W8A8", TensorScheme(INT8, PerChannel()), INPUTS)


def read_config(folder: Path) -> dict[str, Any]:
    """The head's `config.json`. Raises `SourceError` for what is no EAGLE-3 head that drafts token by token."""
    path = folder / "config.json"
    config = read_json(path, SourceError, _FIX)
    kind, architectures = config.get("speculators_model_type"), config.get("architectures")
    if kind != "eagle3" and (kind is not None or architectures not in _NATIVE):
        value = f"speculators_model_type {kind!r}" if kind is not None else f"architectures {architectures!r:.80}"
        raise SourceError(str(path), f"has {value}, no EAGLE-3 head", _FIX)
    if _eagle(config).get("parallel_drafting") or config.get("parallel_drafting"):
        rule = "is switched on: such heads (P-EAGLE) draft in one parallel pass, which vLLM alone runs"
        raise SourceError(f"{path}: parallel_drafting", rule, "serve it by vLLM, or give a head that drafts in steps")
    return config


def format_of(config: Mapping[str, Any]) -> Format:
    """The format of a head with this `config.json`."""
    return "native" if config.get("speculators_model_type") is None else "speculators"


def read_shape(folder: Path, target: ArchMap, taps: Sequence[int] | None = None) -> Eagle3Shape:
    """Sizes and switches of a stored head for a target; reads no weights.

    taps: in place of the ids of layers that the file names, for heads whose ids count otherwise than vLLM's. Raises
    `SourceError`, and `PairError` for a head of another target.
    """
    return _shape(read_config(folder), _tensors(folder), folder, target, taps)


def read(
    folder: Path, target: ArchMap, embedding_VH: Tensor, output_VH: Tensor, taps: Sequence[int] | None = None
) -> Eagle3:
    """A head for a target of these embedding and output rows; its stored INT8 layers stay INT8.

    An embedding that is stored, and equal to the target's, is taken for that. Raises `SourceError` for what is missing,
    contradicts itself or leads out of the vocabulary; `PairError` for a head
    of another target.
    """
    stored = _tensors(folder)
    shape = _shape(read_config(folder), stored, folder, target, taps)
    if shape.own_embedding and _equal(stored["embed_tokens.weight"], embedding_VH):
        shape, stored = replace(shape, own_embedding=False), stored.without(["embed_tokens.weight"])
    reader = HeadReader(stored, folder, _names(shape.n_layers), _FIX)
    ids_D = _draft_ids(reader, stored, shape, folder) if shape.draft_vocab else None
    head = Eagle3(shape, ids_D, embedding_VH, device="meta")
    without = [] if "lm_head.weight" in stored else ["lm_head"]
    if without:
        head.lm_head.weight = nn.Parameter(_output(shape, output_VH, folder), requires_grad=False)
    reader.fill(head, without)
    unread = [name for name in reader.unread() if name not in _UNUSED and not _identity(name, shape)]
    if unread:
        rule = f"belongs to no part of the head that config.json describes ({len(unread)} such tensors)"
        raise SourceError(f"{folder}: {unread[0]}", rule, _FIX)
    return head.eval().requires_grad_(False)


def write(
    head: Eagle3,
    folder: Path,
    target: ArchMap,
    facts: Mapping[str, Any] | None = None,
    form: Format = "native",
    verifier: str = "",
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a head: `facts` go into `config.json` under `qspec`. verifier, steps: name of the target and draft length,
    which the format of speculators tells servers. dtype: of matrices that are not INT8; norms stay in float32.

    INT8 layers are written as codes and scales, and declared as compressed-tensors does.
    """
    shape, names = head.shape, _names(head.shape.n_layers, form)
    tensors = {
        name: tensor.to(dtype) if tensor.dim() == 2 and tensor.is_floating_point() and "scale" not in name else tensor
        for name, tensor in stored_tensors(head, names).items()
    }
    if head.ids_D is not None:
        drafted_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
        drafted_V[head.ids_D] = True
        tensors |= {"d2t": head.ids_D - torch.arange(len(head.ids_D)), "t2d": drafted_V}
    layer: dict[str, Any] = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": target.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": shape.rope_theta,
    }
    if shape.rope_scaling:
        layer["rope_scaling"] = dict(shape.rope_scaling)
    if shape.window:
        layer |= {"sliding_window": shape.window, "layer_types": ["sliding_attention"] * shape.n_layers}
    switches: dict[str, Any] = {name: getattr(shape, name) for name in _SWITCHES}
    common = {_DRAFT_VOCAB: shape.drafted, "target_hidden_size": shape.target_hidden, **switches, "qspec": facts or {}}
    if form == "native":
        eagle = {_IDS: list(shape.taps), "use_aux_hidden_state": True, "norm_before_fc": shape.norm_before_fc}
        config = {"architectures": [NATIVE], **layer, **common, "eagle_config": eagle}
    else:
        config = {
            "architectures": [LIBRARY],
            "speculators_model_type": "eagle3",
            "speculators_version": _LIBRARY_VERSION,
            **common,
            _IDS: list(shape.taps),
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": steps,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
            },
        }
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    schemes = {names(path)[0]: scheme for path, scheme in _schemes(head).items()}
    if any(schemes.values()):
        config["quantization_config"] = encode(schemes, None, version("compressed-tensors"))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / SINGLE, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(folder: Path) -> LazyTensors:
    if not list(folder.glob("*.safetensors*")) and (pickles := sorted(folder.glob("*.bin"))):
        fix = (
            'save it again: python -c "import torch; from safetensors.torch import save_file; '
            f"save_file(torch.load('{pickles[0].name}', weights_only=True), '{SINGLE}')\""
        )
        raise SourceError(str(pickles[0]), "is a pickle, which is never read as weights", fix)
    return read_tensors(folder)


def _names(layers: int, form: Format = "native") -> Any:
    """Names of tensors by the path of a module; the only layer has two, and the first is that of `form`."""

    def names(path: str) -> list[str]:
        if layers > 1 or not path.startswith("layers.0."):
            return [path]
        both = [path.replace("layers.0.", "midlayer."), path]
        return both if form == "native" else both[::-1]

    return names


def _schemes(head: Eagle3) -> dict[str, LayerScheme | None]:
    """How each linear layer is stored; None: in float."""
    return {
        paths[0]: _INT8 if isinstance(module, Int8Map) else None
        for paths, module in stored_modules(head)
        if isinstance(module, Int8Map | nn.Linear)
    }


def _eagle(config: Mapping[str, Any]) -> Mapping[str, Any]:
    eagle = config.get("eagle_config") or {}
    return eagle if isinstance(eagle, Mapping) else {}


def _shape(
    config: Mapping[str, Any], stored: LazyTensors, folder: Path, target: ArchMap, taps: Sequence[int] | None
) -> Eagle3Shape:
    where = f"{folder}/config.json"
    try:
        shape = _described(config, stored, folder, target, taps)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # fields of other types
        raise SourceError(where, f"does not describe an EAGLE-3 head ({str(error)[:200]!r})", _FIX) from error
    _require_fit(shape, config, stored, folder, given=taps is not None)
    return shape


def _described(
    config: Mapping[str, Any], stored: LazyTensors, folder: Path, target: ArchMap, taps: Sequence[int] | None
) -> Eagle3Shape:
    where, library = f"{folder}/config.json", format_of(config) == "speculators"
    layer = dict(config.get("transformer_layer_config") or {} if library else config)
    layer.setdefault("num_hidden_layers", 1)
    theta, scaling = _rotations(layer, where)
    window = _window(layer, where)
    plain = {k: v for k, v in layer.items() if k not in ("architectures", "rope_theta", "rope_scaling", "auto_map")}
    arch = arch_from_config(plain | {"rope_parameters": {"rope_type": "default", **dict(scaling), "rope_theta": theta}})
    if arch.model_type not in ("llama", "qwen3") or arch.activation != "silu" or arch.qkv_bias or arch.mlp_bias:
        rule = "is no Llama or Qwen3 layer without biases, which a head is made of"
        raise SourceError(f"{where}: model_type {arch.model_type!r}", rule, _FIX)
    if arch.n_layers > _MOST_LAYERS:
        raise SourceError(f"{where}: num_hidden_layers {arch.n_layers}", f"must be 1 to {_MOST_LAYERS}", _FIX)
    if arch.vocab_size != target.vocab_size:
        raise PairError(
            f"{folder.name}: vocab_size {arch.vocab_size}", f"the target has {target.vocab_size}", _OTHER_TARGET
        )
    drafted = config.get(_DRAFT_VOCAB, _LIBRARY_VOCAB if library else None) or arch.vocab_size
    if type(drafted) is not int or not 1 <= drafted <= min(arch.vocab_size, SIZES["vocab_size"]):
        raise SourceError(f"{where}: {_DRAFT_VOCAB} {drafted!r:.60}", f"must be 1 to {arch.vocab_size}", _FIX)
    numbers = _taps(config, where, target) if taps is None else tuple(sorted(set(taps)))
    return Eagle3Shape(
        hidden_size=arch.hidden_size,
        target_hidden=target.hidden_size,
        taps=numbers,
        intermediate_size=arch.intermediate_size,
        n_heads=arch.n_heads,
        n_kv_heads=arch.n_kv_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        draft_vocab=0 if drafted == arch.vocab_size else drafted,
        n_layers=arch.n_layers,
        window=window,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_inv_freq=arch.rope_inv_freq if scaling else (),
        rope_factor=arch.rope_factor,
        norm_eps=arch.norm_eps,
        **_switches(config, where, library),
        qk_norm=arch.qk_norm,
        own_embedding="embed_tokens.weight" in stored,
    )


def _rotations(layer: Mapping[str, Any], where: str) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """`rope_theta`, and what is said beside it if rotations are scaled; flat, nested, or in both ways alike."""
    nested = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    thetas = {float(x) for x in (layer.get("rope_theta"), nested.pop("rope_theta", None)) if x is not None}
    if len(thetas) > 1:
        raise SourceError(
            f"{where}: rope_theta", f"is both {' and '.join(map(str, sorted(thetas)))}", "keep one of them"
        )
    kind = nested.pop("type", None) or nested.get("rope_type", "default")
    if kind == "default":
        return min(thetas, default=10000.0), ()
    return min(thetas, default=10000.0), tuple({**nested, "rope_type": kind}.items())


def _window(layer: dict[str, Any], where: str) -> int:
    """Slots that the layers see, 0 for all; takes what is said of it out of the fields."""
    window, types = layer.pop("sliding_window", None), set(layer.pop("layer_types", None) or ())
    if len(types) > 1:
        raise SourceError(f"{where}: layer_types", "differ from layer to layer", _FIX)
    return int(window) if window and types == {"sliding_attention"} else 0


def _switches(config: Mapping[str, Any], where: str, library: bool) -> dict[str, bool]:
    """The switches, each with the default of its format. Raises `SourceError` for contradictions."""
    eagle, switches = _eagle(config), {}
    for name in _SWITCHES:
        values = [place[name] for place in (config, eagle) if name in place]
        if any(type(value) is not bool for value in values) or len(set(values)) > 1:
            rule = "must be true or false, and the same at the top and in eagle_config"
            raise SourceError(f"{where}: {name} {values!r:.60}", rule, "correct config.json")
        switches[name] = values[0] if values else library and name == "norm_before_residual"
    if switches["norm_before_fc"] and switches["fc_norm"]:
        rule = "and fc_norm are two ways to norm the same states"
        raise SourceError(f"{where}: norm_before_fc", rule, "switch one of them off")
    if eagle.get("use_aux_hidden_state", True) is not True:
        rule = "is switched off: such a head (EAGLE) reads the last layer alone"
        raise SourceError(f"{where}: use_aux_hidden_state", rule, _FIX)
    return switches


def _taps(config: Mapping[str, Any], where: str, target: ArchMap) -> tuple[int, ...]:
    """The ids of the target's layers, as they are named or by default, rising."""
    named = [place[_IDS] for place in (config, _eagle(config)) if place.get(_IDS) is not None]
    if len(named) > 1 and named[0] != named[1]:
        raise SourceError(f"{where}: {_IDS}", f"are both {named[0]} and {named[1]}", "keep one of them")
    n = target.n_layers
    ids = named[0] if named else [2, n // 2, n - 3]
    if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i <= n for i in ids):
        rule, fix = f"must be layers 0 to {n} of the target", "name them: `taps` of the draft in the recipe"
        raise SourceError(f"{where}: {_IDS} {ids!r:.60}", rule, fix)
    return tuple(sorted(set(ids)))


def _require_fit(shape: Eagle3Shape, config: Mapping[str, Any], stored: LazyTensors, folder: Path, given: bool) -> None:
    """Sizes are those of the tensors and of the target; raises `SourceError` and `PairError`."""
    where, wide = f"{folder}/config.json", config.get("target_hidden_size")
    if wide is not None and wide != shape.target_hidden:
        rule = f"the target's hidden size is {shape.target_hidden}"
        raise PairError(f"{folder.name}: target_hidden_size {wide!r:.20}", rule, _OTHER_TARGET)
    if "fc.weight" not in stored:
        raise SourceError(f"{folder}: fc.weight", "is missing", _FIX)
    width = stored.shape("fc.weight")[-1]
    if width != shape.states:
        rule = f"reads {width} numbers, {len(shape.taps)} layers of the target have {shape.states}"
        fix = (
            "name as many `taps`"
            if given
            else f"{_OTHER_TARGET}, or name its layers: `taps` of the draft in the recipe"
        )
        raise PairError(f"{folder.name}: fc.weight", rule, fix)
    for switch, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if (tensor in stored) != getattr(shape, switch):
            rule = (
                f"is {str(getattr(shape, switch)).lower()}, but {tensor} is {'' if tensor in stored else 'not '}stored"
            )
            raise SourceError(f"{where}: {switch}", rule, "correct config.json")
    if not shape.own_embedding and shape.hidden_size != shape.target_hidden:
        rule = f"is missing, and the target's has {shape.target_hidden} columns in place of {shape.hidden_size}"
        raise SourceError(f"{folder}: embed_tokens.weight", rule, _FIX)


def _draft_ids(reader: HeadReader, stored: LazyTensors, shape: Eagle3Shape, folder: Path) -> Tensor:
    """Ids `[D]` that the head can draft, rising. Raises `SourceError` for maps that are none, or differ."""
    flags_V = None
    if "t2d" in stored:
        flags_V = reader.tensor(["t2d"], torch.Size([shape.vocab_size]), (torch.bool, torch.uint8, torch.int64)).bool()
        if int(flags_V.sum()) != shape.draft_vocab:
            rule = f"marks {int(flags_V.sum())} ids, {_DRAFT_VOCAB} says {shape.draft_vocab}"
            raise SourceError(f"{folder}: t2d", rule, _FIX)
    if "d2t" not in stored and flags_V is not None:
        return flags_V.nonzero()[:, 0]
    offsets_D = reader.ids("d2t", shape.draft_vocab)
    ids_D = rising_ids(offsets_D + torch.arange(shape.draft_vocab), shape.vocab_size, f"{folder}: d2t")
    if flags_V is not None and not bool(flags_V[ids_D].all()):
        raise SourceError(f"{folder}: d2t", "leads to ids that t2d does not mark", _FIX)
    return ids_D


def _equal(rows: Tensor, others: Tensor) -> bool:
    """Whether two matrices hold the same numbers; compared in parts, of which float32 copies are made."""
    pairs = zip(rows.split(4096), others.split(4096), strict=False)
    return rows.shape == others.shape and all(torch.equal(a.float(), b.float()) for a, b in pairs)


def _identity(name: str, shape: Eagle3Shape) -> bool:
    """Maps of a head that drafts every id say nothing."""
    return name == "d2t" and not shape.draft_vocab


def _output(shape: Eagle3Shape, output_VH: Tensor, folder: Path) -> Tensor:
    """The target's output rows, for a head that drafts every id and has none of its own."""
    if shape.draft_vocab or shape.hidden_size != shape.target_hidden:
        rule = f"is missing, and the target's has other rows than the {shape.drafted} that the head drafts"
        raise SourceError(f"{folder}: lm_head.weight", rule, _FIX)
    return output_VH.float()
