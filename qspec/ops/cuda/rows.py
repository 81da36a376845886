# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels that read whole rows once: quantize, residual + RMSNorm, SiLU(gate) * up.

Rounding is done on bits, ties to even and saturating, as torch does it: Triton's interpreter rounds neither FP8 nor
bfloat16 to even (`_convert_float` drops or half-adds the cut bits), and one law must hold there and on every GPU.
"""

import torch
from torch import Tensor
import triton
import triton.language as tl

from qspec.numerics.quantization.formats import SCALE_FLOOR, NumFormat
from qspec.ops.reference_cuda import Rows

PLAIN, NORM, SILU = (tl.constexpr(i) for i in range(3))
KINDS = {
    torch.int8: 0,
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
    torch.bfloat16: 3,
    torch.float32: 4,
}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.float32}


@triton.jit
def encode_fp8(
    x, top: tl.constexpr, normal: tl.constexpr, magic: tl.constexpr, shift: tl.constexpr, bias: tl.constexpr
):
    """Codes of a format with the largest value `top` and the smallest normal one; `bias` less than float32's."""
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    size = tl.minimum(tl.abs(x), top)
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift) - (bias << (23 - shift))
    small = (size + magic).to(tl.int32, bitcast=True) & 0xFF  # the last bit of `magic` is worth a subnormal step
    return (tl.where(size < normal, small, large) | (sign << 7)).to(tl.uint8)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """float32 to the codes of `KINDS`, as integers (float32 itself for the last)."""
    if KIND == 0:
        whole = tl.minimum(tl.maximum(x, -128.0), 127.0) + 12582912.0  # 1.5 * 2**23: its last bit is worth 1
        out = (whole - 12582912.0).to(tl.int8)
    elif KIND == 1:
        out = encode_fp8(x, 448.0, 0.015625, 16384.0, 20, 120)
    elif KIND == 2:
        out = encode_fp8(x, 57344.0, 0.00006103515625, 128.0, 21, 112)
    elif KIND == 3:
        bits = x.to(tl.int32, bitcast=True)
        out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        out = tl.where(x == x, out, 0x7FC0)  # a NaN of a GPU is all ones: rounded up, it would be -0
    else:
        out = x
    return out


@triton.jit
def rows_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    given_ptr,
    codes_ptr,
    scale_ptr,
    sum_ptr,
    width,
    eps,
    qmax,
    floor,
    MODE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    STATIC: tl.constexpr,
    KIND: tl.constexpr,
    SUM_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row of `width` results; a row of SILU is 2 * width long."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    if MODE == 2:
        gate = tl.load(x_ptr + at + row * width, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + at + row * width + width, inside, 0.0).to(tl.float32)
        y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    else:
        y = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    if MODE == 1:
        if RESIDUAL:
            y += tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
            stored = encode(y, SUM_KIND)
            tl.store(sum_ptr + at, stored, inside)
            if SUM_KIND == 3:
                y = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        mean = tl.sum(y * y) / width
        y = y * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    if QUANTIZE:
        if STATIC:
            scale = tl.load(given_ptr).to(tl.float32)
        else:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(y)), qmax), floor)
            tl.store(scale_ptr + row, scale)
        y = tl.div_rn(y, scale)
    tl.store(codes_ptr + at, encode(y, KIND), inside)


def quantize_rows(x_NH: Tensor, fmt: NumFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Kernel of the twin of that name."""
    codes_NH, scale_N = _launch(x_NH, x_NH.shape[1], fmt, scale, PLAIN.value)
    assert scale_N is not None
    return codes_NH, scale_N


def add_rms_norm(
    x_NH: Tensor, residual_NH: Tensor | None, weight_H: Tensor, eps: float, fmt: NumFormat | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Kernel of the twin of that name."""
    sum_NH = x_NH if residual_NH is None else torch.empty_like(x_NH, memory_format=torch.contiguous_format)
    rounded = _launch(x_NH, x_NH.shape[1], fmt, scale, NORM.value, (residual_NH, weight_H, sum_NH), eps)
    return *rounded, sum_NH


def silu_mul(gate_up_N2I: Tensor, fmt: NumFormat | None, scale: Tensor | None) -> Rows:
    """Kernel of the twin of that name."""
    return _launch(gate_up_N2I, gate_up_N2I.shape[1] // 2, fmt, scale, SILU.value)


def _launch(
    x: Tensor,
    width: int,
    fmt: NumFormat | None,
    given: Tensor | None,
    mode: int,
    norm: tuple[Tensor | None, Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Rows:
    dtype = x.dtype if fmt is None else fmt.storage
    if x.dtype not in BITS or dtype not in KINDS:
        raise ValueError(f"{x.dtype} to {dtype}: rows are bfloat16 or float32; convert them first")
    x = x.contiguous()
    residual, weight, total = norm or (None, x, x)
    codes = torch.empty(len(x), width, dtype=dtype, device=x.device)
    scale_N = torch.empty(len(x), dtype=torch.float32, device=x.device) if given is None else one_scale(given, len(x))
    if len(x):
        block = triton.next_power_of_2(width)
        rows_kernel[(len(x),)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            x if given is None else given,
            stored_bits(codes),
            scale_N,
            stored_bits(total),
            width,
            eps,
            0.0 if fmt is None else float(fmt.qmax),
            SCALE_FLOOR,
            MODE=mode,
            RESIDUAL=residual is not None,
            QUANTIZE=fmt is not None,
            STATIC=given is not None,
            KIND=KINDS[dtype],
            SUM_KIND=KINDS[x.dtype],
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return codes, None if fmt is None else scale_N


def one_scale(given: Tensor, rows: int) -> Tensor:
    """One number for every row, float32 `[rows]` with stride 0, by which `matmul` knows that it is one."""
    return given.float().reshape(1).expand(rows)


def stored_bits(x: Tensor) -> Tensor:
    """The same memory as the integers that `encode` makes."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.view(torch.uint8)
    return x.view(BITS.get(x.dtype, x.dtype))
