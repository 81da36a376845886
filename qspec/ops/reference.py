"""Eager twins: what every fast kernel must compute. T tokens, K input features, N output features."""

import torch
from torch import Tensor

from qspec.numerics.quantization.affine import QTensor, quantize_activation_dynamic
from qspec.numerics.quantization.blocks import PerGroup, PerToken, from_blocks, to_blocks
from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, symmetric_scale
from qspec.numerics.quantization.formats import INT8
from qspec.plan import TensorScheme


def int8_linear(x_TK: Tensor, codes_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """W8A8: per-token symmetric INT8 activations, exact integer products, both scales; float32 `[T, N]`."""
    q_TK, scale_T1 = quantize_activation_dynamic(x_TK, INT8)
    # float64 holds the integer sums exactly (|sum| < 2**53) and is far faster on CPU than an int32 matmul.
    acc_TN = q_TK.double() @ codes_NK.double().T
    return acc_TN.float() * scale_T1 * scale_N1.reshape(1, -1)


def grouped_int8_linear(
    x_TK: Tensor, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None = None, by_group: bool = False
) -> Tensor:
    """INT8 activations and integer weights in groups of inputs, float32 `[T, N]`.

    Per group, in order: y += (exact sum of products) * scale of the input * scale of the weight, each step rounded to
    float32. Inputs are rounded per token, or (`by_group`) per token and group.
    """
    t, (n, groups) = len(x_TK), scale_NG.shape
    size = codes_NK.shape[1] // groups
    q_TK, scale_Tx = quantize_activation_dynamic(x_TK.reshape(-1, size) if by_group else x_TK, INT8)
    q_TGS, scale_TG = q_TK.reshape(t, groups, size).double(), scale_Tx.reshape(t, -1).expand(t, groups)
    codes_NGS = codes_NK.reshape(n, groups, size).double()
    if zero_NG is not None:
        codes_NGS = codes_NGS - zero_NG.double()[..., None]
    y_TN = torch.zeros(t, n)
    for g in range(groups):
        acc_TN = (q_TGS[:, g] @ codes_NGS[:, g].T).float()
        y_TN = y_TN + acc_TN * scale_TG[:, g : g + 1] * scale_NG[:, g]
    return y_TN


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
    if activation is not None and is_int8_grouped(weight, activation):
        by_group = isinstance(activation.granularity, PerGroup)
        return grouped_int8_linear(x_TK, weight.codes, weight.scale, weight.zero_point, by_group)
    x_TK = x_TK.float() if activation is None else fake_quantize(x_TK, activation, input_scale)
    return x_TK @ weight.dequantize().T


def is_int8_dynamic(weight: QTensor, activation: TensorScheme | None) -> bool:
    """Whether this is W8A8 with per-channel weights and per-token activations, which integer kernels serve."""
    if activation is None or activation.fmt.name != "int8" or weight.fmt.name != "int8":
        return False
    return activation.dynamic and isinstance(activation.granularity, PerToken) and weight.scale.shape[-1] == 1


def is_int8_grouped(weight: QTensor, activation: TensorScheme) -> bool:
    """Whether integers are multiplied in groups: of INT8 or INT4 weights, under run-time inputs per token or group."""
    if weight.fmt.is_float or activation.fmt != INT8 or not activation.dynamic:
        return False
    grouped = isinstance(weight.granularity, PerGroup)
    return grouped and (isinstance(activation.granularity, PerToken) or activation.granularity == weight.granularity)
