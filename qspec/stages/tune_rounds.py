"""What a round of speculation costs beside its passes, measured with models that answer at once."""

from collections.abc import Sequence
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from qspec.spec.draft_length import Fixed
from qspec.spec.drafters.model import ModelDrafter
from qspec.spec.engine import generate
from qspec.spec.types import Sampling
from qspec.stages.tune_pieces import Json

NO_STOP = -1
"""A token that no model says, so that drafting looks for stop tokens as it does in earnest."""


class Instant:
    """A model of no cost: the same random logits `[R, V]` behind any tokens, as many rows as are asked for."""

    def __init__(self, vocab_size: int, rows: int, max_length: int) -> None:
        self.vocab_size, self.max_length, self.length = vocab_size, max_length, 0
        self._logits_RV = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).repeat(rows, 1)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        self.length += len(tokens_T)
        return self._logits_RV[: last or len(tokens_T)]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


class InstantGreedy(Instant):
    """One that finds the likeliest tokens itself."""

    def greedy(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        return self._best_R[: len(self.forward(tokens_T, last))]

    @cached_property
    def _best_R(self) -> Tensor:
        return self._logits_RV.argmax(-1)


def bookkeeping(
    vocab: int, lengths: Sequence[int], context: int, sampling: Sampling, rounds: int, greedy: bool = False
) -> Json:
    """Median seconds of a round by its draft length, 0 too, behind `context` tokens.

    greedy: targets choose the likeliest tokens themselves. engine: verification, committing, accounting. draft: a draft
    model's part, its passes left out.
    """
    found: Json = {"engine": {}, "draft": {}}
    for drafted in (0, *lengths):
        tokens = rounds * (drafted + 1) + 1
        target, draft = (
            kind(vocab, drafted + 1, context + tokens) for kind in (InstantGreedy if greedy else Instant, Instant)
        )
        drafter = ModelDrafter(draft, eos_ids=(NO_STOP,)) if drafted else None
        generator = torch.Generator().manual_seed(0)
        said = generate(target, drafter, Fixed(drafted), [0] * context, tokens, sampling, (NO_STOP,), generator)
        found["engine"][str(drafted)] = median(step.t_verify + step.t_other for step in said.steps)
        found["draft"][str(drafted)] = median(step.t_draft for step in said.steps)
    return found
