"""Drafting with a speculator's heads: stage after stage by torch; `cpp.heads` does the same in one call.

Letters: B sequences, P paths, K tokens of a path, D ids that can be drafted.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qspec.nn.cpp.heads import Choose, NativeHeads
from qspec.nn.mlp_speculator import MLPSpeculator


class DraftHeads(Protocol):
    """Heads behind sequences: rows of `hidden_BH` are the target's states in front of their newest tokens."""

    def chains(self, hidden_BH: Tensor, tokens: Sequence[int], k: int, choose: Choose) -> None:
        """At most `k` stages, each behind what `choose` took before, for all chains that have not ended."""

    def paths(self, hidden_1H: Tensor, token: int, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens `[P, K]` and log-probabilities `[P]`: of stage i the `widths[i]` likeliest behind every path."""


class EagerHeads:
    """Any head, on torch. known: how many of its ids may be drafted."""

    def __init__(self, head: MLPSpeculator, ids_D: Tensor, known: int) -> None:
        self._head, self._ids_D, self._known = head, ids_D, known

    def chains(self, hidden_BH: Tensor, tokens: Sequence[int], k: int, choose: Choose) -> None:
        state_BI, tokens_B, numbers = self._head.begin(hidden_BH), torch.tensor(tokens), list(range(len(tokens)))
        for i in range(k):
            state_BI, logits_BD = self._head.advance(i, state_BI, tokens_B)
            logits_BD = logits_BD[:, : self._known]
            probs_B, best_B = logits_BD.softmax(-1).max(-1)
            drafts = zip(numbers, best_B.tolist(), probs_B.tolist(), logits_BD.split(1), strict=True)
            places = [choose(*one) for one in drafts]
            on = [row for row, place in enumerate(places) if place is not None]
            if not on:
                return
            tokens_B = self._ids_D[[place for place in places if place is not None]]
            state_BI, numbers = state_BI[on], [numbers[row] for row in on]

    def paths(self, hidden_1H: Tensor, token: int, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Source: fms-extras, `MLPSpeculator.generate_suffixes`."""
        state, tokens_P = self._head.begin(hidden_1H), torch.tensor([token])
        paths_PK, scores_P = torch.empty(1, 0, dtype=torch.long), torch.zeros(1)
        for i, width in enumerate(widths):
            state, logits_PD = self._head.advance(i, state, tokens_P)
            scores_PW, drawn_PW = logits_PD[:, : self._known].log_softmax(-1).topk(width)
            tokens_P = self._ids_D[drawn_PW.flatten()]
            scores_P = (scores_P[:, None] + scores_PW).flatten()
            state, paths_PK = (x.repeat_interleave(width, 0) for x in (state, paths_PK))
            paths_PK = torch.cat([paths_PK, tokens_P[:, None]], 1)
        return paths_PK, scores_P


def draft_heads(head: MLPSpeculator, ids_D: Tensor, known: int) -> DraftHeads:
    """The C++ core where it runs this head."""
    packed = NativeHeads.packed(head)
    return EagerHeads(head, ids_D, known) if packed is None else NativeHeads(head, packed, ids_D, known)
