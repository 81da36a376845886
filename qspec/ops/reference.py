"""Eager twins: what every fast kernel must compute. T tokens, K input features, N output features."""

from torch import Tensor

from qspec.numerics.affine import QTensor, quantize_activation_dynamic
from qspec.numerics.blocks import PerToken, from_blocks, to_blocks
from qspec.numerics.codes import dequantize_blocks, quantize_blocks, symmetric_scale
from qspec.numerics.formats import INT8
from qspec.plan import TensorScheme


def int8_linear(x_TK: Tensor, codes_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """W8A8: per-token symmetric INT8 activations, exact integer products, both scales; float32 `[T, N]`."""
    q_TK, scale_T1 = quantize_activation_dynamic(x_TK, INT8)
    # float64 holds the integer sums exactly (|sum| < 2**53) and is far faster on CPU than an int32 matmul.
    acc_TN = q_TK.double() @ codes_NK.double().T
    return acc_TN.float() * scale_T1 * scale_N1.reshape(1, -1)


def fake_quantize(x_TK: Tensor, scheme: TensorScheme, scale: Tensor | None = None) -> Tensor:
    """Activations `[T, K]` as a layer reads them: rounded under `scale`, or under each block's own range."""
    blocks = to_blocks(x_TK.float(), scheme.granularity)
    scale = symmetric_scale(blocks.abs().amax(1, keepdim=True), scheme.fmt) if scale is None else scale.reshape(-1, 1)
    values = dequantize_blocks(quantize_blocks(blocks, scale, None, scheme.fmt), scale, None)
    return from_blocks(values, (x_TK.shape[0], x_TK.shape[1]), scheme.granularity)


def linear(x_TK: Tensor, weight: QTensor, activation: TensorScheme | None, input_scale: Tensor | None) -> Tensor:
    """A quantized linear layer without bias, `[T, N]` float32."""
    if is_int8_dynamic(weight, activation):
        return int8_linear(x_TK, weight.codes, weight.scale)
    x_TK = x_TK.float() if activation is None else fake_quantize(x_TK, activation, input_scale)
    return x_TK @ weight.dequantize().T


def is_int8_dynamic(weight: QTensor, activation: TensorScheme | None) -> bool:
    """Whether this is W8A8 with per-channel weights and per-token activations, which integer kernels serve."""
    if activation is None or activation.fmt.name != "int8" or weight.fmt.name != "int8":
        return False
    return activation.dynamic and isinstance(activation.granularity, PerToken) and weight.scale.shape[-1] == 1


def decode_fp8(codes: Tensor) -> Tensor:
    """float8 codes to float32."""
    return codes.float()
