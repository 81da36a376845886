"""Attention of the newest rows over a cache, and the rotations that tell it positions.

H heads, T rows, L positions in the cache, D head size; K nodes of a tree (`numerics.speculation.trees`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.eager.kv_cache import KVCache
from qspec.numerics.speculation.trees import Parents, branches, depths

EXACT_ROWS = 65
"""Rows per pass up to which a quantized model computes each row as if alone (64 drafts and one).

Rounding to codes is a step function: a last-bit difference in attention can move an activation by a whole INT8 step,
and the next layers make that visible. Integer matmuls, norms and element-wise steps do not depend on the number of
rows; attention, the choice of experts and a float head do, so their rows are kept apart.
"""

Scores = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
"""`scores` below with a model's scale and soft cap."""


@dataclass(frozen=True)
class Rows:
    """Rows of a pass that belong to one sequence: its next `count` from `start` on, or the last `count` of a tree."""

    cache: KVCache
    start: int
    count: int
    parents_K: Parents | None = None

    @property
    def positions(self) -> Tensor:
        if self.parents_K is None:
            return torch.arange(self.start, self.start + self.count)
        return self.start + torch.tensor(depths(self.parents_K)[-self.count :])

    def mask(self, window: int | None) -> Tensor | None:
        return None if self.parents_K is not None else causal_mask(self.start, self.start + self.count, window)

    def attend(
        self, i: int, scores: Scores, q: Tensor, k: Tensor, v: Tensor, mask_TL: Tensor | None, window: int | None
    ) -> Tensor:
        """Write keys and values `[H, count, D]` of layer i; what the rows read, `[count, H * D]`."""
        old = 0 if self.parents_K is None else len(self.parents_K) - self.count
        q = self.cache.round_query(i, q)
        k_HLD, v_HLD = self.cache.update(i, self.start + old, k, v)
        if self.parents_K is None:
            return attend(scores, q, k_HLD, v_HLD, self.start, mask_TL, window)
        return attend_tree(scores, q, k_HLD, v_HLD, self.start, self.parents_K, window)


def attend(
    scores: Scores,
    q_HTD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    start: int,
    mask_TL: Tensor | None,
    window: int | None,
) -> Tensor:
    """Causal attention of the last T positions over L = start + T, heads side by side `[T, H * D]`.

    A few rows on top of a cache are taken one by one, each over what it sees: exactly what plain decoding computes,
    bit for bit, so that verifying K + 1 tokens decides as decoding them would (see `EXACT_ROWS`).
    """
    t = q_HTD.shape[1]
    if start and t <= EXACT_ROWS:
        spans = [_span(end, window) for end in range(start + 1, start + t + 1)]
        rows = zip(q_HTD.split(1, 1), spans, strict=True)
        parts = [scores(q, k_HLD[:, span], v_HLD[:, span], None, False) for q, span in rows]
        out_HTD = torch.cat(parts, 1) if t > 1 else parts[0]
    else:
        out_HTD = scores(q_HTD, k_HLD, v_HLD, mask_TL, mask_TL is None and t > 1)
    return out_HTD.transpose(0, 1).reshape(t, -1)


def attend_tree(
    scores: Scores,
    q_HTD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    start: int,
    parents_K: Parents,
    window: int | None,
) -> Tensor:
    """Attention of the last T nodes of a tree over the cache and their ancestors, heads side by side `[T, H * D]`.

    L = start + K. One branch at a time takes the place where plain decoding of its path would have written it, so that
    every node reads what it would read there, in the same layout; in the end each is back in its own place.
    """
    k_HKD, v_HKD = k_HLD[:, start:].clone(), v_HLD[:, start:].clone()
    old = len(parents_K) - q_HTD.shape[1]
    out: dict[int, Tensor] = {}
    for path, seen in branches(parents_K):
        for x_HLD, x_HKD in ((k_HLD, k_HKD), (v_HLD, v_HKD)):
            x_HLD[:, start : start + len(path)] = x_HKD[:, path]
        for depth in range(seen, len(path)):
            row, span = path[depth] - old, _span(start + depth + 1, window)
            if row >= 0:
                out[row] = scores(q_HTD[:, row : row + 1], k_HLD[:, span], v_HLD[:, span], None, False)
    k_HLD[:, start:], v_HLD[:, start:] = k_HKD, v_HKD
    return torch.cat([out[row] for row in range(len(out))], 1).transpose(0, 1).reshape(len(out), -1)


def scores(
    q_HTD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    mask_TL: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Softmax attention `[H, T, D]`; torch's kernel knows no soft-capping, so that is written out."""
    gqa = q_HTD.shape[0] != k_HLD.shape[0]
    if softcap is None:
        q, k, v = q_HTD[None], k_HLD[None], v_HLD[None]
        return F.scaled_dot_product_attention(q, k, v, mask_TL, is_causal=is_causal, scale=scale, enable_gqa=gqa)[0]
    repeats = q_HTD.shape[0] // k_HLD.shape[0]
    k_HLD, v_HLD = k_HLD.repeat_interleave(repeats, 0), v_HLD.repeat_interleave(repeats, 0)
    s_HTL = q_HTD @ k_HLD.transpose(1, 2) * (q_HTD.shape[2] ** -0.5 if scale is None else scale)
    s_HTL = softcap * torch.tanh(s_HTL / softcap)
    if is_causal:
        mask_TL = torch.ones(s_HTL.shape[1:], dtype=torch.bool).tril()
    if mask_TL is not None:
        s_HTL = s_HTL.masked_fill(~mask_TL, float("-inf"))
    return s_HTL.float().softmax(-1).to(q_HTD.dtype) @ v_HLD


def causal_mask(start: int, end: int, window: int | None) -> Tensor | None:
    """Boolean `[T, L]` mask, or None where `attend` needs none: rows on their own, or each over its whole prefix."""
    windowed = window is not None and end > window
    if (start and end - start <= EXACT_ROWS) or (start == 0 and not windowed):
        return None
    query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
    mask_TL = key <= query
    return mask_TL & (key > query - window) if windowed and window is not None else mask_TL


def rope_tables(inv_freq: tuple[float, ...], factor: float, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, R]` of the R rotated dimensions, the halves repeated as transformers lays them out."""
    angles = torch.outer(torch.arange(length).float(), torch.tensor(inv_freq, dtype=torch.float32))
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x_HTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head; the others pass."""
    width = cos_TR.shape[-1]
    left, right = x_HTD[..., :width].chunk(2, -1)
    rotated = x_HTD[..., :width] * cos_TR + torch.cat((-right, left), -1) * sin_TR
    return rotated if width == x_HTD.shape[-1] else torch.cat((rotated, x_HTD[..., width:]), -1)


def _span(end: int, window: int | None) -> slice:
    """The positions that the row at `end` - 1 sees."""
    return slice(max(0, end - window) if window else 0, end)
