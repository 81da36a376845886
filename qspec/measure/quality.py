"""Evidence that a pair is worth using: short answers of its target, and what rounding took from its draft.

Letters: T rows, V the target's vocabulary, D ids that a head drafts, W windows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from qspec.bridges.text import windows
from qspec.measure.fidelity import CHUNK
from qspec.nn.lm import LM
from qspec.numerics.statistics.fidelity import kl_divergence, sum_of_minima, top1_agreement
from qspec.numerics.statistics.student import mean_interval
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import FidelitySpec
from qspec.schema.results import Answer, Answers, DraftFidelity, Measurement, Scalar
from qspec.speculation.types import HeadDrafter

ANSWERS, BEGINNING, LENGTH = 4, 32, 32
"""Short answers: how many, the tokens of held-out text before each, and the tokens of each."""
LONGEST_LOOP = 8
"""Tokens of the longest loop that is looked for; sentences that a small model repeats are longer."""
DRAFT_WINDOWS = 8
"""Windows at most that a draft is compared on: three models read them."""


class Drafts(Protocol):
    """A draft as it came and as it is packaged, which both read what the target reads."""

    @property
    def max_length(self) -> int: ...

    def begin(self, target: LM) -> None:
        """Forget the text before; `target` is what will read the next one."""

    def logits(self, target: LM, tokens_T: Tensor, target_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[t, V]` behind the same places of a text by target, original and packaged draft, `t` at most T.

        tokens_T: the next piece of the text, which the target has just read; target_TV: its logits.
        """


@dataclass(frozen=True)
class ModelDrafts:
    """Draft models."""

    original: LM
    packaged: LM

    @property
    def max_length(self) -> int:
        return min(self.original.max_length, self.packaged.max_length)

    def begin(self, target: LM) -> None:
        for lm in (self.original, self.packaged):
            lm.truncate(0)

    def logits(self, target: LM, tokens_T: Tensor, target_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafted = [_of_width(lm.forward(tokens_T).cpu(), target_TV.shape[1]) for lm in (self.original, self.packaged)]
        return target_TV, drafted[0], drafted[1]


@dataclass(frozen=True)
class HeadDrafts:
    """Heads, whose first drafts are compared: they read the target's states and one more token."""

    original: HeadDrafter
    packaged: HeadDrafter
    max_length: int

    def begin(self, target: LM) -> None:
        for drafter in (self.original, self.packaged):
            drafter.follow(target)

    def logits(self, target: LM, tokens_T: Tensor, target_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return target_TV[1:], self.original.first(tokens_T), self.packaged.first(tokens_T)


def measure_answers(
    original: LM,
    quantized: LM,
    tokenizer: Tokenizer,
    spec: FidelitySpec,
    eos_ids: Collection[int],
    progress: Progress,
) -> Answers:
    """Greedy continuations of the beginnings of held-out texts, by both arms."""
    room = min(original.max_length, quantized.max_length)
    length = min(BEGINNING, spec.length, room // 2)
    rows = windows(spec.data, min(ANSWERS, spec.windows), length, tokenizer)
    answers = list[Answer]()
    for row in progress.track(rows, "answers", len(rows), "answer"):
        (before, _), (after, finite) = (
            greedy(lm, row, min(LENGTH, room - length), eos_ids) for lm in (original, quantized)
        )
        texts = [tokenizer.decode(tokens) for tokens in (before, after)]
        answers.append(
            Answer(
                original=texts[0],
                quantized=texts[1],
                original_loop=loop_share(before),
                quantized_loop=loop_share(after),
                finite=finite,
            )
        )
    return Answers(rows=tuple(answers))


@torch.no_grad()
def greedy(lm: LM, prompt: Sequence[int], most: int, eos_ids: Collection[int]) -> tuple[list[int], bool]:
    """At most `most` likeliest tokens behind a prompt, and whether all logits on the way were finite."""
    lm.truncate(0)
    logits_V, tokens, finite = lm.forward(torch.tensor(prompt), last=1)[0], list[int](), True
    while True:
        finite = finite and bool((logits_V < math.inf).all())  # no NaN; -inf is an id that is never said
        tokens.append(int(logits_V.argmax()))
        if len(tokens) == most or tokens[-1] in eos_ids:
            return tokens, finite
        logits_V = lm.forward(torch.tensor(tokens[-1:]), last=1)[0]


def loop_share(tokens: Sequence[int]) -> float:
    """Largest share of tokens that are those `p` places before, over periods p.

    0.0 for text that never repeats, 1.0 for `a b a b a b` and for an answer too short to be one.
    """
    shares = [
        sum(a == b for a, b in zip(tokens, tokens[period:], strict=False)) / (len(tokens) - period)
        for period in range(1, LONGEST_LOOP + 1)
        if len(tokens) >= 3 * period
    ]
    return max(shares, default=1.0)


def measure_draft(
    target: LM, drafts: Drafts, tokenizer: Tokenizer, spec: FidelitySpec, progress: Progress
) -> DraftFidelity:
    """KL and agreement of the packaged draft with the original one, and how often the target would accept either."""
    length = min(spec.length, target.max_length, drafts.max_length)
    rows = windows(spec.data, min(DRAFT_WINDOWS, spec.windows), length, tokenizer)
    means_W4 = torch.stack([_window(target, drafts, row) for row in progress.track(rows, "draft", len(rows))])
    condition: dict[str, Scalar] = {"data": spec.data, "windows": len(rows), "window_tokens": length}

    def mean(column: int, metric: str, unit: str, high: float = math.inf) -> Measurement:
        values = means_W4[:, column].tolist()
        ci, value = mean_interval(values, low=0.0, high=high), float(means_W4[:, column].mean())
        return Measurement(metric=metric, value=value, unit=unit, n=len(values), ci=ci, condition=condition)

    accepted = "acceptance by the quantized target, mean sum of minima at temperature 1"
    return DraftFidelity(
        kl=mean(0, "KL(draft as it came || draft)", "nats/token"),
        top1_agreement=mean(1, "top-1 agreement of the draft", "share of tokens", 1.0),
        acceptance=mean(2, f"{accepted}, draft", "per token", 1.0),
        unrounded_acceptance=mean(3, f"{accepted}, draft as it came", "per token", 1.0),
    )


@torch.no_grad()
def _window(target: LM, drafts: Drafts, tokens: list[int]) -> Tensor:
    """Means over the places of a window: KL, agreement, acceptance of the packaged draft and of the original one."""
    target.truncate(0)
    drafts.begin(target)
    parts = list[Tensor]()
    for start in range(0, len(tokens), CHUNK):
        tokens_T = torch.tensor(tokens[start : start + CHUNK])
        target_TV, before_TV, after_TV = drafts.logits(target, tokens_T, target.forward(tokens_T).cpu())
        before_TV = before_TV.masked_fill(after_TV == -math.inf, -math.inf)  # ids that it does not draft
        probs = [logits_TV.double().softmax(-1) for logits_TV in (target_TV, after_TV, before_TV)]
        accepted = [sum_of_minima(probs[0], probs_TV) for probs_TV in probs[1:]]
        same_T = top1_agreement(before_TV, after_TV).double()
        parts.append(torch.stack([kl_divergence(before_TV, after_TV), same_T, *accepted]))
    return torch.cat(parts, 1).mean(1)


def _of_width(logits_TV: Tensor, width: int) -> Tensor:
    """Logits over as many ids as the target has: what a draft lacks it never says."""
    return pad(logits_TV[:, :width], (0, max(0, width - logits_TV.shape[1])), value=-math.inf)
