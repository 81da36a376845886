"""What a speculator head learns from, laid out for its training: draft vocabulary, positions, batches.

Letters: M rows of all sequences, H hidden size, K kept ids of a law, N heads, V vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qspec.train.data import Rollout

_BEGINNING = 12
"""Tokens by which a sequence is known: what begins alike is taken for the same answer."""


@dataclass(frozen=True)
class Batch:
    """States `[T, H]`, tokens that heads read, and what they should say: the tokens behind and the target's laws."""

    hidden_TH: Tensor
    tokens_TN: Tensor
    labels_TN: Tensor
    ids_TNK: Tensor
    probs_TNK: Tensor


@dataclass(frozen=True)
class HeadData:
    """Rows of sequences behind one another, and where heads may start: N + 1 rows of the same sequence follow there.

    `labels_M` and `ids_MK` are draft ids, -1 for those that the head does not know.
    """

    tokens_M: Tensor
    labels_M: Tensor
    hidden_MH: Tensor
    ids_MK: Tensor
    probs_MK: Tensor
    starts: Tensor

    def batch(self, starts_T: Tensor, n: int) -> "Batch":
        """What `n` heads read and learn at some starts."""
        rows_TN = starts_T[:, None] + torch.arange(1, n + 1)
        return Batch(
            self.hidden_MH[starts_T].float(),
            self.tokens_M[rows_TN].long(),
            self.labels_M[rows_TN + 1].long(),
            self.ids_MK[rows_TN].long(),
            self.probs_MK[rows_TN].float(),
        )

    def per_step(self, states: int) -> int:
        """Starts that make up a step of so many states: as many."""
        return states

    def order(self, seed: int, epoch: int) -> Tensor:
        """All starts, in the random order of an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return self.starts[torch.randperm(len(self.starts), generator=generator)]


def split(rollouts: Sequence[Rollout], held_out: float) -> tuple[list[Rollout], list[Rollout]]:
    """Sequences to train on, and the first ones, which are held out; none of those begins like one of these."""
    count = max(1, round(held_out * len(rollouts)))
    judged, others = list(rollouts[:count]), rollouts[count:]
    beginnings = {_beginning(one) for one in judged}
    return [one for one in others if _beginning(one) not in beginnings], judged


def frequent_ids(rollouts: Sequence[Rollout], size: int, vocab_size: int) -> Tensor | None:
    """The `size` ids that the target's laws give most mass to, rising `[D]`; None: all of them."""
    if not 0 < size < vocab_size:
        return None
    mass_V = torch.zeros(vocab_size, dtype=torch.float64)
    for one in rollouts:
        mass_V.index_add_(0, one.ids_TK.flatten().long(), one.probs_TK.flatten().double())
    return mass_V.topk(size).indices.sort().values


def lay_out(rollouts: Sequence[Rollout], n: int, ids_D: Tensor | None, vocab_size: int) -> HeadData:
    """Rows of all sequences that are long enough for `n` heads."""
    taken = [one for one in rollouts if len(one.tokens_T) > n + 1]
    counts = torch.tensor([len(one.tokens_T) for one in taken])
    begins = counts.cumsum(0) - counts
    starts = torch.cat([torch.arange(int(b), int(b + c) - n - 1) for b, c in zip(begins, counts, strict=True)])
    tokens_M = torch.cat([one.tokens_T for one in taken]).int()
    return HeadData(
        tokens_M,
        draft_ids(tokens_M, ids_D, vocab_size),
        torch.cat([one.hidden_TH for one in taken]),
        draft_ids(torch.cat([one.ids_TK for one in taken]), ids_D, vocab_size),
        torch.cat([one.probs_TK for one in taken]),
        starts,
    )


def draft_ids(ids: Tensor, ids_D: Tensor | None, vocab_size: int) -> Tensor:
    """The draft's own numbers of ids of the target; -1 for those that it does not know."""
    if ids_D is None:
        return ids
    numbers_V = torch.full((vocab_size,), -1, dtype=ids.dtype)
    numbers_V[ids_D] = torch.arange(len(ids_D), dtype=ids.dtype)
    return numbers_V[ids.long()]


def _beginning(one: Rollout) -> tuple[int, ...]:
    return tuple(one.tokens_T[1 : 1 + _BEGINNING].tolist())
