"""Drafting with a speculator's heads: stage after stage by torch; `native_heads` does the same in one call.

Letters: P paths, K tokens of a path, D ids that can be drafted.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.nn.native_heads import NativeHeads

Choose = Callable[[int, float, Tensor], int | None]
"""Told the place of the likeliest id, its probability, and logits `[1, D]`; the place to draft, None to end there."""


class DraftHeads(Protocol):
    """Heads behind a sequence: `hidden_1H` is the target's state in front of its newest token."""

    def chain(self, hidden_1H: Tensor, token: int, k: int, choose: Choose) -> None:
        """At most `k` stages, each behind what `choose` took before."""

    def paths(self, hidden_1H: Tensor, token: int, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens `[P, K]` and log-probabilities `[P]`: of stage i the `widths[i]` likeliest behind every path."""


class EagerHeads:
    """Any head, on torch. known: how many of its ids may be drafted."""

    def __init__(self, head: MLPSpeculator, ids_D: Tensor, known: int) -> None:
        self._head, self._ids_D, self._known = head, ids_D, known

    def chain(self, hidden_1H: Tensor, token: int, k: int, choose: Choose) -> None:
        state_1I, token_1 = self._head.begin(hidden_1H), torch.tensor([token])
        for i in range(k):
            state_1I, logits_1D = self._head.advance(i, state_1I, token_1)
            logits_1D = logits_1D[:, : self._known]
            probability, best = logits_1D.softmax(-1).max(-1)
            place = choose(int(best), float(probability), logits_1D)
            if place is None:
                return
            token_1 = self._ids_D[place : place + 1]

    def paths(self, hidden_1H: Tensor, token: int, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Source: fms-extras, `MLPSpeculator.generate_suffixes`."""
        state, tokens_P = self._head.begin(hidden_1H), torch.tensor([token])
        paths_PK, scores_P = torch.empty(1, 0, dtype=torch.long), torch.zeros(1)
        for i, width in enumerate(widths):
            state, logits_PD = self._head.advance(i, state, tokens_P)
            found_PW, drawn_PW = logits_PD[:, : self._known].log_softmax(-1).topk(width)
            tokens_P = self._ids_D[drawn_PW.flatten()]
            scores_P = (scores_P[:, None] + found_PW).flatten()
            state, paths_PK = (x.repeat_interleave(width, 0) for x in (state, paths_PK))
            paths_PK = torch.cat([paths_PK, tokens_P[:, None]], 1)
        return paths_PK, scores_P


def draft_heads(head: MLPSpeculator, ids_D: Tensor, known: int) -> DraftHeads:
    """The C++ core where it runs this head."""
    packed = NativeHeads.packed(head)
    return EagerHeads(head, ids_D, known) if packed is None else NativeHeads(head, packed, ids_D, known)
