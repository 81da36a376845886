"""Measurements of each half, once, that a joint search combines for every pair: times of passes, distributions."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qspec.nn.lm import LM, BatchLM
from qspec.numerics.speculation.replay import runs_of
from qspec.progress import Progress
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Drafter, Follower, Sampling

Json = dict[str, Any]


MASS_KEPT = 256
"""Likeliest tokens of a sampled distribution that are kept; the overlap of two misses at most the smaller tail."""


Texts = Sequence[tuple[list[int], list[int]]]
"""Prompts with the original's greedy answers."""


@torch.no_grad()
def pass_times(
    halves: Mapping[str, LM],
    rows: Sequence[int],
    batches: Sequence[int],
    context: int,
    repeats: int,
    progress: Progress,
    greedy: Collection[str] = (),
) -> Json:
    """Seconds of passes: by half, batch size and rows of each sequence, all `repeats` of them.

    Choosing tokens from the logits is not in them, rounds are charged for it (`tune_rounds`); halves in `greedy` choose
    them in the pass of a single sequence. Halves take turns, so that a drift of the machine hits all alike. An empty
    list: the half has no such batches.
    """
    sequences = {name: _filled(lm, max(batches), context) for name, lm in halves.items()}
    times: Json = {n: {str(b): {str(r): [] for r in rows} for b in batches} for n in halves}
    for turn in progress.track(range(repeats + 1), "pass times", repeats + 1):
        for name, lms in sequences.items():
            for batch, count in ((b, r) for b in batches for r in rows if b <= len(lms)):
                seconds = _pass(lms[:batch], context, count, name in greedy)
                if turn:  # the first one warms up
                    times[name][str(batch)][str(count)].append(seconds)
    return times


def _filled(lm: LM, batch: int, context: int) -> list[LM]:
    lms: list[LM] = [lm, *(lm.fork() for _ in range(batch - 1))] if isinstance(lm, BatchLM) else [lm]
    for one in lms:
        one.truncate(0)
        one.forward(torch.arange(context) % lm.vocab_size, last=1)
    return lms


def _pass(lms: list[Any], context: int, rows: int, greedy: bool) -> float:
    tokens = torch.arange(rows) % lms[0].vocab_size
    for lm in lms:
        lm.truncate(context)
    begin = perf_counter()
    if len(lms) == 1:
        (lms[0].greedy if greedy else lms[0].forward)(tokens)
    else:
        type(lms[0]).forward_many(lms, [tokens] * len(lms), [None] * len(lms))
    return perf_counter() - begin


@torch.no_grad()
def prompt_seconds(lm: LM, texts: Texts) -> list[float]:
    """Seconds of reading every prompt: to a target's first token, or of a draft model before its first round."""
    seconds = []
    for prompt, _ in texts:
        lm.truncate(0)
        begin = perf_counter()
        lm.forward(torch.tensor(prompt), last=1)
        seconds.append(perf_counter() - begin)
    return seconds


def middle(seconds: Sequence[float]) -> tuple[float, float]:
    """Median, and the half-width of its 95 % interval relative to it (1.57 of the quartile range over sqrt n)."""
    centre = median(seconds)
    low, _, high = quantiles(seconds, n=4)
    return centre, 1.57 * (high - low) / len(seconds) ** 0.5 / centre


@torch.no_grad()
def answer_logits(lm: LM, texts: Texts) -> Iterator[Tensor]:
    """Logits `[T, V]` of every text behind the positions that its answer's tokens follow."""
    for prompt, answer in texts:
        lm.truncate(0)
        yield lm.forward(torch.tensor([*prompt, *answer[:-1]]), last=len(answer))


def distributions(logits: Iterable[Tensor], sampling: Sampling) -> Json:
    """Distributions of a half behind every position of the answers, by text: its likeliest token, exactly.

    Where requests are sampled also its `MASS_KEPT` likeliest tokens with their probabilities under `sampling`.
    """
    kept: Json = {"top": [], "probs": []}
    for logits_TV in logits:
        kept["top"].append(logits_TV.argmax(-1).tolist())
        if not sampling.greedy:
            top = sampling.probs(logits_TV).topk(min(MASS_KEPT, logits_TV.shape[-1]))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            kept["probs"].append([dict(zip(map(str, ids), mass, strict=True)) for ids, mass in pairs])
    return kept


@torch.no_grad()
def draft_runs(drafter: Drafter, texts: Texts, most: int, target: LM | None = None) -> Json:
    """Behind every position of every answer: tokens that a draft without a model proposes, and how many are accepted.

    seconds: of a call, or, of a speculator head, of a token. target: the one whose states a head reads.
    """
    generator, drafts, seconds = torch.Generator().manual_seed(0), Json(drafted=[], runs=[]), []
    for prompt, answer in texts:
        drafter.reset()
        if target is not None:
            assert isinstance(drafter, Follower), "a speculator head reads its target"
            target.truncate(0)
            target.forward(torch.tensor(prompt), last=1)
            drafter.follow(target)
        drafted, runs = [0], [0]
        for at in range(1, len(answer)):
            proposal, true = drafter.propose([*prompt, *answer[:at]], most, Sampling(), generator), answer[at:]
            if target is not None:
                true = [*target.forward(torch.tensor([answer[at - 1]])).argmax(-1).tolist(), *true[1:]]
            drafted.append(len(proposal.tokens_K))
            runs.append(_stand(proposal.tokens_K.tolist(), true))
            seconds.append(proposal.seconds)
        drafts["drafted"].append(drafted)
        drafts["runs"].append(runs)
    return drafts | {"seconds": median(seconds or [0.0]) / (1 if target is None else most)}


def _stand(drafted: list[int], true: list[int]) -> int:
    return runs_of([a == b for a, b in zip(drafted, true, strict=False)] or [False])[0]


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
    seconds: Json = {"engine": {}, "draft": {}}
    for drafted in (0, *lengths):
        tokens = rounds * (drafted + 1) + 1
        target, draft = (
            kind(vocab, drafted + 1, context + tokens) for kind in (InstantGreedy if greedy else Instant, Instant)
        )
        drafter = ModelDrafter(draft, eos_ids=(NO_STOP,)) if drafted else None
        generator = torch.Generator().manual_seed(0)
        generation = generate(target, drafter, Fixed(drafted), [0] * context, tokens, sampling, (NO_STOP,), generator)
        seconds["engine"][str(drafted)] = median(step.t_verify + step.t_other for step in generation.steps)
        seconds["draft"][str(drafted)] = median(step.t_draft for step in generation.steps)
    return seconds
