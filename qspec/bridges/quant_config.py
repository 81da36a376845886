"""`quantization_config` of a compressed-tensors `config.json`, to and from schemes by layer. Touches no file."""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Any

from qspec.errors import SourceError
from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.plan import KVScheme, LayerScheme, QuantPlan, Rule, TensorScheme
from qspec.schema.problems import short
from qspec.scheme_table import name_of

Resolved = Mapping[str, LayerScheme | None]
"""Scheme of every linear layer; None keeps the layer in float."""

_STORED = {("float", 8): FP8_E4M3, ("int", 8): INT8, ("int", 4): INT4}
"""Formats by `type` and `num_bits`."""
_TYPES = {fmt: kind for (kind, _), fmt in _STORED.items()}
_OBSERVERS = {"absmax": "memoryless_minmax", "percentile": "percentile", "mse": "memoryless_mse"}
_MOST_GROUP, _MOST_TILE = 1 << 20, 1 << 12
"""Inputs of a group, and sides of a tile, to whole ones of which matrices are filled up."""
_DOWN = r"re:.*\.down_proj$"
DENSE_AND_SPARSE = "dense-and-sparse"
"""Format of layers with outliers. Nobody else knows it, so that other readers stop and do not run without them."""
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_EXPERT, _EXPERTS = re.compile(r"\.experts\.(\d+)\."), ".experts.#."


def groups(resolved: Resolved) -> dict[str, tuple[LayerScheme, list[str]]]:
    """`group_0`, `group_1`, …: each distinct scheme and the layers that have it, in order of appearance."""
    members: dict[LayerScheme, list[str]] = {}
    for layer, scheme in resolved.items():
        if scheme is not None:
            members.setdefault(scheme, []).append(layer)
    return {f"group_{i}": (scheme, layers) for i, (scheme, layers) in enumerate(members.items())}


def encode(resolved: Resolved, kv: KVScheme | None, version: str) -> dict[str, Any] | None:
    """The `quantization_config` of a finished checkpoint; None when there is nothing for it to say.

    One scheme targets `Linear`; several target patterns only, because runtimes try a class name before the members
    of a merged layer. Raises `RecipeError` for a KV format that compressed-tensors cannot store.
    """
    by_name = groups(resolved)
    scheme_kv = encode_kv(kv)
    if not by_name and scheme_kv is None:
        return None
    every = list(resolved)
    encoded = {name: _encode_group(*group, every, len(by_name) == 1) for name, group in by_name.items()}
    formats = {group["format"] for group in encoded.values()}
    return {
        "config_groups": encoded,
        "format": _whole_format(formats),
        "global_compression_ratio": None,
        "ignore": patterns([layer for layer, scheme in resolved.items() if scheme is None], every),
        "kv_cache_scheme": scheme_kv,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": version,
    }


def decode(config: Mapping[str, Any], layers: Iterable[str]) -> tuple[dict[str, LayerScheme], dict[str, str | None]]:
    """Schemes by group, and the group of every layer (None: float). Raises `SourceError` for what qspec cannot run."""
    if config.get("quant_method") != "compressed-tensors":
        method = str(config.get("quant_method"))
        raise SourceError(method, "only compressed-tensors checkpoints are read", "start from the float model")
    schemes = {name: _decode_group(group, config.get("format")) for name, group in config["config_groups"].items()}
    targets = {name: group["targets"] for name, group in config["config_groups"].items()}
    ignore = config.get("ignore") or []
    return schemes, {layer: None if _matches(layer, ignore) else _first(layer, targets) for layer in layers}


def encode_kv(kv: KVScheme | None) -> dict[str, Any] | None:
    """`kv_cache_scheme`: float8 E4M3 with static scales. Dynamic ones are a serving flag, others qspec's own: None."""
    if kv is None or not kv.declared:
        return None
    part = kv.parts[0]
    scheme = _encode_tensor(TensorScheme(part.fmt, PerTensor()), observer=None)
    return scheme | {"strategy": "attn_head" if part.granularity == "head" else "tensor"}


def decode_kv(args: Mapping[str, Any] | None) -> KVScheme | None:
    """Inverse of `encode_kv`."""
    if args is None:
        return None
    strategy = args.get("strategy") or "tensor"
    fp8 = (args["type"], args["num_bits"]) == ("float", 8)
    if not fp8 or not args.get("symmetric", True) or args.get("dynamic") or strategy not in ("tensor", "attn_head"):
        raise SourceError(
            f"kv_cache_scheme {strategy}", "only static FP8 scales are read", "quantize the KV cache again"
        )
    return KVScheme(FP8_E4M3, "head" if strategy == "attn_head" else "tensor")


def encode_transforms(down_hadamard: bool) -> dict[str, Any]:
    """`transform_config`: what is transformed at run time. Rotations that are folded into weights leave no trace.

    Sylvester's matrix for powers of two; for other orders compressed-tensors has none of this type, so that a runtime
    which reads this stops instead of computing something else.
    """
    if not down_hadamard:
        return {}
    inputs = {"targets": [_DOWN], "location": "input", "inverse": False, "ignore": []}
    scheme = {
        "type": "hadamard",
        "apply": [inputs, inputs | {"location": "weight_input", "inverse": True}],
        "randomize": False,
        "requires_grad": False,
        "head_dim": None,
        "precision": "torch.float32",
    }
    return {"config_groups": {"r4": scheme}}


def decode_transforms(config: Mapping[str, Any]) -> bool:
    """Whether the input of `down_proj` is transformed; raises `SourceError` for other transforms at run time."""
    ours = [
        (scheme, args)
        for scheme in config.get("config_groups", {}).values()
        for args in scheme["apply"]
        if args["location"] not in ("weight_input", "weight_output")
    ]
    for scheme, args in ours:
        plain = (scheme["type"], bool(scheme.get("randomize")), scheme.get("head_dim")) == ("hadamard", False, None)
        down = all(target.replace("\\", "").endswith(("down_proj", "down_proj$")) for target in args["targets"])
        if not (plain and down and args["location"] == "input"):
            what = f"transform {scheme['type']} of {args['location']}, {', '.join(args['targets'])}"
            rule = "only the Hadamard transform of down_proj's input runs here"
            raise SourceError(what, rule, "quantize the float model again, with rotation: {r4: true} if wanted")
    return bool(ours)


def canonical_plan(resolved: Resolved, kv: KVScheme | None) -> QuantPlan:
    """A plan that resolves to `resolved`: the commonest scheme is the default, patterns name the others."""
    members: dict[LayerScheme | None, list[str]] = {}
    for layer, scheme in resolved.items():
        members.setdefault(scheme, []).append(layer)
    default, rules = in_few_rules(members, list(resolved))
    return QuantPlan(default, rules, kv)


def in_few_rules(
    members: Mapping[LayerScheme | None, Sequence[str]], every: Sequence[str]
) -> tuple[LayerScheme | None, tuple[Rule, ...]]:
    """The commonest scheme, and rules by pattern for the members of the others, among `every` layer."""
    default = max(members, key=lambda scheme: len(members[scheme]))
    others = [(scheme, layers) for scheme, layers in members.items() if scheme != default]
    return default, tuple(Rule(pattern, scheme) for scheme, layers in others for pattern in patterns(layers, every))


def patterns(layers: Sequence[str], every: Sequence[str]) -> list[str]:
    """Targets that match exactly `layers` among `every`, under any prefix (a draft is loaded below `draft_model.`)."""
    wanted, known = _by_part(layers), _by_part(every)
    by_pattern: dict[str, list[str]] = {}  # experts of the same pattern but for their number
    for part, numbers in wanted.items():
        expert, pattern = _EXPERT.search(part), _pattern(part, numbers, len(numbers) == len(known[part]))
        if expert:
            pattern = pattern.replace(re.escape(expert[0]), _EXPERTS)
        by_pattern.setdefault(pattern, []).extend([expert[1]] if expert else [])
    experts = {expert[1] for part in known if (expert := _EXPERT.search(part))}
    return [
        pattern.replace(_EXPERTS, rf"\.experts\.{_any_of(numbers, len(numbers) == len(experts))}\.")
        for pattern, numbers in by_pattern.items()
    ]


def _by_part(layers: Sequence[str]) -> dict[str, list[str]]:
    """Layer numbers by what follows them; a layer outside the stack has none."""
    parts: dict[str, list[str]] = {}
    for layer in layers:
        match = _LAYER.fullmatch(layer)
        part, number = (match[2], [match[1]]) if match else (layer, [])
        parts.setdefault(part, []).extend(number)
    return parts


def _pattern(part: str, numbers: list[str], whole: bool) -> str:
    if not numbers:
        return f"re:.*{re.escape(part)}$"
    return rf"re:.*layers\.{_any_of(numbers, whole)}\.{re.escape(part)}$"


def _any_of(numbers: Sequence[str], every: bool) -> str:
    return r"\d+" if every else f"({'|'.join(numbers)})"


def _matches(layer: str, targets: Iterable[str]) -> bool:
    return any(re.match(t[3:], layer) if t.startswith("re:") else t == layer for t in targets)


def _first(layer: str, targets: Mapping[str, Sequence[str]]) -> str | None:
    """The first group that names the layer, else the first that takes every linear layer."""
    by_name = (group for group, names in targets.items() if _matches(layer, names))
    by_class = (group for group, names in targets.items() if "Linear" in names)
    return next(by_name, None) or next(by_class, None)


def _encode_group(scheme: LayerScheme, layers: list[str], every: list[str], only: bool) -> dict[str, Any]:
    activation, observer = scheme.activation, "static_minmax" if scheme.static_input else None
    head = patterns(["lm_head"], every) if "lm_head" in layers else []  # runtimes do not count it as a `Linear`
    return {
        "format": _format(scheme),
        "input_activations": None if activation is None else _encode_tensor(activation, observer),
        "output_activations": None,
        "targets": [*head, "Linear"] if only else patterns(layers, every),
        "weights": _encode_tensor(scheme.weight, _OBSERVERS[scheme.weight.clip.method]),
    }


def _whole_format(formats: set[str]) -> str:
    if len(formats) > 1:
        return DENSE_AND_SPARSE if DENSE_AND_SPARSE in formats else "mixed-precision"
    return next(iter(formats), "dense")


def _format(scheme: LayerScheme) -> str:
    if scheme.outliers:
        return DENSE_AND_SPARSE
    if scheme.activation is None:
        return "pack-quantized" if scheme.weight.fmt.bits == 4 else "naive-quantized"
    return "float-quantized" if scheme.weight.fmt.is_float else "int-quantized"


def _encode_tensor(scheme: TensorScheme, observer: str | None) -> dict[str, Any]:
    strategy, group_size, block = _encode_granularity(scheme.granularity)
    return {
        "actorder": None,
        "block_structure": block,
        "dynamic": scheme.dynamic,
        "group_size": group_size,
        "num_bits": scheme.fmt.bits,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": strategy,
        "symmetric": scheme.symmetric,
        "type": _TYPES[scheme.fmt],
        "zp_dtype": None if scheme.symmetric else "torch.int8",
    }


def _encode_granularity(granularity: Granularity) -> tuple[str, int | None, list[int] | None]:
    """`(strategy, group_size, block_structure)`."""
    match granularity:
        case PerTensor():
            return "tensor", None, None
        case PerChannel():
            return "channel", None, None
        case PerToken():
            return "token", None, None
        case PerGroup(size):
            return "group", size, None
        case PerBlock(rows, cols):
            return "block", None, [rows, cols]


def _decode_group(group: Mapping[str, Any], whole: str | None = None) -> LayerScheme:
    """whole: the format of groups that name none."""
    weight = _decode_tensor(group["weights"])
    inputs = group.get("input_activations")
    activation = None if inputs is None else _decode_tensor(inputs)
    if weight.fmt == INT8 and activation is None and (group.get("format") or whole) == "pack-quantized":
        raise SourceError("weight-only int8", "packed 8-bit weights are not read", "use W8A8 or W4A16")
    if activation is not None and not activation.symmetric:
        raise SourceError("asymmetric activations", "activations are symmetric here", "quantize with symmetric: true")
    return LayerScheme(name_of(weight, activation), weight, activation)


def _decode_tensor(args: Mapping[str, Any]) -> TensorScheme:
    fmt = _STORED.get((args["type"], args["num_bits"]))
    if fmt is None or args.get("dynamic") == "local":
        name = f"{args['type']}{args['num_bits']}"
        raise SourceError(
            name, "this format is not supported", f"use one of {', '.join(f.name for f in _STORED.values())}"
        )
    symmetric = bool(args.get("symmetric", True))
    return TensorScheme(fmt, _decode_granularity(args), symmetric, bool(args.get("dynamic", False)))


def _decode_granularity(args: Mapping[str, Any]) -> Granularity:
    match args.get("strategy"):
        case "tensor":
            return PerTensor()
        case "channel":
            return PerChannel()
        case "token":
            return PerToken()
        case "group":
            return PerGroup(_size(args["group_size"], _MOST_GROUP))
        case "block":
            rows, cols = args["block_structure"]
            return PerBlock(_size(rows, _MOST_TILE), _size(cols, _MOST_TILE))
        case other:
            raise SourceError(f"strategy {other}", "this granularity is not supported", "quantize the model again")


def _size(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise SourceError(f"group or tile of {short(value)}", f"must be 1 to {most}", "quantize the model again")
    return value
