"""An EAGLE-3 head in training: behind every row of an answer a chain of its own outputs, as long as it will draft.

Step 0 reads the target's states at all slots of a sequence, causally. In step t the chain of slot p reads its own
output of the step before and the true token, at position p + t: it sees the slots up to p as step 0 left them, and its
own earlier steps. So every chain learns as if the target had been asked last at its slot, and all chains of a sequence
share one pass a step. Letters: S numbers of a position's state, M slots of all sequences, C chains, N heads of
attention, G of keys and values, R = N / G, K their size or kept ids, L slots of a sequence, T a chain's own steps,
H hidden size, D ids to be drafted.
Source: arXiv 2503.01840, section 3.2 (training-time test).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
import torch.nn.functional as F

from qspec.bridges import compressed
from qspec.bridges.heads import eagle3
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eagle3 import Eagle3, Eagle3Shape, initialize
from qspec.nn.mlp_speculator import swap_linears
from qspec.numerics.speculation.speculator import agreement, loss_of, overlap
from qspec.pair.head import eagle3_shape, target_rows
from qspec.progress import Progress
from qspec.provenance import staged_dir
from qspec.records import LoadedModel
from qspec.schema.drafts import Eagle3Draft
from qspec.schema.recipe import Recipe
from qspec.schema.training import Eagle3Spec, Loss
from qspec.train.data import PARTS, Rollout, SequenceData, lessons
from qspec.train.head import draft_ids, frequent_ids
from qspec.train.loop import CURVE, Judgement, facts, train
from qspec.train.processes import rank_and_world

_MOST_JUDGED = 8192
_ROWS_AT_ONCE = 2048
"""Rows whose logits are in memory together."""
_MEASURED = 64
"""Sequences from which the sizes of channels are known."""
_LEAST = 1e-4
"""Mean square of a channel below which it is not made larger."""


@dataclass(frozen=True)
class Chains:
    """Sequences behind one another, and the slots of each at which chains of `steps` begin.

    Slot p holds the states of position p and the token behind it; the first row of its chain is judged by the target's
    distribution behind that token.
    """

    sequences: Sequence[Rollout]
    steps: int
    every: int = 1

    @cached_property
    def counts(self) -> list[int]:
        """Slots of each sequence."""
        return [len(one.states_MS) - 1 for one in self.sequences]

    @cached_property
    def starts(self) -> list[Tensor]:
        """Slots of the chains of each sequence, all of whose rows have a distribution to be judged by."""
        firsts = [max(0, len(one.prompt_P) - 1) for one in self.sequences]
        ends = [max(first, count + 1 - self.steps) for first, count in zip(firsts, self.counts, strict=True)]
        return [torch.arange(first, end, self.every) for first, end in zip(firsts, ends, strict=True)]

    @cached_property
    def sizes(self) -> list[int]:
        """Chains of each sequence."""
        return [len(starts_C) for starts_C in self.starts]

    def tokens(self, step: int) -> Tensor:
        """The true tokens `[C]` that the chains read."""
        return torch.cat([tokens_L[p + 1 + step] for tokens_L, p in zip(self._tokens, self.starts, strict=True)])

    def targets(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids and probabilities `[C, ids]` of what follows those tokens."""
        rows = [p + 1 + step - len(one.prompt_P) for one, p in zip(self.sequences, self.starts, strict=True)]
        pairs = list(zip(self.sequences, rows, strict=True))
        return torch.cat([one.ids_TK[at] for one, at in pairs]), torch.cat(
            [one.probs_TK[at] for one, at in pairs]
        ).float()

    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """States `[M, S]`, tokens and positions `[M]` of all slots."""
        return (
            torch.cat([one.states_MS[:-1] for one in self.sequences]).float(),
            torch.cat([tokens_L[1:] for tokens_L in self._tokens]),
            torch.cat([torch.arange(count) for count in self.counts]),
        )

    def rows(self) -> Tensor:
        """Where the chains begin, among all slots `[C]`."""
        offsets = torch.tensor(self.counts).cumsum(0) - torch.tensor(self.counts)
        return torch.cat([p + at for p, at in zip(self.starts, offsets.tolist(), strict=True)])

    @cached_property
    def _tokens(self) -> list[Tensor]:
        return [torch.cat([one.prompt_P, one.tokens_T]).long() for one in self.sequences]


class ChainAttention:
    """Keys and values of a batch of chains; implements `nn.eagle3.Attention`, of a layer's steps in turn."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._slots: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        pairs = zip(chains.counts, chains.starts, strict=True)
        self._hidden = [torch.arange(count) > starts_C[:, None] for count, starts_C in pairs]

    def attend(self, layer: int, q_NTK: Tensor, k_NTK: Tensor, v_NTK: Tensor) -> Tensor:
        if layer in self._slots:
            self._own.setdefault(layer, []).append((k_NTK, v_NTK))
            return self._behind_slots(layer, q_NTK)
        q, k, v = (x.split(self._chains.counts, 1) for x in (q_NTK, k_NTK, v_NTK))
        self._slots[layer] = list(zip(k, v, strict=True))
        return torch.cat([_causal(*rows) for rows in zip(q, k, v, strict=True)])

    def _behind_slots(self, layer: int, q_NCK: Tensor) -> Tensor:
        """Softmax over the slots up to each chain's own, and its own steps."""
        groups = len(self._slots[layer][0][0])
        q_GRCK = q_NCK.unflatten(0, (groups, -1)) * q_NCK.shape[-1] ** -0.5
        own = [(q_GRCK * k_GCK[:, None]).sum(-1, keepdim=True) for k_GCK, _ in self._own[layer]]
        scores, weights = torch.cat(own, -1).split(self._chains.sizes, 2), []
        for q, own_GRCT, (k_GLK, _), hidden_CL in zip(
            q_GRCK.split(self._chains.sizes, 2), scores, self._slots[layer], self._hidden, strict=True
        ):
            seen_GRCL = (q.flatten(1, 2) @ k_GLK.transpose(1, 2)).view(*q.shape[:3], -1)
            seen_GRCL = seen_GRCL.masked_fill(hidden_CL, -torch.inf)
            weights.append(torch.cat([seen_GRCL, own_GRCT], -1).softmax(-1))
        steps, out = len(own), []
        for p_GRCL, (_, v_GLK) in zip(weights, self._slots[layer], strict=True):
            seen = p_GRCL[..., :-steps]
            out.append((seen.flatten(1, 2) @ v_GLK).view(*seen.shape[:3], -1))
        y_GRCK, own_GRCT = torch.cat(out, 2), torch.cat([p[..., -steps:] for p in weights], 2)
        for i, (_, v_GCK) in enumerate(self._own[layer]):
            y_GRCK = y_GRCK + own_GRCT[..., i : i + 1] * v_GCK[:, None]
        return y_GRCK.flatten(0, 1).transpose(0, 1).flatten(1)


def _causal(q_NTK: Tensor, k_GTK: Tensor, v_GTK: Tensor) -> Tensor:
    """Rows of one sequence, each over itself and those before it; heads side by side `[T, N * K]`."""
    gqa = q_NTK.shape[0] != k_GTK.shape[0]
    out_NTK = F.scaled_dot_product_attention(q_NTK[None], k_GTK[None], v_GTK[None], is_causal=True, enable_gqa=gqa)[0]
    return out_NTK.transpose(0, 1).flatten(1)


def unrolled(head: Eagle3, chains: Chains) -> Iterator[Tensor]:
    """Outputs y `[C, H]` of each step of all chains; what chained drafting computes, if the true tokens are drafted."""
    attention, begins = ChainAttention(chains), torch.cat(chains.starts)
    states_MS, tokens_M, positions_M = chains.slots()
    y_CH = head.run(head.fuse(states_MS), tokens_M, positions_M, attention)[chains.rows()]
    yield y_CH
    for step in range(1, chains.steps):
        y_CH = head.run(head.feed(y_CH), chains.tokens(step), begins + step, attention)
        yield y_CH


@dataclass(frozen=True)
class Eagle3Learner:
    """Implements `train.loop.Learner` over `SequenceData` whose ids are the head's."""

    module: Eagle3
    spec: Eagle3Spec

    def backward(self, data: SequenceData, starts_T: Tensor, loss: Loss) -> float:
        """States count alike, whatever the length of their sequence; gradients are added up over parts of the batch."""
        total, expected = 0.0, len(starts_T) * data.rows / len(data.sequences)
        for part in _parts([data.sequences[i] for i in starts_T.tolist()], _ROWS_AT_ONCE):
            chains = Chains(part, self.spec.steps)
            share = self._loss(chains, loss) * (sum(chains.sizes) / expected)
            share.backward()
            total += float(share.detach())
        return total

    def _loss(self, chains: Chains, loss: Loss) -> Tensor:
        """Mean over the chains, and over their steps by weight."""
        weights = [self.spec.decay**step for step in range(chains.steps)]
        total = torch.zeros(())
        for step, (weight, y_CH) in enumerate(zip(weights, unrolled(self.module, chains), strict=True)):
            ids_CK, probs_CK = chains.targets(step)
            total = total + weight * loss_of(loss, self.module.logits(y_CH), ids_CK[:, 0], ids_CK, probs_CK)
        return total / sum(weights)

    @torch.no_grad()
    def judge(self, data: SequenceData) -> Judgement:
        """Acceptance of step i among the chains whose steps before would stand."""
        every, n = -(-data.rows // _MOST_JUDGED), 0
        sampled, greedy = torch.zeros(2, self.spec.steps, dtype=torch.float64)
        for part in _parts(data.sequences, _ROWS_AT_ONCE * every):
            chains = Chains(part, self.spec.steps, every)
            reached = torch.ones(2, sum(chains.sizes))
            n += reached.shape[1]
            for step, y_CH in enumerate(unrolled(self.module, chains)):
                logits_CD, (ids_CK, probs_CK) = self.module.logits(y_CH), chains.targets(step)
                reached *= torch.stack([overlap(logits_CD.softmax(-1), ids_CK, probs_CK), agreement(logits_CD, ids_CK)])
                sampled[step] += reached[0].sum()
                greedy[step] += reached[1].sum()
        return Judgement(_conditional(n, sampled.tolist()), _conditional(n, greedy.tolist()), n)


def _conditional(n: int, reached: list[float]) -> list[float]:
    return [on / before if before else 0.0 for before, on in pairwise([n, *reached])]


def _parts(sequences: Sequence[Rollout], rows: int) -> Iterator[list[Rollout]]:
    """The sequences in order, as many together as have so many rows; at least one."""
    part, size = list[Rollout](), 0
    for one in sequences:
        if part and size + len(one.tokens_T) > rows:
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one.tokens_T)
    if part:
        yield part


@torch.no_grad()
def begin(head: Eagle3, output_VH: Tensor, rollouts: Sequence[Rollout], generator: torch.Generator) -> None:
    """Initialize a head: with the target's output rows, logits of deviation 1, and inputs of `fc` of mean square 1.

    Residuals have a few channels a hundred times as large as others, in every token: the gains in front of `fc` even
    them out, for the optimizer and for inputs that are rounded to INT8.
    """
    initialize(head, generator, output_VH.float())
    head.norm.weight.fill_(float(1 / head.lm_head.weight.norm(dim=1).mean()))
    rows_MS = torch.cat([one.states_MS[1:] for one in rollouts[:_MEASURED]]).float()
    for norm, rows_MH in zip(head.fc_norm, rows_MS.split(head.shape.target_hidden, -1), strict=True):
        assert isinstance(norm, nn.RMSNorm)
        norm.weight.copy_(norm(rows_MH).square().mean(0).clamp_min(_LEAST).rsqrt())


def train_eagle3(
    recipe: Recipe, draft: Eagle3Draft, model: LoadedModel, half: Path, out: Path, progress: Progress
) -> Path:
    """Train the recipe's head on what the quantized target of the folder `half` reads and writes; returns `out/head`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    assert draft.training is not None, "a head is trained as the recipe says"
    target, spec = compressed.read(half), draft.training
    shape = replace(eagle3_shape(draft, target.arch), fc_norm=True)
    data = lessons(spec.data, half, target, recipe.seed, out / "data", progress, shape.taps)
    ids_D = frequent_ids([*data.text, *data.answers], shape.draft_vocab, shape.vocab_size)
    embedding_VH, output_VH = target_rows(target)
    head = Eagle3(shape, ids_D, embedding_VH)
    begin(head, output_VH, data.answers, torch.Generator().manual_seed(recipe.seed))
    head.lm_head.requires_grad_(spec.output == "trained")
    progress.stage("train the head")
    text, answers, judged = (
        SequenceData([_numbered(one, ids_D, shape) for one in part if len(one.tokens_T) > spec.steps + 1])
        for part in (data.text, data.answers, data.judged)
    )
    learner = Eagle3Learner(head, spec)
    course = train(learner, (text, answers), judged, spec, recipe.seed, out / "training", progress, data.key)
    if rank_and_world()[0] == 0:
        swap_linears(head, lambda linear: linear if linear is head.lm_head else Int8Map.rounded(linear.weight))
        rounded = learner.judge(judged)
        progress.say(f"in INT8: {rounded.score:.3f} tokens per step on held-out answers, {course.best:.3f} in float")
        rows = {name: part.rows for name, part in zip(PARTS, (text, answers, judged), strict=True)}
        record = facts(recipe.seed, spec, target, course) | {"rows": rows}
        record["held_out_int8"] = {"sampled": rounded.sampled, "greedy": rounded.greedy}
        with staged_dir(out / "head") as part:
            eagle3.write(head, part, target.arch, record, dtype=torch.bfloat16)
            (part / CURVE).write_text(course.lines)
    progress.close()
    return out / "head"


def _numbered(one: Rollout, ids_D: Tensor | None, shape: Eagle3Shape) -> Rollout:
    """The same sequence, its distributions by the head's own ids."""
    return replace(one, ids_TK=draft_ids(one.ids_TK, ids_D, shape.vocab_size))
