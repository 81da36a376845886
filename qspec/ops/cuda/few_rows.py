# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""The linear layer of a few rows: every weight is read once, as it is stored.

Each program has some outputs and some inputs (split-K); parts are added in one order, so that equal inputs give equal
bits. Codes are multiplied as they are, INT8 and FP8 by the tensor cores' own instructions, INT4 in the inputs' type,
which holds them exactly; scales follow, per group within the sum and else behind it. Weights are the left operand:
their 64 outputs fill the tile that Hopper's tensor cores ask for, where a few rows would not.

Floats are summed in float32; FP8 within a step in the tensor cores' own precision (about 14 bits on Hopper), as serving
engines do, and in float32 from step to step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
import triton
import triton.language as tl

from qspec.numerics.quantization.formats import INT4
from qspec.ops.cuda.device import processors
from qspec.ops.cuda.rows import BITS, KINDS, encode, stored_bits
from qspec.ops.cuda.tuning import fastest
from qspec.ops.reference_cuda import CudaWeight

FP8 = torch.float8_e4m3fn
DOTS = {torch.int8: tl.int8, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiling:
    """How `few_rows` is cut: outputs of a program, stored inputs of a step, parts of the sum, warps, loads ahead."""

    outputs: int
    inputs: int
    splits: int
    warps: int = 4
    stages: int = 4


@triton.jit
def few_rows_kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    rows,
    outputs,
    width,
    groups,
    steps,
    scale_step,
    PACKED: tl.constexpr,
    STEPS_A_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr,
    W_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of `BN` outputs, from `steps` blocks of `BK` stored inputs; a row of weights is `width` long as stored.

    STEPS_A_GROUP 0: one scale per output. WHOLE: sums are integers. DOT: the type that both operands are given, None
    for FP8, which the tensor cores multiply as it is. `scale_step` 0: all rows have one scale. With
    SPLITS > 1 the unscaled parts `[SPLITS, rows, outputs]` are written.
    """
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    step = tl.program_id(1) * steps
    acc = tl.zeros([BN, BM], tl.int32 if WHOLE else tl.float32)
    for i in range(step, step + steps):
        k = i * BK + tl.arange(0, BK)
        reads = (n < outputs)[:, None] & (k < width)[None, :]
        w = tl.load(w_ptr + n[:, None] * width + k[None, :], reads, 0.0)
        has = (m < rows)[:, None] & (k < width)[None, :]
        if PACKED:
            at = m[:, None] * (2 * width) + 2 * k[None, :]
            low, high = ((w << 4) >> 4).to(DOT), (w >> 4).to(DOT)
            even, odd = tl.load(x_ptr + at, has, 0.0).to(DOT), tl.load(x_ptr + at + 1, has, 0.0).to(DOT)
            part = tl.dot(low, tl.trans(even), input_precision="ieee")
            part += tl.dot(high, tl.trans(odd), input_precision="ieee")
        else:
            x = tl.load(x_ptr + m[:, None] * width + k[None, :], has, 0.0)
            if DOT is not None:
                w, x = w.to(DOT), x.to(DOT)
            part = tl.dot(w, tl.trans(x), input_precision="ieee")
        if STEPS_A_GROUP > 0:
            group = i // STEPS_A_GROUP
            scale = tl.load(w_scale_ptr + n * groups + group, (n < outputs) & (group < groups), 0.0)
            part = part.to(tl.float32) * scale[:, None]
        acc += part
    acc = tl.trans(acc)
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    if SPLITS > 1:
        tl.store(out_ptr + tl.program_id(1).to(tl.int64) * rows * outputs + at, acc, inside)
    else:
        y = acc.to(tl.float32)
        if W_SCALED:
            y *= tl.load(w_scale_ptr + n, n < outputs, 0.0)[None, :]
        if X_SCALED:
            y *= tl.load(x_scale_ptr + m * scale_step, m < rows, 0.0)[:, None]
        tl.store(out_ptr + at, encode(y, KIND), inside)


@triton.jit
def finish_kernel(
    part_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    size,
    outputs,
    scale_step,
    X_SCALED: tl.constexpr,
    W_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the parts of a row's outputs, first to last and `size` apart, and applies the scales."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = m * outputs + n
    total = tl.load(part_ptr + at, n < outputs, 0)
    for _ in range(1, SPLITS):
        part_ptr += size
        total += tl.load(part_ptr + at, n < outputs, 0)
    y = total.to(tl.float32)
    if W_SCALED:
        y *= tl.load(w_scale_ptr + n, n < outputs, 0.0)
    if X_SCALED:
        y *= tl.load(x_scale_ptr + m * scale_step)
    tl.store(out_ptr + at, encode(y, KIND), n < outputs)


def best_tiles(codes_NK: Tensor, scale_N: Tensor | None, weight: CudaWeight) -> Tiling:
    """The fastest way on this device."""
    ways, rows = tilings(len(codes_NK), weight, processors(codes_NK.device)), tile_rows(len(codes_NK))
    key = f"{rows} rows of {codes_NK.dtype}, {described(weight)}"
    return fastest(key, codes_NK.device, ways, lambda tiles: few_rows(codes_NK, scale_N, weight, tiles))


def tile_rows(rows: int) -> int:
    """Rows of a tile: 16, 32 or 64."""
    return max(int(triton.next_power_of_2(rows)), 16)


def tilings(rows: int, weight: CudaWeight, programs: int) -> list[Tiling]:
    """Ways to cut `few_rows` that may be the fastest, the likeliest first. Two programs per processor hide latency."""
    outputs, width = weight.codes.shape
    tilings = list[Tiling]()
    for count, row_bytes, waves in ((64, 128, 2), (64, 128, 4), (128, 128, 2), (64, 256, 2)):
        if rows > 16 and max(2 * count, row_bytes) > 128:  # more registers or shared memory than there is
            continue
        inputs = min(row_bytes // weight.codes.element_size(), stored_group(weight) or 256)
        most = max(triton.cdiv(width, inputs) // 4, 1)
        splits = min(triton.cdiv(waves * programs, triton.cdiv(outputs, count)), most, 32)
        tiles = Tiling(count, inputs, splits)
        tilings += [tiles] if tiles not in tilings else []
    return tilings


def few_rows(codes_NK: Tensor, scale_N: Tensor | None, weight: CudaWeight, tiles: Tiling) -> Tensor:
    """`[N, O]` for up to 64 rows, every weight read once."""
    (rows, _), (outputs, width), device = codes_NK.shape, weight.codes.shape, codes_NK.device
    packed, group, dot = weight.fmt == INT4, stored_group(weight), product(codes_NK.dtype, weight)
    assert dot is not None, f"{codes_NK.dtype} rows of {weight.fmt}"
    assert group % tiles.inputs == 0, f"{tiles} of groups of {group}"
    whole = dot == torch.int8 and not group
    out_NO = torch.empty(rows, outputs, dtype=weight.dtype, device=device)
    target = stored_bits(out_NO)
    if tiles.splits > 1:
        target = torch.empty(tiles.splits, rows, outputs, dtype=torch.int32 if whole else torch.float32, device=device)
    few_rows_kernel[triton.cdiv(outputs, tiles.outputs), tiles.splits](
        codes_NK,
        weight.codes.view(torch.int8) if packed else weight.codes,
        codes_NK if scale_N is None else scale_N,
        codes_NK if weight.scale is None else weight.scale,
        target,
        rows,
        outputs,
        width,
        width // group if group else 1,
        triton.cdiv(triton.cdiv(width, tiles.inputs), tiles.splits),
        0 if scale_N is None else scale_N.stride(0),
        PACKED=packed,
        STEPS_A_GROUP=group // tiles.inputs,
        X_SCALED=scale_N is not None,
        W_SCALED=weight.scale is not None and not group,
        SPLITS=tiles.splits,
        WHOLE=whole,
        DOT=DOTS.get(dot),
        KIND=KINDS[weight.dtype],
        BM=tile_rows(rows),
        BN=tiles.outputs,
        BK=tiles.inputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out_NO if tiles.splits == 1 else finished(target, scale_N, None if group else weight.scale, out_NO)


def finished(parts: Tensor, scale_N: Tensor | None, scale_O: Tensor | None, out_NO: Tensor) -> Tensor:
    """The sum of `parts` `[S, N, O]` under both scales, written to `out`."""
    rows, outputs = out_NO.shape
    block = min(triton.next_power_of_2(outputs), 1024)
    finish_kernel[rows, triton.cdiv(outputs, block)](
        parts,
        parts if scale_N is None else scale_N,
        parts if scale_O is None else scale_O,
        stored_bits(out_NO),
        rows * outputs,
        outputs,
        0 if scale_N is None else scale_N.stride(0),
        X_SCALED=scale_N is not None,
        W_SCALED=scale_O is not None,
        SPLITS=len(parts),
        KIND=KINDS[out_NO.dtype],
        BLOCK=block,
    )
    return out_NO


def described(weight: CudaWeight) -> str:
    """Everything that the best tiles depend on, with the kernel's own digest."""
    fmt = "float" if weight.fmt is None else weight.fmt.name
    version = getattr(few_rows_kernel, "cache_key", "")[:12]  # the interpreter has none
    return f"{fmt} {tuple(weight.codes.shape)} in {weight.group_size}, {weight.dtype}, {version}"


def stored_group(weight: CudaWeight) -> int:
    """Stored inputs under one scale, 0 where an output has one."""
    if weight.group_size is None or weight.scale is None:
        return 0
    return weight.group_size // 2 if weight.fmt == INT4 else weight.group_size


def product(x: torch.dtype, weight: CudaWeight) -> torch.dtype | None:
    """The type in which `few_rows` multiplies `x` with the codes (FP8: the codes'); None where it does not."""
    w, group = weight.codes.dtype, stored_group(weight)
    if x == torch.int8 and (weight.fmt == INT4 or w == torch.int8):
        dot = torch.int8
    elif x == w == FP8:
        dot = FP8
    elif x in BITS and (weight.fmt is not None or w == x):
        dot = x
    else:
        return None
    least = 32 if dot.itemsize == 1 else 16  # inputs of one step of the tensor cores
    return dot if not group or (group >= least and group & (group - 1) == 0) else None
