"""Checkpoints in the compressed-tensors layout: what vLLM and transformers load, written and read back exactly.

Names: `X.weight` (a byte per code) or `X.weight_packed` + `X.weight_shape` (INT4 alone), `X.weight_scale`,
`X.input_scale` (static only), `model.layers.N.self_attn.k_scale` / `v_scale` / `q_scale`. Multiply by a scale to
dequantize; scales are float32.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qspec.bridges import hf, quant_config, sidecar
from qspec.bridges.companions import companions, copy
from qspec.bridges.layout import (
    refuse_strange_parts,
    require_tensors,
    split_stored,
    stored_as,
    stored_items,
    stored_rows,
    stored_schemes,
)
from qspec.bridges.tensors import LazyTensors, read_tensors, write_shards
from qspec.errors import OutputError, RecipeError, SourceError
from qspec.nn.eager.linear import joined_rows, merge_obstacle, taken_rows
from qspec.numerics.quantization.affine import QTensor, quantize_matrix
from qspec.numerics.quantization.blocks import PerGroup, scale_shape
from qspec.numerics.quantization.formats import INT4, SCALE_CEILING, SCALE_FLOOR, NumFormat
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.numerics.quantization.packing import PER_WORD, pack_int4, unpack_int4
from qspec.plan import KVScheme, LayerScheme, QuantPlan
from qspec.records import ArchMap, LoadedModel, QLinear, QuantizedModel, layer_number

_UNTIE = "add lm_head to ignore, or set untie_head: true (the head is then stored beside the embedding)"
_KV = ("k_scale", "v_scale", "q_scale")
_OUTLIERS = ("weight_outlier_indptr", "weight_outlier_indices", "weight_outlier_values")
_CODES = ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "input_scale", "bias")
_PARTS = (*_CODES, *_OUTLIERS)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_AGAIN = "quantize the model again, or fetch an intact copy"


def write(model: QuantizedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint folder; what is not quantized is stored as `dtype`. Names are those of the architecture."""
    refuse_tied_head(model.arch, model.linears)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, stored_tensors(model, dtype))
    write_metadata(model, folder, dtype)


def write_metadata(model: QuantizedModel, folder: Path, dtype: torch.dtype) -> None:
    """All files of a checkpoint but its tensors: its own, and those that came with the model, byte for byte."""
    _write_json(folder / "config.json", _config(model, dtype))
    (folder / sidecar.NAME).write_text(sidecar.encode(model), encoding="utf-8")
    if "tokenizer.json" not in model.files:
        model.tokenizer.save(folder)
    copy(model.files, folder)


def write_float(model: LoadedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a model that is not quantized: a plain transformers checkpoint."""
    plan = QuantPlan(None)
    plain = QuantizedModel(
        model.arch, model.tensors, {}, plan, model.config, model.tokenizer, model.source, files=model.files
    )
    write(plain, folder, dtype)


def read(folder: Path) -> QuantizedModel:
    """Read a checkpoint folder: qspec's own, llm-compressor's, or a plain one. Raises `SourceError`.

    Every tensor that the configuration promises is there, in its shape, and nothing indexes outside of its table.
    Everything but tensors has been read in a process with limits before.
    """

    def try_out() -> None:
        rows = _described(folder).arch.vocab_size
        hf.try_out(hf.open_tokenizer(folder), rows)

    with _explained(folder):
        hf.rehearse_files(folder, "a checkpoint", try_out)
        model = _read(folder)
        require_tensors(str(folder), model.arch, _shapes(model))
    return model


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except _MISFITS as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        rule = f"its configuration and tensors do not describe a checkpoint ({what})"
        raise SourceError(str(folder), rule, _AGAIN) from error


@dataclass(frozen=True)
class _Description:
    """A checkpoint's description of its tensors. `schemes`: those of quantized layers; `sidecar`: qspec's own part."""

    config: dict[str, Any]
    arch: ArchMap
    schemes: dict[str, LayerScheme]
    plan: QuantPlan
    sidecar: dict[str, Any]


def _described(folder: Path) -> _Description:
    with _explained(folder):
        config = hf.read_config(folder)
        quantization = config.pop("quantization_config", None)
        body = sidecar.read(folder)
        arch = replace(hf.arch_from_config(config), down_hadamard=_down_hadamard(quantization or {}, body))
        kv = quant_config.decode_kv((quantization or {}).get("kv_cache_scheme"))
        stored_layers = dict.fromkeys(stored_as(arch, layer) for layer in arch.linears())
        schemes, group_of = quant_config.decode(quantization, stored_layers) if quantization else ({}, {})
        schemes = sidecar.named(body, schemes)
        resolved = {layer: _scheme(schemes, group_of.get(stored_as(arch, layer))) for layer in arch.linears()}
        plan = sidecar.plan(body, schemes, kv) if body else quant_config.canonical_plan(resolved, kv)
        if plan.resolve(arch.linears()) != resolved:
            raise SourceError(f"{folder}/{sidecar.NAME}", "has another plan than config.json", _AGAIN)
        _require_layers(plan.kv, arch)
        quantized = {layer: scheme for layer, scheme in resolved.items() if scheme}
        for layer, scheme in quantized.items():
            _require_groups(layer, scheme, arch.linear_shape(layer)[1])
        return _Description(config, arch, quantized, plan, body)


def _require_groups(layer: str, scheme: LayerScheme, columns: int) -> None:
    """Groups of weights, and of inputs, are whole."""
    parts = [part.granularity for part in (scheme.weight, scheme.activation) if part is not None]
    for size in (part.size for part in parts if isinstance(part, PerGroup)):
        if columns % size:
            raise SourceError(layer, f"{columns} inputs do not divide into groups of {size}", _AGAIN)


def _require_layers(kv: KVScheme | None, arch: ArchMap) -> None:
    """Layers that a KV scheme names by number are there."""
    named = [] if kv is None else [*kv.skip_layers, *kv.cast_layers]
    if beyond := [i for i in named if not isinstance(i, int) or i >= arch.n_layers]:
        raise SourceError(f"kv: layer {beyond[0]}", f"the model has {arch.n_layers}, from 0 on", _AGAIN)


def _read(folder: Path) -> QuantizedModel:
    described = _described(folder)
    arch, plan, body = described.arch, described.plan, described.sidecar
    stored = _Reader(read_tensors(folder), folder)
    linears = _Linears(arch, stored, described.schemes)
    k_scale, v_scale, q_scale = (_read_kv(stored, arch, plan.kv, name) for name in _KV)
    return QuantizedModel(
        arch,
        stored.rest(arch, linears),
        linears,
        plan,
        described.config,
        hf.open_tokenizer(folder),
        body.get("source", {"model": str(folder)}),
        k_scale,
        v_scale,
        tuple(body.get("notes", ())),
        q_scale,
        sidecar.head_ids(body, arch.vocab_size),
        companions(folder).files,
    )


def _down_hadamard(quantization: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """`ArchMap.down_hadamard`: a half with nothing quantized has only its sidecar to say so."""
    return quant_config.decode_transforms(quantization.get("transform_config") or {}) or bool(body.get("down_hadamard"))


def _shapes(model: QuantizedModel) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of the float model."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items()}
    for layer, linear in model.linears.items():
        shapes[f"{layer}.weight"] = tuple(linear.weight.shape)
        if linear.bias is not None:
            shapes[f"{layer}.bias"] = tuple(linear.bias.shape)
    return shapes


def quantization_config(model: QuantizedModel) -> dict[str, Any] | None:
    """The `quantization_config` that `write` puts into `config.json`."""
    resolved = stored_schemes(model.arch, model.plan.resolve(model.arch.linears()))
    config = quant_config.encode(resolved, model.plan.kv, metadata.version("compressed-tensors"))
    transforms = quant_config.encode_transforms(model.arch.down_hadamard)
    return config | {"transform_config": transforms} if config and transforms else config


def refuse_tied_head(arch: ArchMap, layers: Container[str]) -> None:
    """A head that shares its weight with the embedding cannot be stored as codes."""
    if arch.tied and "lm_head" in layers:
        raise RecipeError("lm_head", "is tied to the embedding and cannot be quantized alone", _UNTIE)


def lint_scale(name: str, scale: Tensor) -> None:
    """Every stored scale lies between `SCALE_FLOOR`, below which FP8 kernels underflow, and `SCALE_CEILING`.

    Weights may have negative scales: AutoRound maps the largest magnitude of a block to the lowest code. Raises
    `OutputError`.
    """
    fix = "look for NaN or all-zero weights in the source model"
    if not scale.numel() or not scale.is_floating_point():
        raise OutputError(name, f"scales are floats, one or more, got {list(scale.shape)} of {scale.dtype}", fix)
    scale = scale.float()
    size = scale.abs() if name.endswith("weight_scale") else scale
    if not bool(((size >= SCALE_FLOOR) & (size <= SCALE_CEILING)).all()):  # NaN is on no side
        low, high = scale.min().item(), scale.max().item()
        rule = f"scales are finite, {SCALE_FLOOR:.3g} to {SCALE_CEILING:.3g}, got {low:.3g} … {high:.3g}"
        raise OutputError(name, rule, fix)


def stored_tensors(model: QuantizedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint by its name on disk, made when it is asked for."""
    for name, tensor in stored_items(model.arch, model.tensors.items(), _joined_rows, ".weight"):
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
    for layer, linear in stored_items(model.arch, model.linears.items(), _joined):
        for name, tensor in _linear_tensors(linear, dtype):
            if name.endswith("_scale"):
                lint_scale(f"{layer}.{name}", tensor)
            yield f"{layer}.{name}", tensor
    for name, scales in zip(_KV, (model.k_scale, model.v_scale, model.q_scale), strict=True):
        for layer, scale in scales.items():
            lint_scale(f"{layer}.{name}", scale)
            yield f"{layer}.{name}", scale.float() if scale.numel() == 1 else scale.float().reshape(-1, 1, 1)


def _joined_rows(_: str, members: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(members))


def _joined(stored: str, members: Sequence[QLinear]) -> QLinear:
    """Layers that the architecture stores as one."""
    obstacle = merge_obstacle(members)
    if obstacle is not None:
        rule = f"is stored as one layer, but of its parts {obstacle}"
        raise OutputError(stored, rule, "set fusion.share_scales: true, and one scheme for all of them")
    return joined_rows(members)


def packs(linear: QLinear) -> bool:
    """Whether codes lie eight to a word; beside rounded inputs (`int-quantized`) INT4 takes a byte, for runtimes."""
    return linear.weight.fmt == INT4 and linear.activation is None


def _linear_tensors(linear: QLinear, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    weight = linear.weight
    yield "weight_scale", weight.scale.float()
    if packs(linear):
        yield "weight_packed", pack_int4(weight.codes)
        yield "weight_shape", torch.tensor(weight.shape)
    else:
        yield "weight", weight.codes
    if weight.zero_point is not None:
        zero = weight.zero_point.to(torch.int8)
        yield "weight_zero_point", pack_int4(zero.T).T if packs(linear) else zero
    if linear.input_scale is not None:
        yield "input_scale", linear.input_scale.float()
    if linear.outliers is not None:
        sparse = linear.outliers
        yield from zip(_OUTLIERS, (sparse.indptr, sparse.stored_indices, sparse.values), strict=True)
    if linear.bias is not None:
        yield "bias", linear.bias.to(dtype)


def _config(model: QuantizedModel, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`: the model's own, its dtype as stored, and the quantization."""
    quantization = quantization_config(model)
    config = {key: value for key, value in model.config.items() if key not in ("torch_dtype", "quantization_config")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    return config if quantization is None else config | {"quantization_config": quantization}


class _Reader:
    """Hands out stored tensors by name."""

    def __init__(self, tensors: LazyTensors, folder: Path) -> None:
        self._tensors, self._folder = tensors, folder

    def take(self, name: str) -> Tensor:
        tensor = self.find(name)
        if tensor is None:
            raise SourceError(
                f"{self._folder}: {name}", "config.json needs this tensor, but it is missing", "save again"
            )
        return tensor

    def find(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def rest(self, arch: ArchMap, linears: Iterable[str]) -> Mapping[str, Tensor]:
        """Tensors that are no part of `linears` and no KV scale; codes among them are refused."""
        stored = {stored_as(arch, layer) for layer in linears}
        names = [name for name in self._tensors if not _is_part(name, stored)]
        for name in names:
            if name.endswith((".weight_scale", ".weight_packed", *_OUTLIERS)):
                rule = "is stored, but config.json leaves this layer in float"
                raise SourceError(f"{self._folder}: {name}", rule, _AGAIN)
        rest = split_stored(arch, self._tensors.without(set(self._tensors) - set(names)))
        refuse_strange_parts(str(self._folder), arch, rest)
        return rest


class _Linears(Mapping[str, QLinear]):
    """Quantized layers of a checkpoint; each is decoded when it is asked for, so that none need stay in memory."""

    def __init__(self, arch: ArchMap, stored: _Reader, schemes: Mapping[str, LayerScheme]) -> None:
        self._arch, self._stored, self._schemes = arch, stored, schemes

    def __getitem__(self, layer: str) -> QLinear:
        name, scheme = stored_as(self._arch, layer), self._schemes[layer]
        try:
            whole = _read_linear(self._stored, name, scheme)
            rows = stored_rows(self._arch, layer)
            linear = whole if rows is None else taken_rows(whole, *rows)
            if linear.weight.shape != (due := self._arch.linear_shape(layer)):
                raise ValueError(f"a weight of {linear.weight.shape}, config.json says {due}")
        except _MISFITS as error:  # shapes that do not belong together
            rule = f"its tensors do not fit one another ({' '.join(str(error).split())})"
            raise SourceError(name, rule, _AGAIN) from error
        return linear

    def __contains__(self, layer: object) -> bool:
        return layer in self._schemes

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemes)

    def __len__(self) -> int:
        return len(self._schemes)


def _is_part(name: str, linears: Container[str]) -> bool:
    layer, _, part = name.rpartition(".")
    return (layer in linears and part in _PARTS) or part in _KV


def _scheme(schemes: Mapping[str, LayerScheme], group: str | None) -> LayerScheme | None:
    return None if group is None else schemes[group]


def _read_linear(stored: _Reader, layer: str, scheme: LayerScheme) -> QLinear:
    fmt, granularity = scheme.weight.fmt, scheme.weight.granularity
    scale = _float(stored.take(f"{layer}.weight_scale"))
    packed = stored.find(f"{layer}.weight_packed") if fmt == INT4 else None
    if packed is not None:
        n, k = (int(size) for size in _typed(stored.take(f"{layer}.weight_shape"), torch.int32, torch.int64))
        codes = _unpacked(packed, n, k)
    else:
        codes = _in_range(_typed(stored.take(f"{layer}.weight"), fmt.storage), fmt)
        n, k = codes.shape
    zero = None if scheme.weight.symmetric else stored.take(f"{layer}.weight_zero_point")
    shape = scale_shape((n, k), granularity)
    if zero is not None and zero.dim() != 2:
        raise ValueError(f"zero points of {zero.dim()} dimensions")
    if zero is not None:
        zero = _unpacked(zero.T, shape[1], n).T if packed is not None else _in_range(_typed(zero, torch.int8), fmt)
        zero = zero.float().reshape(shape)
    weight = QTensor(codes, scale.reshape(shape), zero, fmt, granularity)
    input_scale = _floored(stored.take(f"{layer}.input_scale")).reshape(1) if scheme.static_input else None
    bias, outliers = stored.find(f"{layer}.bias"), _read_outliers(stored, layer, scheme, (n, k))
    if bias is not None:
        bias = _typed(bias, *_FLOATS).reshape(n)
    return QLinear(_requantized(weight), scheme.activation, input_scale, bias, outliers)


def _typed(tensor: Tensor, *types: torch.dtype) -> Tensor:
    if tensor.dtype not in types:
        raise ValueError(f"{tensor.dtype} in place of {' or '.join(map(str, types))}")
    return tensor


def _float(tensor: Tensor) -> Tensor:
    return _typed(tensor, *_FLOATS).float()


def _in_range(codes: Tensor, fmt: NumFormat) -> Tensor:
    """Four-bit codes in a byte each do not leave four bits."""
    if fmt == INT4 and codes.numel() and (int(codes.min()) < fmt.qmin or int(codes.max()) > fmt.qmax):
        raise ValueError(f"codes reach from {int(codes.min())} to {int(codes.max())}, {fmt.name} does not")
    return codes


def _unpacked(packed: Tensor, n: int, k: int) -> Tensor:
    """Codes `[n, k]`, all of which `packed` holds."""
    if tuple(_typed(packed, torch.int32).shape) != (n, -(-k // PER_WORD)) or min(n, k) < 1:
        raise ValueError(f"words {list(packed.shape)} do not hold {n} x {k} codes")
    return unpack_int4(packed, k)


def _read_outliers(stored: _Reader, layer: str, scheme: LayerScheme, shape: tuple[int, int]) -> SparseMatrix | None:
    """The weights kept apart, also where only the tensors tell of them; raises `SourceError` if they do not fit."""
    if not scheme.outliers and stored.find(f"{layer}.{_OUTLIERS[-1]}") is None:
        return None
    indptr, indices, values = (stored.take(f"{layer}.{part}") for part in _OUTLIERS)
    try:
        if {indptr.dim(), indices.dim(), values.dim()} != {1}:
            raise ValueError("row ends, columns and values are lists")
        _typed(indptr, torch.int32), _typed(indices, torch.int16, torch.int32), _typed(values, *_FLOATS)
        matrix = SparseMatrix(indptr, indices.int(), values, shape[1])
        if matrix.shape != shape:
            raise ValueError(f"{matrix.shape[0]} rows, the weight has {shape[0]}")
    except ValueError as error:
        raise SourceError(f"{layer}.{_OUTLIERS[0]}", str(error), "quantize the model again") from error
    return matrix


def _requantized(weight: QTensor) -> QTensor:
    """The same weight with no scale below `SCALE_FLOOR` (other tools store smaller ones for all-zero rows)."""
    if weight.scale.abs().min() >= SCALE_FLOOR:
        return weight
    scale = torch.where(weight.scale.abs() < SCALE_FLOOR, SCALE_FLOOR, weight.scale)
    return quantize_matrix(weight.dequantize(), scale, weight.zero_point, weight.fmt, weight.granularity)


def _floored(scale: Tensor) -> Tensor:
    return _float(scale).clamp_min(SCALE_FLOOR)


def _read_kv(stored: _Reader, arch: ArchMap, kv: KVScheme | None, name: str) -> dict[str, Tensor]:
    """Scales of the layers that have stored ones; raises `SourceError` for another number than heads of one layer."""
    if kv is None or not dict(zip(_KV, (*(part.stored for part in kv.parts), kv.query), strict=True))[name]:
        return {}
    by = dict(zip(_KV, (*(part.granularity for part in kv.parts), kv.query), strict=True))[name]
    due = (arch.n_heads if name == "q_scale" else arch.n_kv_heads) if by == "head" else 1
    layers = [f"{layer}.self_attn" for layer in arch.layers if not kv.skips(layer_number(layer))]
    scales = {layer: _floored(stored.take(f"{layer}.{name}")).reshape(-1) for layer in layers}
    for layer, scale in scales.items():
        if scale.numel() != due:
            rule = f"holds {scale.numel()} scales, {due} due"
            raise SourceError(f"{layer}.{name}", rule, _AGAIN)
    return scales


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
