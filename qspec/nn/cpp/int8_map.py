"""Linear layers of a small module in INT8: codes per row, inputs rounded per token, one thread."""

import torch
from torch import Tensor, nn

from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import NativeLinear
from qspec.nn.cpp.weights import Packed, pack_linears
from qspec.numerics.quantization.affine import QTensor, quantize_weight
from qspec.numerics.quantization.blocks import PerChannel, PerToken
from qspec.numerics.quantization.formats import INT8
from qspec.ops.select import Linear, prepare
from qspec.plan import TensorScheme
from qspec.records import QLinear

INPUTS = TensorScheme(INT8, PerToken(), dynamic=True)


class Int8Map(nn.Module):
    """`x_TK -> y_TN` on the C++ core, or torch's kernels where there is none."""

    def __init__(self, weight: QTensor) -> None:
        super().__init__()
        self.weight = weight
        self._run: Linear
        if NativeDecoder.missing() is None:
            self._run = NativeLinear(pack_linears([QLinear(weight, INPUTS, None, None)], [None]))
        else:
            self._run = prepare(weight, INPUTS, None, torch.float32)

    @classmethod
    def rounded(cls, weight_NK: Tensor) -> "Int8Map":
        """A map of a float weight, rounded to nearest."""
        return cls(quantize_weight(weight_NK.detach().float(), INT8, PerChannel()))

    @property
    def packed(self) -> Packed | None:
        """The weight as the C++ core reads it; None where there is no core."""
        return self._run.packed if isinstance(self._run, NativeLinear) else None

    def forward(self, x_TK: Tensor) -> Tensor:
        return self._run(x_TK)
