"""Accounting of speculative steps: acceptance, cost, and predicted beside measured speedup."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from qspec.numerics.speedup import alpha_from_counts, expected_tokens
from qspec.spec.types import StepRecord


@dataclass(frozen=True)
class SpecStats:
    """Pooled counts and ratios of steps, of one request or of many.

    alpha: acceptance rate per tested token, with a 95 % interval that takes tokens as independent.
    tokens_per_step: accepted + 1, averaged. per_position: of the steps that drafted at least i + 1 tokens, the share
    whose token i stood. c: draft seconds per drafted token / plain target step (median over steps, so that a draft's
    prefill does not count). verify_cost: verification / plain target step (median).
    predicted_speedup: from alpha, c and verify_cost at the draft lengths that were used (theorem 3.8, general form).
    measured_speedup: plain seconds for as many tokens / seconds of the steps, everything included.
    """

    steps: int
    drafted: int
    accepted: int
    alpha: float
    alpha_ci: tuple[float, float]
    tokens_per_step: float
    per_position: tuple[float, ...]
    c: float
    verify_cost: float
    predicted_speedup: float
    measured_speedup: float

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
        accepted = sum(s.accepted for s in steps)
        seconds = sum(s.t_draft + s.t_verify + s.t_other for s in steps)
        return cls(
            steps=len(steps),
            drafted=sum(s.drafted for s in steps),
            accepted=accepted,
            alpha=alpha,
            alpha_ci=alpha_ci,
            tokens_per_step=1 + accepted / len(steps),
            per_position=acceptance_by_position(steps),
            c=c,
            verify_cost=verify_cost,
            predicted_speedup=_predicted(steps, alpha, c, verify_cost),
            measured_speedup=t_plain_step * (len(steps) + accepted) / seconds,
        )


def acceptance_by_position(steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """Of the steps that drafted at least i + 1 tokens, the share whose token i stood, for every i."""
    longest = max((s.drafted for s in steps), default=0)
    return tuple(mean(float(s.accepted > i) for s in steps if s.drafted > i) for i in range(longest))


def _predicted(steps: Sequence[StepRecord], alpha: float, c: float, verify_cost: float) -> float:
    """Expected tokens over expected cost, in plain steps."""
    tokens = sum(expected_tokens(alpha, s.drafted) for s in steps)
    return tokens / sum(s.drafted * c + verify_cost for s in steps)
