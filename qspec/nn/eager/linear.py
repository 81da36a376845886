"""Linear layers as callables `x_TK -> y_TN`; layers that read one input are merged into one matmul at load."""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerBlock, PerTensor
from qspec.numerics.quantization.outliers import SparseMatrix, concatenated, nothing
from qspec.ops.cpu import FloatLinear
from qspec.ops.select import Kernels, Linear, prepare, prepare_sparse
from qspec.records import EMBEDDING, HEAD, QLinear, QuantizedModel

Member = Tensor | QLinear
"""A float weight `[N, K]` or a quantized layer."""


def merged_linear(
    members: Sequence[Member], biases: Sequence[Tensor | None], dtype: torch.dtype, kernels: Kernels = "auto"
) -> Linear:
    """One callable for layers that share an input; outputs are concatenated in order, biases added."""
    bias_N = _cat_bias(members, biases, dtype)
    if all(isinstance(m, Tensor) for m in members):
        return _Biased(FloatLinear(torch.cat([m.to(dtype) for m in members if isinstance(m, Tensor)])), bias_N)
    quantized = [m for m in members if isinstance(m, QLinear)]
    if len(quantized) == len(members) and merge_obstacle(quantized) is None:
        return _Biased(_prepare(joined_rows(quantized), dtype, kernels), bias_N)
    parts = [FloatLinear(m.to(dtype)) if isinstance(m, Tensor) else _prepare(m, dtype, kernels) for m in members]
    return _Biased(_Split(parts), bias_N)


def merge_obstacle(members: Sequence[QLinear | None]) -> str | None:
    """Why these layers (None: one that is not quantized) cannot be one matmul; None when they can."""
    quantized = [m for m in members if m is not None]
    if not quantized:
        return None
    if len(quantized) < len(members):
        return "only some are quantized"
    first = quantized[0]
    if any(_form(m) != _form(first) for m in quantized):
        return "their formats differ"
    per_tensor = isinstance(first.weight.granularity, PerTensor)
    if per_tensor and not all(torch.equal(m.weight.scale, first.weight.scale) for m in quantized):
        return "their weight scales differ"
    if not all(_equal(m.input_scale, first.input_scale) for m in quantized):
        return "their input scales differ"
    granularity = first.weight.granularity
    if isinstance(granularity, PerBlock) and any(m.weight.shape[0] % granularity.rows for m in quantized):
        return "their rows end inside a tile"
    return None


def _form(linear: QLinear) -> tuple[object, ...]:
    weight = linear.weight
    return weight.fmt, weight.granularity, weight.zero_point is None, linear.activation


def joined_rows(members: Sequence[QLinear]) -> QLinear:
    """One layer with the rows of all; what has `merge_obstacle` cannot be that. The bias is the first one's."""
    first = members[0].weight
    codes = torch.cat([m.weight.codes.view(torch.uint8) for m in members]).view(first.codes.dtype)
    if isinstance(first.granularity, PerTensor):
        return replace(members[0], weight=replace(first, codes=codes), outliers=_cat_outliers(members))
    zeros = [m.weight.zero_point for m in members if m.weight.zero_point is not None]
    zero = torch.cat(zeros) if zeros else None
    scale = torch.cat([m.weight.scale for m in members])
    weight = QTensor(codes, scale, zero, first.fmt, first.granularity)
    return replace(members[0], weight=weight, outliers=_cat_outliers(members))


def taken_rows(linear: QLinear, start: int, stop: int) -> QLinear:
    """Rows of a layer, as a layer of its own: inverse of `joined_rows`."""
    granularity, tile = linear.weight.granularity, 1
    if isinstance(granularity, PerBlock):
        tile = granularity.rows
        assert start % tile == 0, "rows start inside a tile"
    outliers = linear.outliers.row_range(start, stop) if linear.outliers is not None else None
    return _rows(linear, slice(start, stop), slice(start // tile, -(-stop // tile)), outliers)


def picked_rows(linear: QLinear, rows_D: Tensor) -> QLinear:
    """Any rows of a layer, as a layer of its own; its scales must not be those of tiles of rows."""
    assert not isinstance(linear.weight.granularity, PerBlock), "tiles of rows share a scale"
    outliers = linear.outliers
    if outliers is not None:
        outliers = concatenated([outliers.row_range(row, row + 1) for row in rows_D.tolist()])
    return _rows(linear, rows_D, rows_D, outliers)


def _rows(linear: QLinear, rows: slice | Tensor, scales: slice | Tensor, outliers: SparseMatrix | None) -> QLinear:
    """A layer of `rows`, and `scales` where rows have their own; a slice copies nothing."""
    weight, scale, zero, bias_N = linear.weight, linear.weight.scale, linear.weight.zero_point, linear.bias
    if not isinstance(weight.granularity, PerTensor):
        scale, zero = scale[scales], zero[scales] if zero is not None else None
    codes = weight.codes.view(torch.uint8)[rows].view(weight.codes.dtype)
    part = QTensor(codes, scale, zero, weight.fmt, weight.granularity)
    return replace(linear, weight=part, outliers=outliers, bias=bias_N[rows] if bias_N is not None else None)


def _cat_outliers(members: Sequence[QLinear]) -> SparseMatrix | None:
    if all(m.outliers is None for m in members):
        return None
    return concatenated([nothing(m.weight.shape) if m.outliers is None else m.outliers for m in members])


def _cat_bias(members: Sequence[Member], biases: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    if all(b is None for b in biases):
        return None
    rows = [m.shape[0] if isinstance(m, Tensor) else m.weight.shape[0] for m in members]
    return torch.cat([torch.zeros(n) if b is None else b.float() for n, b in zip(rows, biases, strict=True)]).to(dtype)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _prepare(layer: QLinear, dtype: torch.dtype, kernels: Kernels) -> Linear:
    dense = prepare(layer.weight, layer.activation, layer.input_scale, dtype, kernels)
    return dense if layer.outliers is None else _Sum(dense, prepare_sparse(layer.outliers, kernels))


class _Split:
    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, x_TK: Tensor) -> Tensor:
        return torch.cat([part(x_TK).to(x_TK.dtype) for part in self._parts], -1)


class _Sum:
    """Rounded weights and those kept apart, added in float32."""

    def __init__(self, dense: Linear, sparse: Linear) -> None:
        self._dense, self._sparse = dense, sparse

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._dense(x_TK).float() + self._sparse(x_TK)


class _Biased:
    def __init__(self, linear: Linear, bias_N: Tensor | None) -> None:
        self._linear, self._bias_N = linear, bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN = self._linear(x_TK).to(x_TK.dtype)
        return y_TN if self._bias_N is None else y_TN + self._bias_N


def short_headed(model: QuantizedModel) -> QuantizedModel:
    """The model with the rows of its head that `head_ids` names, and a head of its own where it was the embedding."""
    ids_D, linears, tensors = model.head_ids, dict[str, QLinear](), dict[str, Tensor]()
    if ids_D is None:
        return model
    if "lm_head" in model.linears:
        linears["lm_head"] = picked_rows(model.linears["lm_head"], ids_D)
    else:
        tensors[HEAD] = model.tensors[EMBEDDING if model.arch.tied else HEAD][ids_D]
    if "lm_head.bias" in model.tensors:
        tensors["lm_head.bias"] = model.tensors["lm_head.bias"][ids_D]
    over: Any = ChainMap  # its types refuse read-only mappings; nothing is looked up before it is asked for
    arch = replace(model.arch, tied=False)
    return replace(model, arch=arch, tensors=over(tensors, model.tensors), linears=over(linears, model.linears))


def widened(logits_TD: Tensor, ids_D: Tensor | None, vocab: int) -> Tensor:
    """Logits `[T, V]`, minus infinity for ids that are not kept: their probability is 0. None: all are kept."""
    if ids_D is None:
        return logits_TD
    return torch.full((len(logits_TD), vocab), -math.inf).index_copy_(1, ids_D, logits_TD)
