# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of a few rows per sequence over the static cache: decoding, verification of chains and trees.

All rows of a sequence and all query heads of a KV head share a tile, so that keys and values are read once, as they are
stored. The context of each sequence, whose length is read on the device, is cut into equal parts (split-K): as many as
fill the GPU, but no shorter than `PART`, so a short context has few, however long the cache is. The last of them also
reads the nodes behind it. `merge_kernel` joins the parts by their log-sum-exp, in one order. Scores and sums are
float32; probabilities are rounded to the queries' dtype before they meet the values, as flash attention does.
"""

import torch
from torch import Tensor
import triton
import triton.language as tl

from qspec.ops.cuda.device import processors
from qspec.ops.cuda.rows import BITS, KINDS, encode, stored_bits
from qspec.ops.reference_cuda import KVLayer

LOG2E = 1.4426950408889634
TILE = 64
"""Query rows of a program at most: the registers hold no more, and of these with half as many positions."""
NODE_BLOCK = 16
"""Nodes of a step: the least that tensor cores take."""
PART = tl.constexpr(128)
"""Positions of a part at least."""
MOST_SPLITS = 64


@triton.jit
def parts_of(length, SPLITS: tl.constexpr):
    """Parts that a context is cut into, of `SPLITS` that there are programs for."""
    return tl.minimum(tl.maximum(tl.cdiv(length, PART), 1), SPLITS)


@triton.jit
def attend_step(
    q,
    top,
    mass,
    acc,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    at,
    reads,
    sees,
    scale,
    D: tl.constexpr,
    BD: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DOT: tl.constexpr,
):
    """A block of positions `at`: the largest score so far (base 2), the mass of all under it, their weighted values."""
    d = tl.arange(0, BD)
    cell, inside = at[:, None] * D + d[None, :], reads[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + cell, inside, 0.0)
    score = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * scale
    if BY_TOKEN:
        score *= tl.load(k_scale_ptr + at, reads, 0.0)[None, :]
    score = tl.where(sees, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # of a row that has seen nothing yet
    p = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    mass = mass * shrink + tl.sum(p, 1)
    if BY_TOKEN:
        p *= tl.load(v_scale_ptr + at, reads, 0.0)[None, :]
    v = tl.load(v_ptr + cell, inside, 0.0)
    acc = acc * shrink[:, None] + tl.dot(p.to(DOT), v.to(DOT), input_precision="ieee")
    return new, mass, acc


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    lengths_ptr,
    ancestors_ptr,
    out_ptr,
    lse_ptr,
    rows,
    groups,
    positions,
    cell_b,
    cell_g,
    scale_b,
    scale_g,
    scale,
    v_scale,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """One KV head of one sequence, `BM` of its query rows (`SHARE` heads of each row), one part of the context."""
    b, g = (tl.program_id(0) // groups).to(tl.int64), (tl.program_id(0) % groups).to(tl.int64)
    split = tl.program_id(2)
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    row, real, d = i // SHARE, i < rows * SHARE, tl.arange(0, BD)
    line = ((b * rows + row) * groups + g) * SHARE + i % SHARE
    here = real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + line[:, None] * D + d[None, :], here, 0.0).to(DOT)
    bits = tl.load(ancestors_ptr + b * rows + row, real, 0)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    k_ptr += b * cell_b + g * cell_g
    v_ptr += b * cell_b + g * cell_g
    k_scale_ptr += b * scale_b + g * scale_g
    v_scale_ptr += b * scale_b + g * scale_g

    top = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    parts = parts_of(length, SPLITS)
    part = tl.cdiv(length, parts * BL) * BL
    first = tl.minimum(split * part, length)
    end = tl.minimum(first + part, length)
    for start in range(first, end, BL):
        at = start + tl.arange(0, BL)
        reads = at < end
        top, mass, acc = attend_step(
            q, top, mass, acc, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            at, reads, reads[None, :], scale, D, BD, BY_TOKEN, DOT,
        )  # fmt: skip

    node = tl.arange(0, 64)
    last = tl.max(tl.where(((bits[:, None] >> node[None, :]) & 1) == 1, node[None, :] + 1, 0), 1)
    nodes = tl.where(split == parts - 1, tl.max(last, 0), 0)
    for start in range(0, nodes, BN):
        own = start + tl.arange(0, BN)
        sees = (((bits[:, None] >> own[None, :]) & 1) == 1) & (length + own < positions)[None, :]
        top, mass, acc = attend_step(
            q, top, mass, acc, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            length + own, tl.max(sees.to(tl.int32), 0) > 0, sees, scale, D, BD, BY_TOKEN, DOT,
        )  # fmt: skip

    y = acc * tl.where(mass > 0, v_scale / tl.where(mass > 0, mass, 1.0), 0.0)[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + line[:, None] * D + d[None, :], encode(y, KIND), here)
    else:
        tl.store(out_ptr + (line * SPLITS + split)[:, None] * D + d[None, :], y, here & (split < parts))
        lse = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
        tl.store(lse_ptr + line * SPLITS + split, lse, real & (split < parts))


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, lengths_ptr, out_ptr, lines, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
    BS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One query row, of `lines` of its sequence: its parts, weighted by their masses."""
    line = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    parts = parts_of(tl.load(lengths_ptr + line // lines).to(tl.int32), SPLITS)
    lse = tl.load(lse_ptr + line * SPLITS + s, s < parts, float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    inside = (s < parts)[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + (line * SPLITS + s)[:, None] * D + d[None, :], inside, 0.0)
    mass = tl.sum(weight, 0)
    y = tl.sum(part * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out_ptr + line * D + d, encode(y, KIND), d < D)


def takes(q_BRQD: Tensor, cache: KVLayer) -> bool:
    """Whether the kernel reads these: positions of a head side by side; queries and float caches not float16."""
    k_BGLD, v_BGLD = cache.k_BGLD, cache.v_BGLD
    lines = all(x.stride()[2:] == (x.shape[3], 1) for x in (k_BGLD, v_BGLD)) and k_BGLD.stride() == v_BGLD.stride()
    scales = isinstance(cache.k_scale, Tensor) == isinstance(cache.v_scale, Tensor)
    return lines and scales and q_BRQD.dtype in BITS and k_BGLD.dtype in KINDS


def attend(
    q_BRQD: Tensor, cache: KVLayer, lengths_B: Tensor, ancestors_BR: Tensor, scale: float, splits: int | None = None
) -> Tensor:
    """Kernel of the twin of that name; `splits`: most parts of a context, chosen for the GPU if not given."""
    (b, r, heads, d), (groups, positions) = q_BRQD.shape, cache.k_BGLD.shape[1:3]
    share, device = heads // groups, q_BRQD.device
    tile = min(max(triton.next_power_of_2(r * share), 16), TILE)
    tiles = b * groups, triton.cdiv(r * share, tile)
    splits = splits or best_splits(tiles[0] * tiles[1], positions, processors(device))
    out_BRQD = torch.empty(q_BRQD.shape, dtype=q_BRQD.dtype, device=device)
    part, lse = stored_bits(out_BRQD), q_BRQD
    if splits > 1:
        part = torch.empty(b * r * heads, splits, d, dtype=torch.float32, device=device)
        lse = torch.empty(b * r * heads, splits, dtype=torch.float32, device=device)
    by_token, coded = isinstance(cache.k_scale, Tensor), cache.k_BGLD.element_size() == 1
    exact = torch.float32 in (q_BRQD.dtype, cache.k_BGLD.dtype)
    k_scale, v_scale = (x if isinstance(x, Tensor) else lse for x in (cache.k_scale, cache.v_scale))
    k_factor, v_factor = (
        float(x) if coded and not isinstance(x, Tensor) else 1.0 for x in (cache.k_scale, cache.v_scale)
    )
    attend_kernel[*tiles, splits](
        q_BRQD.contiguous(),
        cache.k_BGLD,
        cache.v_BGLD,
        k_scale,
        v_scale,
        lengths_B,
        ancestors_BR.contiguous(),
        part,
        lse,
        r,
        groups,
        positions,
        *cache.k_BGLD.stride()[:2],
        *(k_scale.stride()[:2] if by_token else (0, 0)),
        scale * k_factor * LOG2E,
        v_factor,
        SHARE=share,
        D=d,
        BD=triton.next_power_of_2(d),
        BM=tile,
        BL=32 if exact or tile == TILE else 64,
        BN=NODE_BLOCK,
        SPLITS=splits,
        BY_TOKEN=by_token and coded,
        KIND=KINDS[q_BRQD.dtype],
        DOT=tl.float32 if exact else tl.bfloat16,
        num_warps=8 if exact else 4,
        num_stages=3,
    )
    if splits > 1:
        merge_kernel[(b * r * heads,)](
            part,
            lse,
            lengths_B,
            stored_bits(out_BRQD),
            r * heads,
            D=d,
            BD=triton.next_power_of_2(d),
            SPLITS=splits,
            BS=triton.next_power_of_2(splits),
            KIND=KINDS[q_BRQD.dtype],
        )
    return out_BRQD


def best_splits(tiles: int, positions: int, programs: int) -> int:
    """Parts that the longest context is cut into: two programs per processor."""
    parts = min(triton.cdiv(2 * programs, tiles), triton.cdiv(positions, PART.value), MOST_SPLITS)
    return max(int(parts), 1)
