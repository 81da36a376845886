# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels over whole rows: quantize and residual + RMSNorm, held in registers; SiLU(gate) * up, in blocks.

Rounding is done on bits, ties to even and saturating, as torch does it: for Ada, Triton (3.7) converts float32 to FP8
through float16, cut off, which takes what lies just above a tie for the tie; its interpreter does not round to even.
"""

import torch
from torch import Tensor
import triton
import triton.language as tl

from qspec.numerics.quantization.formats import SCALE_FLOOR, NumFormat
from qspec.ops.reference_cuda import Rows

KINDS = {
    torch.int8: 0,
    torch.float8_e4m3fn: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.float32}
SILU_BLOCK = 4096
"""Results of SiLU that a program holds at once: rows of an MLP are longer than its registers."""


@triton.jit
def encode_fp8(x):
    """Codes of E4M3, whose exponents have a bias that is 120 less than float32's."""
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + (1 << 19) - 1 + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF  # the last bit of 16384 is worth a subnormal step
    return (tl.where(size < 0.015625, small, large) | (sign << 7)).to(tl.uint8)  # the smallest normal value


@triton.jit
def encode(x, KIND: tl.constexpr):
    """float32 to the codes of `KINDS`, as integers (float32 itself for the last)."""
    if KIND == 0:
        whole = tl.minimum(tl.maximum(x, -128.0), 127.0) + 12582912.0  # 1.5 * 2**23: its last bit is worth 1
        out = (whole - 12582912.0).to(tl.int8)
    elif KIND == 1:
        out = encode_fp8(x)
    elif KIND == 2:
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
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    STATIC: tl.constexpr,
    KIND: tl.constexpr,
    SUM_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    y = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    if NORM:
        if RESIDUAL:
            y += tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
            stored = encode(y, SUM_KIND)
            tl.store(sum_ptr + at, stored, inside)
            if SUM_KIND == 2:
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


@triton.jit
def gated(x_ptr, row, at, width, BLOCK: tl.constexpr):
    """`BLOCK` results of SiLU from `at` on: a row is the gate, `width` long, and up behind it."""
    column = at + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + 2 * row * width + column, column < width, 0.0).to(tl.float32)
    up = tl.load(x_ptr + 2 * row * width + width + column, column < width, 0.0).to(tl.float32)
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_kernel(
    x_ptr,
    given_ptr,
    codes_ptr,
    scale_ptr,
    width,
    qmax,
    floor,
    QUANTIZE: tl.constexpr,
    STATIC: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks of a row, as many programs apart as a row has; a row under its own range has one, which reads it twice."""
    row = tl.program_id(0).to(tl.int64)
    if QUANTIZE:
        if STATIC:
            scale = tl.load(given_ptr).to(tl.float32)
        else:
            top = tl.zeros([BLOCK], tl.float32)
            for at in range(0, width, BLOCK):
                top = tl.maximum(top, tl.abs(gated(x_ptr, row, at, width, BLOCK)))
            scale = tl.maximum(tl.div_rn(tl.max(top), qmax), floor)
            tl.store(scale_ptr + row, scale)
    for at in range(tl.program_id(1) * BLOCK, width, tl.num_programs(1) * BLOCK):
        y = gated(x_ptr, row, at, width, BLOCK)
        if QUANTIZE:
            y = tl.div_rn(y, scale)
        column = at + tl.arange(0, BLOCK)
        tl.store(codes_ptr + row * width + column, encode(y, KIND), column < width)


def quantize_rows(x_NH: Tensor, fmt: NumFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Kernel of the twin of that name."""
    codes_NH, scale_N = _launch(x_NH, fmt, scale)
    assert scale_N is not None
    return codes_NH, scale_N


def add_rms_norm(
    x_NH: Tensor, residual_NH: Tensor | None, weight_H: Tensor, eps: float, fmt: NumFormat | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Kernel of the twin of that name."""
    sum_NH = x_NH if residual_NH is None else torch.empty_like(x_NH, memory_format=torch.contiguous_format)
    return *_launch(x_NH, fmt, scale, (residual_NH, weight_H, sum_NH), eps), sum_NH


def silu_mul(gate_up_N2I: Tensor, fmt: NumFormat | None, scale: Tensor | None) -> Rows:
    """Kernel of the twin of that name."""
    x, width = gate_up_N2I.contiguous(), gate_up_N2I.shape[1] // 2
    codes, scale_N = _results(x, width, fmt, scale)
    if len(x):
        block = min(triton.next_power_of_2(width), SILU_BLOCK)
        own_range = fmt is not None and scale is None
        silu_kernel[len(x), 1 if own_range else triton.cdiv(width, block)](
            x,
            x if scale is None else scale,
            stored_bits(codes),
            scale_N,
            width,
            0.0 if fmt is None else float(fmt.qmax),
            SCALE_FLOOR,
            QUANTIZE=fmt is not None,
            STATIC=scale is not None,
            KIND=KINDS[codes.dtype],
            BLOCK=block,
            num_warps=_warps(block),
        )
    return codes, None if fmt is None else scale_N


def _launch(
    x: Tensor,
    fmt: NumFormat | None,
    given: Tensor | None,
    norm: tuple[Tensor | None, Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Rows:
    x, width = x.contiguous(), x.shape[1]
    residual, weight, total = norm or (None, x, x)
    codes, scale_N = _results(x, width, fmt, given)
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
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            QUANTIZE=fmt is not None,
            STATIC=given is not None,
            KIND=KINDS[codes.dtype],
            SUM_KIND=KINDS[x.dtype],
            BLOCK=block,
            num_warps=_warps(block),
        )
    return codes, None if fmt is None else scale_N


def _results(x: Tensor, width: int, fmt: NumFormat | None, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory for codes (without `fmt`: values) `[N, width]` and scales `[N]`."""
    dtype = x.dtype if fmt is None else fmt.storage
    if x.dtype not in BITS or dtype not in KINDS:
        raise ValueError(f"{x.dtype} to {dtype}: rows are bfloat16 or float32; convert them first")
    codes = torch.empty(len(x), width, dtype=dtype, device=x.device)
    scale_N = torch.empty(len(x), dtype=torch.float32, device=x.device) if given is None else one_scale(given, len(x))
    return codes, scale_N


def _warps(block: int) -> int:
    """Eight values of a block in every thread: one load of 16 bytes."""
    return min(max(block // 256, 1), 32)


def one_scale(given: Tensor, rows: int) -> Tensor:
    """One number for every row, float32 `[rows]` with stride 0, by which `matmul` knows that it is one."""
    return given.float().reshape(1).expand(rows)


def stored_bits(x: Tensor) -> Tensor:
    """The same memory as the integers that `encode` makes."""
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)
    return x.view(BITS.get(x.dtype, x.dtype))
