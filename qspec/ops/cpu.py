"""CPU kernels of torch behind plain callables `x_TK -> y_TN`, weights packed once.

**INT8 without VNNI.** AVX2 multiplies u8 x s8 in pairs into a *saturating* int16 (`vpmaddubsw`): with 8-bit
activations 255*127*2 overflows and torch's INT8 matmuls return wrong numbers, silently. An activation code q in
[-127, 127] is therefore split into two halves, q = a + b with |a|, |b| <= 64, stored as u8 with zero point 64: then
128*127*2 < 2**15, both products are exact, and one call with twice the rows returns both. Decoding is bound by
reading weights, so the second row is nearly free. CPUs with VNNI accumulate in int32 and skip the split; which one
this is, a probe of the real kernel decides.
"""

from functools import lru_cache
import warnings

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerGroup
from qspec.numerics.quantization.formats import SCALE_FLOOR
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.ops import reference
from qspec.plan import TensorScheme


class FloatLinear:
    """`x @ W^T` in the dtype of the weight `[N, K]`.

    For few rows and many more outputs than inputs (an LM head), BLAS repacks the whole weight in every call; with the
    operands swapped it packs the rows instead (AVX2, 49152 x 576: 37 -> 11 ms at 2 rows, 16 -> 10 ms at 1). Rows come
    in multiples of 4, so that a row's sums do not depend on how many others there are.
    """

    def __init__(self, weight_NK: Tensor) -> None:
        self._weight_NK = weight_NK
        self._tall = weight_NK.shape[0] >= 16 * weight_NK.shape[1]

    def __call__(self, x_TK: Tensor) -> Tensor:
        t = x_TK.shape[0]
        if not self._tall or t > 16:
            return F.linear(x_TK, self._weight_NK)
        parts = [self._weight_NK @ F.pad(part, (0, 0, 0, -part.shape[0] % 4)).T for part in x_TK.split(8)]
        return torch.cat([y_NT.T for y_NT in parts])[:t]


class Int8Linear:
    """W8A8 with dynamic per-token activations on torch's FBGEMM kernel; equals `reference.int8_linear`."""

    def __init__(self, codes_NK: Tensor, scale_N1: Tensor) -> None:
        self._packed = _pack_int8(codes_NK, scale_N1.reshape(-1))
        self._split = not _full_range_is_exact()

    def __call__(self, x_TK: Tensor) -> Tensor:
        amax_T1 = x_TK.abs().amax(1, keepdim=True)
        scale_T1 = (amax_T1.float() / 127.0).clamp_min_(SCALE_FLOOR)
        q_TK = (x_TK.float() / scale_T1).round_()
        if not self._split:
            return _int8_matmul(q_TK, 128, self._packed).mul_(scale_T1)
        half_TK = (q_TK * 0.5).trunc_()
        y = _int8_matmul(torch.cat((half_TK, q_TK - half_TK)), 64, self._packed)
        t = x_TK.shape[0]
        return (y[:t] + y[t:]).mul_(scale_T1)


class Int4Linear:
    """W4A16 in groups on torch's packed INT4 kernel (bfloat16 in and out, float32 accumulation)."""

    def __init__(self, weight: QTensor) -> None:
        assert isinstance(weight.granularity, PerGroup)
        assert weight.zero_point is None
        self._group = weight.granularity.size
        unsigned_NK = weight.codes.int() + 8  # the kernel stores 0..15 and subtracts 8 itself
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned_NK, 1)
        scale_GN = weight.scale.T.contiguous()
        self._scale_zero = torch.stack((scale_GN, torch.zeros_like(scale_GN)), -1).bfloat16()

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK.bfloat16(), self._packed, self._group, self._scale_zero
        )
        return y_TN.to(x_TK.dtype)

    @staticmethod
    def fits(weight: QTensor) -> bool:
        """Whether the kernel takes this shape: groups of 32/64/128/256 that divide K, N a multiple of 16."""
        if not isinstance(weight.granularity, PerGroup) or weight.zero_point is not None or weight.fmt.name != "int4":
            return False
        n, k = weight.shape
        return weight.granularity.size in (32, 64, 128, 256) and k % weight.granularity.size == 0 and n % 16 == 0


class DecodedLinear:
    """Weights decoded to `dtype` once at load, activations rounded per call: FP8's numbers without FP8 units."""

    def __init__(
        self, weight: QTensor, activation: TensorScheme | None, input_scale: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._linear = FloatLinear(weight.dequantize().to(dtype))
        self._activation, self._input_scale = activation, input_scale

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._activation is not None:
            x_TK = reference.fake_quantize(x_TK, self._activation, self._input_scale).to(x_TK.dtype)
        return self._linear(x_TK)


class SparseLinear:
    """`x S^T` for few values S, float32: an output is a weighted bag of inputs. Equals `SparseMatrix.matmul`.

    torch's embedding bag is as fast as its CSR matmul, which only MKL has (4096 x 4096, 0.5 %: 0.4 ms at 8 rows, half
    of it at 64). Rows come in multiples of 8, so that a row's sums do not depend on how many others there are.
    """

    def __init__(self, matrix: SparseMatrix) -> None:
        self._indptr, self._indices, self._values = matrix.indptr, matrix.indices, matrix.values.float()

    def __call__(self, x_TK: Tensor) -> Tensor:
        t = x_TK.shape[0]
        x_KT = F.pad(x_TK.float(), (0, 0, 0, -t % 8)).T.contiguous()
        y_NT = F.embedding_bag(
            self._indices, x_KT, self._indptr, mode="sum", per_sample_weights=self._values, include_last_offset=True
        )
        return y_NT.T[:t]


def decode_fp8_e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn to float32 by moving bits into float16's fields: about five times torch's own conversion.

    float16 has the exponent bias 15 where e4m3 has 7, so the bit pattern reads as value / 256 (subnormals too).
    NaN is not handled: a saturating quantizer never writes it.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).float().mul_(256.0)


def _int8_matmul(q_TK: Tensor, zero_point: int, packed: object) -> Tensor:
    y_TN: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(q_TK, 1.0, zero_point, packed)
    return y_TN


def _pack_int8(codes_NK: Tensor, scale_N: Tensor) -> object:
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch announces the end of quantized tensor types; this kernel has no entry without one yet.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            zeros_N = torch.zeros(codes_NK.shape[0], dtype=torch.int64)
            weight = torch._make_per_channel_quantized_tensor(codes_NK.contiguous(), scale_N.float(), zeros_N, 0)
            return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine


@lru_cache(maxsize=1)
def _full_range_is_exact() -> bool:
    """Whether 8-bit activations survive the kernel here: the worst case, all codes at their maximum."""
    k = 64
    packed = _pack_int8(torch.full((8, k), 127, dtype=torch.int8), torch.ones(8))
    y = _int8_matmul(torch.full((2, k), 127.0), 128, packed)
    return bool((y == 127.0 * 127.0 * k).all())
