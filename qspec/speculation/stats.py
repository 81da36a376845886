"""Accounting of speculative steps: acceptance, cost, and predicted beside measured speedup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor
from torch.nn.functional import pad

from qspec.nn.lm import LM
from qspec.numerics.speculation.speedup import (
    alpha_from_counts,
    expected_tokens,
    optimal_gamma,
    pass_cost,
    walltime_speedup,
)
from qspec.numerics.statistics.fidelity import sum_of_minima, wilson_interval
from qspec.speculation.types import Sampling, StepRecord

LONGEST = 16
"""Draft length up to which the best one is looked for."""


@dataclass(frozen=True)
class Counts:
    """Counts of steps, of draft tokens that could be accepted, and of those that were."""

    steps: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> "Counts":
        return cls(len(steps), sum(s.drafted for s in steps), sum(s.accepted for s in steps))


@dataclass(frozen=True)
class SpecStats:
    """Pooled counts and ratios of steps, of one request or of many.

    alpha: acceptance rate per tested token, with a 95 % interval that takes tokens as independent.
    tokens_per_step: accepted + 1, averaged; expected_tokens: what alpha predicts for it.
    per_position: of the steps that drafted at least i + 1 tokens, the share that accepted token i, with 95 % intervals.
    c: draft seconds per drafted token / plain target step (median over steps: a draft's prefill does not count).
    verify_cost: verification / plain target step (median); verify_costs: the same by number of rows.
    predicted_speedup: from alpha, c and verify_cost at the draft lengths that were used (theorem 3.8, general form).
    best_length, best_speedup: the draft length of the largest prediction (0: plain decoding), and that prediction.
    measured_speedup: plain seconds for as many tokens / seconds of the steps, everything included.
    nodes_per_step: draft tokens that were verified, those of a tree's other branches too.
    by_source: counts of each source, of a drafter that has several.
    idle_steps: those without drafts; idle_cost: what drafter, policy and bookkeeping added to one, in plain steps.
    """

    steps: int
    drafted: int
    accepted: int
    alpha: float
    alpha_ci: tuple[float, float]
    tokens_per_step: float
    expected_tokens: float
    per_position: tuple[float, ...]
    per_position_ci: tuple[tuple[float, float], ...]
    c: float
    verify_cost: float
    verify_costs: Mapping[int, float]
    predicted_speedup: float
    best_length: int
    best_speedup: float
    measured_speedup: float
    nodes_per_step: float
    by_source: Mapping[str, Counts]
    idle_steps: int
    idle_cost: float

    @classmethod
    def from_steps(cls, steps: Sequence[StepRecord], t_plain_step: float) -> "SpecStats":
        """Sum up steps; `t_plain_step` is the seconds of one plain decoding step of the same target (above 0).

        Raises `ValueError` without steps.
        """
        if not steps or t_plain_step <= 0:
            raise ValueError(f"{len(steps)} steps at {t_plain_step} s per plain step give no statistics")
        alpha, alpha_ci = alpha_from_counts([s.drafted for s in steps], [s.accepted for s in steps])
        c = median([s.t_draft / s.drafted for s in steps if s.drafted] or [0.0]) / t_plain_step
        verify_cost = median(s.t_verify for s in steps) / t_plain_step
        verify_costs = _verify_costs(steps, t_plain_step)
        best = optimal_gamma(alpha, c, LONGEST, lambda rows: pass_cost(verify_costs, rows))
        accepted = sum(s.accepted for s in steps)
        seconds = sum(s.t_draft + s.t_verify + s.t_other for s in steps)
        idle = [s.t_draft + s.t_other for s in steps if not s.drafted]
        sources = dict.fromkeys(s.source for s in steps if s.source)
        return cls(
            steps=len(steps),
            drafted=sum(s.drafted for s in steps),
            accepted=accepted,
            alpha=alpha,
            alpha_ci=alpha_ci,
            tokens_per_step=1 + accepted / len(steps),
            expected_tokens=mean(expected_tokens(alpha, s.drafted) for s in steps),
            per_position=acceptance_by_position(steps),
            per_position_ci=intervals_by_position(steps),
            c=c,
            verify_cost=verify_cost,
            verify_costs=verify_costs,
            predicted_speedup=_predicted(steps, alpha, c, verify_cost),
            best_length=best,
            best_speedup=walltime_speedup(alpha, best, c, pass_cost(verify_costs, best + 1)),
            measured_speedup=t_plain_step * (len(steps) + accepted) / seconds,
            nodes_per_step=mean(max(s.nodes, s.drafted) for s in steps),
            by_source={source: Counts.of([s for s in steps if s.source == source]) for source in sources},
            idle_steps=len(idle),
            idle_cost=median(idle or [0.0]) / t_plain_step,
        )


def acceptance_by_position(steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """Share of steps that accepted token i, among those that drafted at least i + 1 tokens, for every i."""
    longest = max((s.drafted for s in steps), default=0)
    return tuple(mean(float(s.accepted > i) for s in steps if s.drafted > i) for i in range(longest))


def intervals_by_position(steps: Sequence[StepRecord]) -> tuple[tuple[float, float], ...]:
    """95 % Wilson intervals of `acceptance_by_position`."""
    longest = max((s.drafted for s in steps), default=0)
    reached = [[s.accepted > i for s in steps if s.drafted > i] for i in range(longest)]
    return tuple(wilson_interval(sum(outcomes), len(outcomes)) for outcomes in reached)


@torch.no_grad()
def teacher_forced_betas(
    target: LM, draft: LM, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> Tensor:
    """Acceptance rate beta of the draft behind every token of a text, float64 `[T]`: sum of minima of distributions.

    Positions are those that predict `answer`; ones that do not fit into either cache are left out. Its mean estimates
    alpha without drafting: no position is missed behind a rejection. Source: arXiv 2211.17192, section 3.2.
    """
    text = [*prompt, *answer][: min(target.max_length, draft.max_length) + 1][:-1]
    rows = len(text) - len(prompt) + 1
    if rows < 1:
        return torch.empty(0, dtype=torch.float64)
    logits = []
    for lm in (target, draft):
        lm.truncate(0)
        logits.append(lm.forward(torch.tensor(text), last=rows))
    width = target.vocab_size
    q_TV = pad(logits[1][:, :width], (0, max(0, width - draft.vocab_size)), value=float("-inf"))
    return sum_of_minima(sampling.probs(logits[0]), sampling.probs(q_TV.to(logits[0])))


def _verify_costs(steps: Sequence[StepRecord], t_plain_step: float) -> dict[int, float]:
    by_rows: dict[int, list[float]] = {}
    for s in steps:
        by_rows.setdefault(s.drafted + 1, []).append(s.t_verify / t_plain_step)
    return {1: 1.0} | {rows: median(costs) for rows, costs in sorted(by_rows.items())}


def _predicted(steps: Sequence[StepRecord], alpha: float, c: float, verify_cost: float) -> float:
    """Expected tokens over expected cost, in plain steps."""
    tokens = sum(expected_tokens(alpha, s.drafted) for s in steps)
    return tokens / sum(s.drafted * c + verify_cost for s in steps)
