# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""RoPE on queries and keys, rounding of keys and values, and the write to the static cache: one kernel, one pass."""

import torch
from torch import Tensor
import triton
import triton.language as tl

from qspec.numerics.quantization.formats import FORMATS, INT4, SCALE_FLOOR
from qspec.ops.cuda.rows import KINDS, encode, stored_bits
from qspec.ops.reference_cuda import KVLayer

HEADS = 4
"""Heads of one program."""


@triton.jit
def turn(line_ptr, d, inside, cos, sin, TURNED: tl.constexpr):
    """Heads at `line`, of which the first `TURNED` numbers are rotated, in float32."""
    half: tl.constexpr = TURNED // 2
    other = tl.where(d < half, d + half, tl.where(d < TURNED, d - half, d))
    x = tl.load(line_ptr + d[None, :], inside, 0.0).to(tl.float32)
    partner = tl.load(line_ptr + other[None, :], inside, 0.0).to(tl.float32)
    partner = tl.where((d < half)[None, :], -partner, partner)
    return tl.where((d < TURNED)[None, :], x * cos[None, :] + partner * sin[None, :], x)


@triton.jit
def write(
    y,
    inside,
    d,
    head,
    heads,
    cells_ptr,
    cell_g,
    scales_ptr,
    scale_g,
    scale,
    qmax,
    floor,
    CODED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
):
    """Heads of one position, rounded as the cache holds them: under one scale, or (BY_TOKEN) each under its own."""
    if BY_TOKEN:
        own = tl.maximum(tl.div_rn(tl.max(tl.abs(y), 1), qmax), floor)
        tl.store(scales_ptr + head * scale_g, own, head < heads)
        y = tl.div_rn(y, own[:, None])
    elif CODED:
        y = tl.div_rn(y, scale)
    tl.store(cells_ptr + head[:, None] * cell_g + d[None, :], encode(y, KIND), inside)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    k_cells_ptr,
    v_cells_ptr,
    k_scales_ptr,
    v_scales_ptr,
    rows,
    heads,
    groups,
    q_b,
    q_r,
    k_b,
    k_r,
    v_b,
    v_r,
    cell_b,
    cell_g,
    scale_b,
    scale_g,
    k_scale,
    v_scale,
    qmax,
    floor,
    D: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    TURNED: tl.constexpr,
    CODED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    Q_KIND: tl.constexpr,
    KIND: tl.constexpr,
):
    """`BH` heads of one row: of queries, else of keys, else of values."""
    row = tl.program_id(0).to(tl.int64)
    b, r = row // rows, row % rows
    part, d = tl.program_id(1), tl.arange(0, BD)
    of_q, of_k = tl.cdiv(heads, BH), tl.cdiv(groups, BH)
    slot = tl.load(slots_ptr + row)
    cells, scales = b * cell_b + slot * D, b * scale_b + slot
    at = tl.load(positions_ptr + row) * TURNED + d
    cos = tl.load(cos_ptr + at, d < TURNED, 1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, d < TURNED, 0.0).to(tl.float32)
    first = tl.where(part < of_q, part, tl.where(part < of_q + of_k, part - of_q, part - of_q - of_k)) * BH
    head = (first + tl.arange(0, BH)).to(tl.int64)
    if part < of_q:
        inside = (head < heads)[:, None] & (d < D)[None, :]
        y = turn(q_ptr + b * q_b + r * q_r + head[:, None] * D, d, inside, cos, sin, TURNED)
        tl.store(out_ptr + (row * heads + head[:, None]) * D + d[None, :], encode(y, Q_KIND), inside)
    else:
        inside = (head < groups)[:, None] & (d < D)[None, :]
        if part < of_q + of_k:
            y = turn(k_ptr + b * k_b + r * k_r + head[:, None] * D, d, inside, cos, sin, TURNED)
            write(
                y, inside, d, head, groups, k_cells_ptr + cells, cell_g, k_scales_ptr + scales, scale_g,
                k_scale, qmax, floor, CODED, BY_TOKEN, KIND,
            )  # fmt: skip
        else:
            y = tl.load(v_ptr + b * v_b + r * v_r + head[:, None] * D + d[None, :], inside, 0.0).to(tl.float32)
            write(
                y, inside, d, head, groups, v_cells_ptr + cells, cell_g, v_scales_ptr + scales, scale_g,
                v_scale, qmax, floor, CODED, BY_TOKEN, KIND,
            )  # fmt: skip


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
    """Kernel of the twin of that name. Queries, keys and values may be views of one tensor."""
    (b, r, heads, d), groups = q_BRQD.shape, k_BRGD.shape[2]
    q, k, v = (x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (q_BRQD, k_BRGD, v_BRGD))
    out_BRQD = torch.empty(q_BRQD.shape, dtype=q_BRQD.dtype, device=q_BRQD.device)
    fmt = next((f for f in FORMATS.values() if f.storage == cache.k_BGLD.dtype and f != INT4), None)
    by_token = fmt is not None and isinstance(cache.k_scale, Tensor)
    k_scales, v_scales = (x if isinstance(x, Tensor) else q for x in (cache.k_scale, cache.v_scale))
    k_scale, v_scale = (1.0 if isinstance(x, Tensor) else float(x) for x in (cache.k_scale, cache.v_scale))
    if b * r:
        rope_kernel[b * r, triton.cdiv(heads, HEADS) + 2 * triton.cdiv(groups, HEADS)](
            q,
            k,
            v,
            cos_LD.contiguous(),
            sin_LD.contiguous(),
            positions_BR.contiguous(),
            slots_BR.contiguous(),
            stored_bits(out_BRQD),
            stored_bits(cache.k_BGLD),
            stored_bits(cache.v_BGLD),
            k_scales,
            v_scales,
            r,
            heads,
            groups,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *cache.k_BGLD.stride()[:2],
            *(k_scales.stride()[:2] if by_token else (0, 0)),
            k_scale,
            v_scale,
            0.0 if fmt is None else float(fmt.qmax),
            SCALE_FLOOR,
            D=d,
            BD=triton.next_power_of_2(d),
            BH=HEADS,
            TURNED=cos_LD.shape[1],
            CODED=fmt is not None,
            BY_TOKEN=by_token,
            Q_KIND=KINDS[q_BRQD.dtype],
            KIND=KINDS[cache.k_BGLD.dtype],
            num_warps=4 if d > 64 else 2,
        )
    return out_BRQD
