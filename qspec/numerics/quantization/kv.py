"""Key and value codes of a KV cache `[…, heads, tokens, head_dim]`: stored scales, or one per token and head."""

import torch
from torch import Tensor

from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks, symmetric_scale
from qspec.numerics.quantization.formats import NumFormat


def static_scale(amax: Tensor, fmt: NumFormat) -> Tensor:
    """Float32 scale of calibrated magnitudes, of the same shape: `[1]` (per tensor) or `[H]` (per head)."""
    return symmetric_scale(amax, fmt)


def quantize_static(x_HTD: Tensor, scale: Tensor, fmt: NumFormat) -> Tensor:
    """Codes `[H, T, D]` under a stored scale `[1]`, `[H]` or one that broadcasts; values past its range saturate."""
    return quantize_blocks(x_HTD, _over_heads(scale), None, fmt)


def quantize_per_token_head(x_HTD: Tensor, fmt: NumFormat) -> tuple[Tensor, Tensor]:
    """Codes `[H, T, D]` and float32 scales `[H, T, 1]`. A token's codes depend on no other token."""
    scale_HT1 = symmetric_scale(x_HTD.abs().amax(-1, keepdim=True), fmt)
    return quantize_blocks(x_HTD, scale_HT1, None, fmt), scale_HT1


def dequantize(codes_HTD: Tensor, scale: Tensor) -> Tensor:
    """Float32 values of codes under a scale `[1]`, `[H]` or `[H, T, 1]`."""
    return dequantize_blocks(codes_HTD, _over_heads(scale), None)


def pack_nibbles(codes: Tensor) -> Tensor:
    """INT4 codes `[…, D]` (int8 in [-8, 7], D even) to bytes `[…, D / 2]`: channel 2i low, 2i + 1 high."""
    low, high = codes[..., ::2], codes[..., 1::2]
    return ((high << 4) | (low & 0xF)).view(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The int8 codes `[…, D]` of `pack_nibbles`' bytes; shifts of int8 carry the sign."""
    pair = packed.view(torch.int8)
    return torch.stack(((pair << 4) >> 4, pair >> 4), -1).flatten(-2)


def _over_heads(scale: Tensor) -> Tensor:
    """A scale that broadcasts over `[H, T, D]`."""
    return scale if scale.dim() >= 3 else scale.reshape(-1, 1, 1)
