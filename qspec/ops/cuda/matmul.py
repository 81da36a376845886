# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Linear layers on a GPU.

| rows | INT8 of INT8 | FP8 of FP8 | other inputs, or groups |
|---|---|---|---|
| up to 16 | `few_rows` | `few_rows` | `few_rows` |
| up to 64 | `torch._int_mm`, then scales | `torch._scaled_mm` | `few_rows`; torch's matmul for float weights |
| more | the same | the same | weights decoded once, then torch's float matmul |
"""

import torch
from torch import Tensor
import torch.nn.functional as F
import triton
import triton.language as tl

from qspec.numerics.quantization.formats import INT4
from qspec.ops import reference_cuda as twins
from qspec.ops.cuda.device import capability
from qspec.ops.cuda.few_rows import FP8, best_tiles, few_rows, finished, product, stored_group
from qspec.ops.cuda.rows import BITS, KINDS, encode, stored_bits
from qspec.ops.reference_cuda import CudaWeight, Rows

FEW = 16
"""Rows that one tile of the tensor cores holds: as many cost what one costs."""


@triton.jit
def decode_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    width,
    groups,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of `BLOCK` stored inputs of one output, `GROUP` of them under each scale."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + row * width + k, k < width, 0.0)
    scale = tl.load(scale_ptr + row * groups + k // GROUP, k < width, 0.0)
    if PACKED:
        both = tl.interleave(((w << 4) >> 4).to(tl.float32) * scale, (w >> 4).to(tl.float32) * scale)
        at = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        tl.store(out_ptr + row * 2 * width + at, encode(both, KIND), at < 2 * width)
    else:
        tl.store(out_ptr + row * width + k, encode(w.to(tl.float32) * scale, KIND), k < width)


def linear(x: Rows, weight: CudaWeight) -> Tensor:
    """`linear` of the twins; outputs of other types than bfloat16 and float32 are left to it."""
    codes_NK, scale_N = x[0].contiguous(), x[1]
    if weight.dtype not in BITS or not len(codes_NK):
        return twins.linear(x, weight)
    dot = product(codes_NK.dtype, weight)
    coded = scale_N is not None and weight.group_size is None and weight.fmt != INT4
    int8 = coded and dot == torch.int8
    fp8 = coded and dot == FP8 and _takes_fp8(codes_NK, weight.codes)
    most = FEW if int8 or fp8 or weight.fmt is None else 4 * FEW
    if len(codes_NK) <= most and dot is not None:
        return few_rows(codes_NK, scale_N, weight, best_tiles(codes_NK, scale_N, weight))
    if scale_N is not None and (int8 or fp8):
        return (_int8 if int8 else _fp8)(codes_NK, scale_N, weight)
    x_NK = codes_NK if scale_N is None else codes_NK.float() * scale_N[:, None]
    return F.linear(x_NK.to(weight.dtype), decoded(weight))


def decoded(weight: CudaWeight) -> Tensor:
    """The matrix `[O, K]` in the dtype of the outputs: reads the codes once, writes 2 or 4 bytes a weight."""
    if weight.scale is None:
        return weight.codes.to(weight.dtype)
    (outputs, width), packed = weight.codes.shape, weight.fmt == INT4
    group = stored_group(weight) or width
    out_OK = torch.empty(outputs, width * (1 + packed), dtype=weight.dtype, device=weight.codes.device)
    block = min(triton.next_power_of_2(width), 1024)
    decode_kernel[outputs, triton.cdiv(width, block)](
        weight.codes.view(torch.int8) if packed else weight.codes,
        weight.scale,
        stored_bits(out_OK),
        width,
        width // group,
        GROUP=group,
        PACKED=packed,
        KIND=KINDS[weight.dtype],
        BLOCK=block,
    )
    return out_OK


def _int8(codes_NK: Tensor, scale_N: Tensor, weight: CudaWeight) -> Tensor:
    """More than 16 rows, as torch asks; inputs and outputs are padded to multiples of 8."""
    sums = torch._int_mm(_padded(codes_NK, 1, 8), _padded(weight.codes, 8, 8).T)
    out_NO = torch.empty(len(codes_NK), len(weight.codes), dtype=weight.dtype, device=codes_NK.device)
    return finished(sums[None, :, : len(weight.codes)].contiguous(), scale_N, weight.scale, out_NO)


def _fp8(codes_NK: Tensor, scale_N: Tensor, weight: CudaWeight) -> Tensor:
    """Scales per row within the matmul, one number each if they are one; inputs and outputs are padded to 16.

    Sums in the tensor cores' own precision (about 14 bits), as serving engines do: far finer than FP8's steps.
    """
    assert weight.scale is not None
    a_NK, b_KO = _padded(codes_NK, 1, 16), _padded(weight.codes, 16, 16).T
    scale_O, outputs = F.pad(weight.scale, (0, b_KO.shape[1] - len(weight.scale))), len(weight.codes)
    if weight.one_scale and scale_N.stride(0) == 0:
        scales = scale_N[:1].reshape(()), scale_O[:1].reshape(())
    elif weight.dtype == torch.bfloat16 and capability(codes_NK.device) >= (9, 0):
        scales = scale_N[:, None].contiguous(), scale_O[None]
    else:
        one = torch.ones((), device=codes_NK.device)
        sums = torch._scaled_mm(a_NK, b_KO, one, one, out_dtype=torch.float32, use_fast_accum=True)
        out_NO = torch.empty(len(codes_NK), outputs, dtype=weight.dtype, device=codes_NK.device)
        return finished(sums[None, :, :outputs].contiguous(), scale_N, weight.scale, out_NO)
    return torch._scaled_mm(a_NK, b_KO, *scales, out_dtype=weight.dtype, use_fast_accum=True)[:, :outputs].contiguous()


def _takes_fp8(a: Tensor, b: Tensor) -> bool:
    return capability(a.device) >= (8, 9)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros below and to the right, up to multiples; no copy where there is nothing to add."""
    more = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    return F.pad(x.view(torch.int8), more).view(x.dtype) if any(more) else x
