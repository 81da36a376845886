"""A draft model in training: whole sequences, behind their prompts, one at a time.

Letters: P tokens of a prompt, T rows of a sequence, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qspec.numerics.speculator import agreement, loss_of, overlap
from qspec.schema.training import DistillSpec, Loss
from qspec.stages.draft_data import Rollout
from qspec.stages.learner import Judgement

_MOST_JUDGED = 4096


@dataclass(frozen=True)
class SequenceData:
    """Sequences that a model reads from their beginning; a start is a sequence's number."""

    sequences: Sequence[Rollout]

    @property
    def starts(self) -> Tensor:
        return torch.arange(len(self.sequences))

    @property
    def rows(self) -> int:
        """States that all sequences have."""
        return sum(len(one.tokens_T) for one in self.sequences)

    def per_step(self, states: int) -> int:
        return max(1, round(states * len(self.sequences) / self.rows))

    def order(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(self.sequences), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


@dataclass(frozen=True)
class ModelLearner:
    """A causal language model of transformers; implements `stages.learner.Learner` over `SequenceData`.

    Gradients are added up sequence by sequence: nothing is padded, and memory holds one sequence's laws.
    """

    module: Any
    spec: DistillSpec

    def backward(self, data: SequenceData, starts_T: Tensor, loss: Loss) -> float:
        """States count alike, whatever the length of their sequence."""
        total, expected = 0.0, len(starts_T) * data.rows / len(data.sequences)
        for i in starts_T.tolist():
            one = data.sequences[i]
            share = self._loss(one, loss) * (len(one.tokens_T) / expected)
            share.backward()
            total += float(share.detach())
        return total

    @torch.no_grad()
    def judge(self, data: SequenceData) -> Judgement:
        sampled, greedy, n = 0.0, 0.0, 0
        for one in data.sequences[:: -(-data.rows // _MOST_JUDGED)]:
            logits_TV, _ = self._read(one)
            sampled += float(overlap(logits_TV.softmax(-1), one.ids_TK, one.probs_TK.float()).sum())
            greedy += float(agreement(logits_TV, one.ids_TK).sum())
            n += len(one.tokens_T)
        return Judgement([sampled / n], [greedy / n], n)

    def _loss(self, one: Rollout, kind: Loss) -> Tensor:
        """Mean over the rows of a sequence."""
        logits_TV, hidden_TH = self._read(one)
        behind_T = torch.cat([one.tokens_T[1:].long(), torch.tensor([-1])])  # what followed the last row was not kept
        loss = loss_of(kind, logits_TV, behind_T, one.ids_TK, one.probs_TK.float())
        if self.spec.hidden:
            target_TH = one.hidden_TH.float()
            loss = loss + self.spec.hidden * (hidden_TH - target_TH).square().mean() / target_TH.square().mean()
        return loss

    def _read(self, one: Rollout) -> tuple[Tensor, Tensor]:
        """Float32 logits `[T, V]` and final-norm states `[T, H]` of a sequence's own rows."""
        tokens, rows = torch.cat([one.prompt_P, one.tokens_T]).long(), len(one.tokens_T)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.compute == "bfloat16"):
            read = self.module(tokens[None], use_cache=False, output_hidden_states=True, logits_to_keep=rows)
        return read.logits[0].float(), read.hidden_states[-1][0, -rows:].float()
