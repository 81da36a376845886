"""Which kernel serves a quantized linear on this machine."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.ops import cpu, reference
from qspec.plan import TensorScheme

Kernels = Literal["auto", "torch", "reference"]
Linear = Callable[[Tensor], Tensor]


def prepare(
    weight: QTensor,
    activation: TensorScheme | None,
    input_scale: Tensor | None,
    dtype: torch.dtype,
    kernels: Kernels = "auto",
) -> Linear:
    """A callable `x_TK -> y_TN` without bias; `reference` is the eager twin of whatever `auto` would take."""
    exact = partial(reference.linear, weight=weight, activation=activation, input_scale=input_scale)
    if kernels == "reference":
        return exact
    if not weight.codes.is_cpu:  # calibration on a GPU
        return cpu.DecodedLinear(weight, activation, input_scale, dtype)
    if activation is not None and reference.is_int8_grouped(weight, activation):
        return exact  # slow, and every row as if alone, as the C++ core computes it
    if reference.is_int8_dynamic(weight, activation) and "fbgemm" in torch.backends.quantized.supported_engines:
        return cpu.Int8Linear(weight.codes, weight.scale)
    if activation is None and cpu.Int4Linear.fits(weight):
        return cpu.Int4Linear(weight)
    return cpu.DecodedLinear(weight, activation, input_scale, dtype)


def prepare_sparse(matrix: SparseMatrix, kernels: Kernels = "auto") -> Linear:
    """A callable `x_TK -> y_TN` in float32 for weights kept apart; `reference` is its eager twin."""
    return matrix.matmul if kernels == "reference" else cpu.SparseLinear(matrix)
