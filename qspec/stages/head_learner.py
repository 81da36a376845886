"""A speculator head in training: the losses of all its heads, and what share of their drafts would stand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics.speculator import agreement, loss_of, overlap
from qspec.schema.training import Loss
from qspec.stages.head_data import HeadData
from qspec.stages.learner import Judgement

_JUDGED_AT_ONCE = 1024
_MOST_JUDGED = 8192


@dataclass(frozen=True)
class HeadLearner:
    """Implements `stages.learner.Learner` over `HeadData`."""

    module: MLPSpeculator

    def backward(self, data: HeadData, starts_T: Tensor, loss: Loss) -> float:
        batch, total = data.batch(starts_T, self.module.shape.n_predict), torch.zeros(())
        for i, logits_TD in enumerate(self.module(batch.hidden_TH, batch.tokens_TN)):
            law = batch.ids_TNK[:, i], batch.probs_TNK[:, i]
            total = total + loss_of(loss, logits_TD, batch.labels_TN[:, i], *law)
        total.backward()
        return float(total.detach())

    @torch.no_grad()
    def judge(self, data: HeadData) -> Judgement:
        n = self.module.shape.n_predict
        starts = data.starts[:: -(-len(data.starts) // _MOST_JUDGED)]
        sampled_N, greedy_N = torch.zeros(n), torch.zeros(n)
        for starts_T in starts.split(_JUDGED_AT_ONCE):
            batch = data.batch(starts_T, n)
            for i, logits_TD in enumerate(self.module(batch.hidden_TH, batch.tokens_TN)):
                ids_TK, probs_TK = batch.ids_TNK[:, i], batch.probs_TNK[:, i]
                sampled_N[i] += overlap(logits_TD.softmax(-1), ids_TK, probs_TK).sum()
                greedy_N[i] += agreement(logits_TD, ids_TK).sum()
        return Judgement((sampled_N / len(starts)).tolist(), (greedy_N / len(starts)).tolist(), len(starts))
