"""A speculator head in training: the losses of all its heads, and what share of their drafts would stand."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qspec.bridges import speculator
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, initialize, start_from, swap_linears
from qspec.numerics.speculation.speculator import agreement, loss_of, overlap
from qspec.pair.head import shape_of, target_rows
from qspec.pair.open import open_fitting
from qspec.progress import Progress
from qspec.provenance import staged_dir
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.drafts import MlpDraft
from qspec.schema.recipe import Recipe
from qspec.schema.training import Loss
from qspec.train.data import ANSWERS, TEXT, both_stages, make_data, read_data
from qspec.train.head_data import HeadData, frequent_ids, lay_out, split
from qspec.train.loop import CURVE, Judgement, facts, require_same, train
from qspec.train.processes import rank_and_world

_JUDGED_AT_ONCE = 1024


_MOST_JUDGED = 8192


@dataclass(frozen=True)
class HeadLearner:
    """Implements `train.loop.Learner` over `HeadData`."""

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


def train_head(
    recipe: Recipe, draft: MlpDraft, model: LoadedModel, target: QuantizedModel, out: Path, progress: Progress
) -> Path:
    """Train the recipe's head on what `target`, of `out/target`, reads and writes; returns `out/head`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    assert draft.training is not None, "a head is trained as the recipe says"
    spec, arch, shape = draft.training, target.arch, shape_of(draft, target.arch)
    stages = both_stages(out / "target", target.tokenizer, spec.data, recipe.seed)
    made_of = [stage.key for stage in stages]
    require_same(out / "training", recipe.seed, spec, made_of)
    length = spec.data.prompt_tokens + spec.data.answer_tokens
    lm = open_fitting("the quantized target", target, max(length, spec.data.text_length))
    make_data(out / "data", lm, stages, spec.data, arch.eos_ids, recipe.seed, progress)
    text = read_data(out / "data", TEXT)
    answers, judged = split(read_data(out / "data", ANSWERS), spec.data.held_out)
    ids_D = frequent_ids([*text, *answers], shape.draft_vocab, arch.vocab_size)
    head = MLPSpeculator(shape, ids_D, *target_rows(target))
    initialize(head, torch.Generator().manual_seed(recipe.seed))
    if spec.start == "target":
        start_from(head, *target_rows(target))
    progress.stage("train the head")
    laid = [lay_out(part, shape.n_predict, ids_D, arch.vocab_size) for part in (text, answers, judged)]
    learner = HeadLearner(head)
    course = train(learner, (laid[0], laid[1]), laid[2], spec, recipe.seed, out / "training", progress, made_of)
    if rank_and_world()[0] == 0:
        swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
        rows = dict(zip((TEXT, ANSWERS, "held out"), (len(data.tokens_M) for data in laid), strict=True))
        with staged_dir(out / "head") as part:
            speculator.write(head, part, facts(recipe.seed, spec, target, course) | {"rows": rows})
            (part / CURVE).write_bytes((out / "training" / CURVE).read_bytes())
    progress.close()
    return out / "head"
