"""Eager twins of the CUDA operations, on any device, without a host synchronisation; and the layouts they share.

N rows, H hidden, I intermediate, O outputs, K inputs, B sequences, R rows per sequence, Q query heads, G KV heads,
D head size, L positions of a cache, V vocabulary. Arithmetic is float32; results have the dtype of the input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.codes import quantize_blocks, symmetric_scale
from qspec.numerics.quantization.formats import FORMATS, INT4, INT8, NumFormat
from qspec.numerics.speculation.probs import sample

Rows = tuple[Tensor, Tensor | None]
"""Codes `[N, K]` and float32 scales `[N]`; values in float and None."""


@dataclass(frozen=True)
class CudaWeight:
    """A weight as `linear` reads it.

    codes: `[O, K]`, INT4 as bytes `[O, K / 2]`, input 2i low and 2i + 1 high; scale: float32 `[O]` or
    `[O, K / group]`; dtype: of the outputs. `fmt` None is a float weight without scale. one_scale: all `[O]` are one.
    """

    codes: Tensor
    scale: Tensor | None
    fmt: NumFormat | None
    group_size: int | None
    dtype: torch.dtype = torch.bfloat16
    one_scale: bool = False


@dataclass(frozen=True)
class KVLayer:
    """Keys and values `[B, G, L, D]` of one layer, written in place.

    Scales: a number for the whole tensor, or float32 `[B, G, L]`, which `rope_write` fills; unused for float caches.
    """

    k_BGLD: Tensor
    v_BGLD: Tensor
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0


def pack(weight: QTensor, dtype: torch.dtype = torch.bfloat16) -> CudaWeight:
    """A quantized weight in the kernels' layout. Raises `ValueError` for what they cannot read."""
    if weight.zero_point is not None or not isinstance(weight.granularity, PerTensor | PerChannel | PerGroup):
        raise ValueError(f"{weight.granularity}: weights are symmetric, per tensor, channel or group; choose one")
    group = weight.granularity.size if isinstance(weight.granularity, PerGroup) else None
    scale = weight.scale.float() if group else weight.scale.float().reshape(-1).expand(weight.shape[0]).contiguous()
    codes = weight.codes.contiguous()
    if weight.fmt == INT4:
        if codes.shape[1] % 2:
            raise ValueError(f"{codes.shape[1]} inputs: INT4 codes are stored in pairs; pad to an even number")
        codes = ((codes[:, 1::2] << 4) | (codes[:, ::2] & 0xF)).view(torch.uint8)
    return CudaWeight(codes, scale, weight.fmt, group, dtype, isinstance(weight.granularity, PerTensor))


def unpacked(weight: CudaWeight) -> Tensor:
    """The float32 matrix `[O, K]` that a packed weight stands for."""
    codes = weight.codes
    if weight.fmt == INT4:
        pair = codes.view(torch.int8)
        codes = torch.stack(((pair << 4) >> 4, pair >> 4), -1).flatten(1)
    if weight.scale is None:
        return codes.float()
    if weight.group_size is None:
        return codes.float() * weight.scale[:, None]
    return codes.float() * weight.scale.repeat_interleave(weight.group_size, 1)


def quantize_rows(x_NH: Tensor, fmt: NumFormat, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales `[N]`: one per row from its own range, or the given one (static, a single number)."""
    if scale is None:
        scale_N1 = symmetric_scale(x_NH.abs().amax(-1, keepdim=True), fmt)
    else:
        scale_N1 = scale.float().reshape(1, 1).expand(len(x_NH), 1)
    return quantize_blocks(x_NH, scale_N1, None, fmt), scale_N1[:, 0]


def add_rms_norm(
    x_NH: Tensor, residual_NH: Tensor | None, weight_H: Tensor, eps: float, fmt: NumFormat | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes and scales of the normalised sum, and the sum itself, rounded to the dtype of `x` before it is read."""
    sum_NH = x_NH if residual_NH is None else (x_NH.float() + residual_NH.float()).to(x_NH.dtype)
    y_NH = sum_NH.float()
    y_NH = y_NH * torch.rsqrt(y_NH.square().mean(-1, keepdim=True) + eps) * weight_H.float()
    return *_rounded(y_NH, fmt, scale, x_NH.dtype), sum_NH


def silu_mul(gate_up_N2I: Tensor, fmt: NumFormat | None, scale: Tensor | None) -> Rows:
    """Codes and scales of SiLU(gate) * up."""
    gate_NI, up_NI = gate_up_N2I.float().chunk(2, -1)
    return _rounded(F.silu(gate_NI) * up_NI, fmt, scale, gate_up_N2I.dtype)


def linear(x: Rows, weight: CudaWeight) -> Tensor:
    """`x @ W^T` `[N, O]` in `weight.dtype`; integers are multiplied in float64, where their sums are exact."""
    codes_NK, scale_N = x
    if not codes_NK.is_floating_point() and weight.fmt == INT8 and weight.group_size is None:
        assert weight.scale is not None
        y_NO = (codes_NK.double() @ weight.codes.double().T).float() * weight.scale
    else:
        y_NO = codes_NK.float() @ unpacked(weight).T
    return (y_NO if scale_N is None else y_NO * scale_N[:, None]).to(weight.dtype)


def rope_write(
    q_BRQD: Tensor,
    k_BRGD: Tensor,
    v_BRGD: Tensor,
    cos_LD: Tensor,
    sin_LD: Tensor,
    positions_BR: Tensor,
    slots_BR: Tensor,
    cache: KVLayer,
) -> Tensor:
    """Rotated queries; keys (rotated) and values go to `cache` at `slots`. Tables narrower than D rotate the first."""
    cos, sin = cos_LD[positions_BR][:, :, None].float(), sin_LD[positions_BR][:, :, None].float()
    _write(cache.k_BGLD, cache.k_scale, _rotate(k_BRGD, cos, sin), slots_BR)
    _write(cache.v_BGLD, cache.v_scale, v_BRGD.float(), slots_BR)
    return _rotate(q_BRQD, cos, sin).to(q_BRQD.dtype)


def attend(q_BRQD: Tensor, cache: KVLayer, lengths_B: Tensor, ancestors_BR: Tensor, scale: float) -> Tensor:
    """Attention `[B, R, Q, D]`: row r sees `cache[:lengths_b]` and node `lengths_b + j` where bit j is set.

    A row that sees nothing reads zero.
    """
    b, r, heads, d = q_BRQD.shape
    groups, length = cache.k_BGLD.shape[1:3]
    node_BL = torch.arange(length, device=q_BRQD.device) - lengths_B[:, None]
    bit_BRL = (ancestors_BR[:, :, None] >> node_BL.clamp(0, 63)[:, None]) & 1
    sees_BRL = (node_BL < 0)[:, None] | ((node_BL >= 0) & (node_BL < 64))[:, None] & (bit_BRL == 1)
    q = q_BRQD.float().reshape(b, r, groups, heads // groups, d)
    s = torch.einsum("brgqd,bgld->bgrql", q, _values(cache.k_BGLD, cache.k_scale)) * scale
    sees = sees_BRL[:, None, :, None]
    p = s.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees, 0.0)
    values = _values(cache.v_BGLD, cache.v_scale)
    values = torch.where(sees_BRL.any(1)[:, None, :, None], values, 0.0)  # memory never written may hold NaN
    return torch.einsum("bgrql,bgld->brgqd", p, values).reshape(q_BRQD.shape).to(q_BRQD.dtype)


def verify_greedy(logits_BRV: Tensor, drafts_BK: Tensor) -> tuple[Tensor, Tensor]:
    """How many leading drafts are the arg-max, int32 `[B]`, and the arg-max behind them, int64 `[B]`; R = K + 1."""
    best_BR = logits_BRV.argmax(-1)
    accepted_B = _leading(drafts_BK == best_BR[:, :-1])
    return accepted_B.int(), best_BR.gather(1, accepted_B[:, None])[:, 0]


def verify_sampling(
    probs_BRV: Tensor, drafts_BK: Tensor, draft_probs_BKV: Tensor | None, uniforms_BR: Tensor
) -> tuple[Tensor, Tensor]:
    """`verify_sampling` for B chains at once; R = K + 1. Source: arXiv 2211.17192, algorithm 1.

    Drafts without distributions (None) are certain.
    """
    k, token_BK1 = drafts_BK.shape[1], drafts_BK[..., None]
    stands_BK = probs_BRV[:, :k].gather(-1, token_BK1)[..., 0].double()
    if draft_probs_BKV is not None:
        stands_BK = (stands_BK / draft_probs_BKV.gather(-1, token_BK1)[..., 0].double()).clamp(max=1.0)
    accepted_B = _leading(uniforms_BR[:, :k] < stands_BK)
    rejected_BV = _row(probs_BRV, accepted_B)
    if k:
        row_B = accepted_B.clamp(max=k - 1)
        if draft_probs_BKV is None:
            rest_BV = rejected_BV.scatter(-1, drafts_BK.gather(1, row_B[:, None]), 0.0)
        else:
            rest_BV = (rejected_BV - _row(draft_probs_BKV, row_B)).clamp(min=0.0)
        replaced_B1 = (accepted_B < k)[:, None] & (rest_BV.sum(-1, keepdim=True) > 0)
        rejected_BV = torch.where(replaced_B1, rest_BV, rejected_BV)
    return accepted_B.int(), sample(rejected_BV, uniforms_BR[:, k])


def _rounded(y_NH: Tensor, fmt: NumFormat | None, scale: Tensor | None, dtype: torch.dtype) -> Rows:
    return (y_NH.to(dtype), None) if fmt is None else quantize_rows(y_NH, fmt, scale)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x.float().split((width, x.shape[-1] - width), -1)
    left, right = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-right, left), -1) * sin, rest), -1)


def _write(codes_BGLD: Tensor, scale: float | Tensor, x_BRGD: Tensor, slots_BR: Tensor) -> None:
    batch_B1 = torch.arange(len(x_BRGD), device=x_BRGD.device)[:, None]
    fmt = next((f for f in FORMATS.values() if f.storage == codes_BGLD.dtype and f != INT4), None)
    if fmt is None:
        codes_BGLD[batch_B1, :, slots_BR] = x_BRGD.to(codes_BGLD.dtype)
        return
    if isinstance(scale, Tensor):
        scales = symmetric_scale(x_BRGD.abs().amax(-1, keepdim=True), fmt)
        scale[batch_B1, :, slots_BR] = scales[..., 0]
    else:
        scales = torch.full((), scale, device=x_BRGD.device)
    codes = quantize_blocks(x_BRGD, scales, None, fmt)
    codes_BGLD.view(torch.uint8)[batch_B1, :, slots_BR] = codes.view(torch.uint8)


def _values(codes_BGLD: Tensor, scale: float | Tensor) -> Tensor:
    if codes_BGLD.dtype not in (fmt.storage for fmt in FORMATS.values()):
        return codes_BGLD.float()
    return codes_BGLD.float() * (scale[..., None] if isinstance(scale, Tensor) else scale)


def _leading(stands_BK: Tensor) -> Tensor:
    return stands_BK.long().cumprod(1).sum(1)


def _row(x_BRV: Tensor, row_B: Tensor) -> Tensor:
    return x_BRV.gather(1, row_B[:, None, None].expand(-1, 1, x_BRV.shape[-1]))[:, 0]
