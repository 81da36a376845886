"""Drafting with heads: stage after stage by torch; `cpp.heads` and `cpp.eagle3` do the same in one call.

Letters: B sequences, T rows, S states of a row, P paths, K tokens of a path, D ids that can be drafted.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from qspec.nn.cpp.eagle3 import NativeChains
from qspec.nn.cpp.heads import Choose, NativeHeads
from qspec.nn.eagle3 import Eagle3, HeadCache, JoinedCaches
from qspec.nn.lm import LM, ThreadedLM
from qspec.nn.mlp_speculator import MLPSpeculator

MOST_DRAFTS = 64
"""Slots behind the target's last position: drafts that it has no room for are cut off when they are made."""
READ = 256
"""Rows of a text that go through a head together: bounds the mask of its attention."""


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
            on, places = _chosen(logits_BD[:, : self._known], numbers, choose)
            if not on:
                return
            tokens_B = self._ids_D[places]
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


def _chosen(logits_BD: Tensor, numbers: Sequence[int], choose: Choose) -> tuple[list[int], list[int]]:
    """The rows of chains that go on, and the places of their drafts; `numbers`: those of the chains."""
    probs_B, best_B = logits_BD.softmax(-1).max(-1)
    drafts = zip(numbers, best_B.tolist(), probs_B.tolist(), logits_BD.split(1), strict=True)
    places = [choose(*one) for one in drafts]
    on = [row for row, place in enumerate(places) if place is not None]
    return on, [place for place in places if place is not None]


def draft_heads(head: MLPSpeculator, ids_D: Tensor, known: int) -> DraftHeads:
    """The C++ core where it runs this head."""
    packed = NativeHeads.packed(head)
    return EagerHeads(head, ids_D, known) if packed is None else NativeHeads(head, packed, ids_D, known)


class HeadSlots(Protocol):
    """The cache of an EAGLE-3 head for one sequence."""

    @property
    def length(self) -> int:
        """Slots that are filled."""

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on."""


Slots = TypeVar("Slots", bound=HeadSlots)


class Eagle3Chains(Protocol[Slots]):
    """An EAGLE-3 head behind sequences, with a cache for each."""

    def cache(self) -> Slots:
        """That of an empty sequence."""

    def chains(
        self,
        caches: Sequence[Slots],
        states: Sequence[Tensor],
        tokens: Sequence[Tensor],
        k: int,
        choose: Choose,
    ) -> None:
        """Append rows to each cache: the target's states `[T, S]`, T at least 1, and the tokens behind them `[T]`.

        Then at most `k` drafts of every chain, each behind what `choose` took before. Their slots stay in the caches.
        """


class EagerEagle3:
    """Any head, on torch. known: how many of its ids may be drafted."""

    def __init__(self, head: Eagle3, ids_D: Tensor, known: int) -> None:
        self._head, self._ids_D, self._known = head, ids_D, known

    def cache(self) -> HeadCache:
        return HeadCache(self._head.shape)

    def chains(
        self,
        caches: Sequence[HeadCache],
        states: Sequence[Tensor],
        tokens: Sequence[Tensor],
        k: int,
        choose: Choose,
    ) -> None:
        head, numbers = self._head, list(range(len(caches)))
        y_BH = self._read(caches, states, tokens)
        for i in range(k):
            on, places = _chosen(head.logits(y_BH)[:, : self._known], numbers, choose)
            if not on or i == k - 1:
                return
            numbers = [numbers[row] for row in on]
            y_BH = self._run(head.feed(y_BH[on]), self._ids_D[places], [caches[n] for n in numbers], [1] * len(on))

    def _read(self, caches: Sequence[HeadCache], states: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
        """y `[B, H]` of the last row of each; those of long texts go through the head in parts before."""
        counts = [(len(tokens_T) - 1) % READ + 1 for tokens_T in tokens]
        for cache, states_TS, tokens_T, count in zip(caches, states, tokens, counts, strict=True):
            for start in range(0, len(tokens_T) - count, READ):
                part = slice(start, start + READ)
                self._run(self._head.fuse(states_TS[part]), tokens_T[part], [cache], [READ])
        last = [torch.cat([rows[-n:] for rows, n in zip(x, counts, strict=True)]) for x in (states, tokens)]
        y_TH = self._run(self._head.fuse(last[0]), last[1], caches, counts)
        return y_TH[torch.tensor(counts).cumsum(0) - 1]

    def _run(self, f_TH: Tensor, tokens_T: Tensor, caches: Sequence[HeadCache], counts: Sequence[int]) -> Tensor:
        """y `[T, H]` of the next rows of several sequences."""
        ends = [cache.length + torch.arange(n) for cache, n in zip(caches, counts, strict=True)]
        return self._head.run(f_TH, tokens_T, torch.cat(ends), JoinedCaches(caches, counts))


def eagle3_chains(head: Eagle3, ids_D: Tensor, known: int, target: LM) -> Eagle3Chains[Any]:
    """The fastest way to run this head here, behind sequences as long as the target's, on as many threads."""
    if not NativeChains.runs(head):
        return EagerEagle3(head, ids_D, known)
    threads = target.threads if isinstance(target, ThreadedLM) else torch.get_num_threads()
    return NativeChains.shared(head, known, target.max_length + MOST_DRAFTS, threads)
