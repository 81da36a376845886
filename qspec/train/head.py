"""A speculator head in training: its data, the losses of all heads, and what share of their drafts would be accepted.

Letters: M rows of all sequences, H hidden size, K kept ids, N heads, V vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.heads import speculator
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, initialize, start_from, swap_linears
from qspec.numerics.speculation.speculator import agreement, loss_of, overlap
from qspec.pair.head import shape_of, target_rows
from qspec.progress import Progress
from qspec.provenance import staged_dir
from qspec.records import LoadedModel
from qspec.schema.drafts import MlpDraft
from qspec.schema.recipe import Recipe
from qspec.schema.training import Loss
from qspec.train.data import PARTS, Rollout, lessons
from qspec.train.loop import CURVE, Judgement, facts, train
from qspec.train.processes import rank_and_world

_JUDGED_AT_ONCE = 1024


_MOST_JUDGED = 8192


@dataclass(frozen=True)
class HeadBatch:
    """States `[T, H]`, tokens that heads read, and their labels: the tokens behind and the target's distributions."""

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

    def batch(self, starts_T: Tensor, n: int) -> HeadBatch:
        """Inputs and labels of `n` heads at some starts."""
        rows_TN = starts_T[:, None] + torch.arange(1, n + 1)
        return HeadBatch(
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


def frequent_ids(rollouts: Sequence[Rollout], size: int, vocab_size: int) -> Tensor | None:
    """The `size` ids that the target's distributions give most mass to, rising `[D]`; None: all of them."""
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
        torch.cat([one.states_MS for one in taken]),
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


@dataclass(frozen=True)
class HeadLearner:
    """Implements `train.loop.Learner` over `HeadData`."""

    module: MLPSpeculator

    def backward(self, data: HeadData, starts_T: Tensor, loss: Loss) -> float:
        batch, total = data.batch(starts_T, self.module.shape.n_predict), torch.zeros(())
        for i, logits_TD in enumerate(self.module(batch.hidden_TH, batch.tokens_TN)):
            likeliest = batch.ids_TNK[:, i], batch.probs_TNK[:, i]
            total = total + loss_of(loss, logits_TD, batch.labels_TN[:, i], *likeliest)
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


def train_head(recipe: Recipe, draft: MlpDraft, model: LoadedModel, half: Path, out: Path, progress: Progress) -> Path:
    """Train the recipe's head on what the quantized target of the folder `half` reads and writes; returns `out/head`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    assert draft.training is not None, "a head is trained as the recipe says"
    target, spec = compressed.read(half), draft.training
    arch, shape = target.arch, shape_of(draft, target.arch)
    data = lessons(spec.data, half, target, recipe.seed, out / "data", progress)
    ids_D = frequent_ids([*data.text, *data.answers], shape.draft_vocab, arch.vocab_size)
    head = MLPSpeculator(shape, ids_D, *target_rows(target))
    initialize(head, torch.Generator().manual_seed(recipe.seed))
    if spec.start == "target":
        start_from(head, *target_rows(target))
    progress.stage("train the head")
    parts = data.text, data.answers, data.judged
    text, answers, judged = (lay_out(part, shape.n_predict, ids_D, arch.vocab_size) for part in parts)
    course = train(HeadLearner(head), (text, answers), judged, spec, recipe.seed, out / "training", progress, data.key)
    if rank_and_world()[0] == 0:
        swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
        rows = {name: len(part.tokens_M) for name, part in zip(PARTS, (text, answers, judged), strict=True)}
        with staged_dir(out / "head") as part:
            speculator.write(head, part, facts(recipe.seed, spec, target, course) | {"rows": rows})
            (part / CURVE).write_text(course.lines)
    progress.close()
    return out / "head"
