"""A speculator's heads in C++ (`qspec/native/speculator.cpp`): a whole proposal is one call, its threads start once.

The eager twin is `nn.draft_heads.EagerHeads`. Weights are those that the layers hold already; nothing is copied.
"""

from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
import math
import weakref

import torch
from torch import Tensor, nn

from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.cpp.interface import CHOOSE, CHeads, CMatrix, CStage, failure, floats, library, matrix_of, pool_of
from qspec.nn.cpp.weights import LANES, Packed, pack_rows
from qspec.nn.lm import FORKED
from qspec.nn.mlp_speculator import NORM_EPS, MLPSpeculator, SharedEmbedding, SharedHead

Choose = Callable[[int, int, float, Tensor], int | None]
"""Told a chain's number, the place of its likeliest id, that one's probability, and logits `[1, D]`: the place to
draft, or None to end there."""
ROWS = 8
"""Rows of logits that the core wants room for."""
_FORKED, _BAD_TOKEN = -1, -3


class NativeHeads:
    """INT8 heads; implements `nn.draft_heads.DraftHeads`. One call at a time."""

    def __init__(
        self, head: MLPSpeculator, packed: Sequence[Sequence[Packed | None]], ids_D: Tensor, known: int
    ) -> None:
        """packed: as `packed` says of `head`; known: how many of its ids may be drafted. Threads are torch's now."""
        shape, self._lib, self._pool = head.shape, library(), pool_of(torch.get_num_threads())
        self._logits_RD = torch.empty(ROWS, -(-shape.drafted // LANES) * LANES)
        self._known, self._ids_D = known, ids_D
        begin_H = torch.full((shape.emb_dim,), 0.5**0.5)
        stages = (CStage * shape.n_predict)()
        for i, (norm, own) in enumerate(zip(head.ln, packed, strict=True)):
            gain, shift = (floats(norm.get_parameter(part).detach(), shape.inner) for part in ("weight", "bias"))
            stages[i] = CStage(gain, shift, *map(_matrix, own))
        self._kept = head, packed, begin_H  # what the core points into
        heads = CHeads(
            *(shape.n_predict, shape.emb_dim, shape.inner, known),
            *(NORM_EPS, shape.emb_weight / shape.state_weight),
            begin_H.data_ptr() if shape.scale_input else None,
            stages,
            ids_D.data_ptr(),
            self._logits_RD.data_ptr(),
            self._logits_RD.shape[1],
        )
        self._handle = c_void_p(self._lib.qspec_speculator(self._pool.handle, byref(heads)))
        if not self._handle:
            raise failure("a speculator's heads")
        weakref.finalize(self, self._lib.qspec_speculator_free, self._handle)

    @staticmethod
    def packed(head: MLPSpeculator) -> list[list[Packed | None]] | None:
        """Weights of every stage in the order of `CStage`; None if the core cannot read them."""
        stages = [_stage(*parts) for parts in zip(head.emb, head.proj, head.head, strict=True)]
        return None if any(stage is None for stage in stages) else [stage for stage in stages if stage is not None]

    def chains(self, hidden_BH: Tensor, tokens: Sequence[int], k: int, choose: Choose) -> None:
        decide, failed = guarded(choose, self._logits_RD, self._known)
        self._draft(hidden_BH, tokens, [1] * k, decide)
        if failed:
            raise failed[0]

    def paths(self, hidden_1H: Tensor, token: int, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        levels = self._draft(hidden_1H, [token], widths)
        most = len(levels[-1][0])
        tokens = [tokens_P.repeat_interleave(most // len(tokens_P)) for tokens_P, _ in levels]
        return torch.stack(tokens, 1), levels[-1][1]

    def _draft(
        self,
        hidden_BH: Tensor,
        roots: Sequence[int],
        widths: Sequence[int],
        decide: Callable[[int, int, int, float], int] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Tokens and log-probabilities of all paths, level after level; `decide` chooses those of chains."""
        counts = [len(roots) * math.prod(widths[: i + 1]) for i in range(len(widths))]
        tokens, scores = torch.empty(sum(counts), dtype=torch.int64), torch.empty(sum(counts))
        hidden, given = hidden_BH.to("cpu", torch.float32).contiguous(), (c_int32 * len(widths))(*widths)
        size = len(roots) * self._kept[0].shape.emb_dim
        behind = floats(hidden, size), (c_int64 * len(roots))(*roots), len(roots)
        choose, out = CHOOSE(decide) if decide else CHOOSE(), (tokens.data_ptr(), scores.data_ptr())
        status = self._lib.qspec_draft(self._handle, *behind, given, len(widths), choose, *out)
        if status == _FORKED:
            raise RuntimeError(FORKED)
        if status == _BAD_TOKEN:
            raise IndexError(f"a token of {list(roots)} lies outside of the vocabulary")
        if status < 0:
            raise failure("a proposal")
        return list(zip(tokens.split(counts), scores.split(counts), strict=True))


def guarded(
    choose: Choose, logits_RD: Tensor, known: int
) -> tuple[Callable[[int, int, int, float], int], list[BaseException]]:
    """`Choose` of native/model.h over rows of logits, of which the first `known` count; and what it raised, if it did.

    No error may cross the frames of C: it ends all chains, and is to be raised behind the call.
    """
    failed = list[BaseException]()

    def decide(chain: int, row: int, best: int, probability: float) -> int:
        try:
            place = None if failed else choose(chain, best, probability, logits_RD[row : row + 1, :known])
        except BaseException as error:  # noqa: BLE001 (see above)
            failed.append(error)
            return -1
        return -1 if place is None else place

    return decide, failed


def _matrix(packed: Packed | None) -> CMatrix:
    return CMatrix() if packed is None else matrix_of(packed)


def _stage(emb: nn.Module, proj: nn.Module, out: nn.Module) -> list[Packed | None] | None:
    """Embedding, its map, projection, map of the output, output; None if one is no INT8 layer of the core."""
    rows, emb_map = (emb.rows, emb.map) if isinstance(emb, SharedEmbedding) else (emb.get_parameter("weight"), None)
    maps = [emb_map, proj, *([out.map, out.rows] if isinstance(out, SharedHead) else [None, out])]
    packed = [m.packed if isinstance(m, Int8Map) else None for m in maps]
    if any(p is None for m, p in zip(maps, packed, strict=True) if m is not None):
        return None
    return [pack_rows(rows.detach()), *packed]
