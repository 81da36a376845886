"""Two arms on the same items of a task: the paired difference, what is kept, and what may be concluded from it.

Right or wrong: McNemar's exact test and intervals that keep a width when no item differs. Scored: a bootstrap of pairs.
Where answers are given and scored, the likelihood of the right ones tells more: it moves before any answer flips.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import math
from statistics import stdev

import torch

from qspec.numerics.statistics.evidence import Evidence, of_difference
from qspec.numerics.statistics.fidelity import bootstrap_ci, mcnemar_exact, wilson_interval
from qspec.numerics.statistics.paired import bootstrap_ratio, detectable_share, proportion_difference, proportion_ratio
from qspec.numerics.statistics.student import detectable_difference, mean_interval
from qspec.schema.results import Measurement, Scalar, SubTask, TaskResult

KNOWN_CHANCE = {"mmlu_pro": 0.1, "leaderboard_mmlu_pro": 0.1}
"""Scores of guessing, for results that do not state them: those of one in ten options."""
FALL = 0.01
"""Fall of the log-likelihood of right answers, as a share of the original's own, that a loss must exceed: long answers
lose more nats than short ones."""


@dataclass(frozen=True)
class Items:
    """Comparison of arms `a` and `b` item by item. `difference`: b - a; `recovery`: b / a (None: a has no score).

    `only_a` / `only_b`: items that one arm did better on. `p_value`: None where items are not right or wrong.
    """

    means: tuple[float, float]
    difference: Measurement
    recovery: float | None
    recovery_ci: tuple[float, float] | None
    only_a: int
    only_b: int
    p_value: float | None

    def evidence(self, chance: float = 0.0) -> Evidence:
        """Evidence that the items give of a difference; chance: the score of guessing."""
        score, m = self.means[0], self.difference
        discordant = self.only_a + self.only_b
        return of_difference(score, m.ci, self.p_value, m.n, m.detectable or 1.0, discordant, chance)

    def verdict(self, arm: str, chance: float = 0.0) -> str:
        """One sentence about `b`, named `arm`, that the numbers support."""
        evidence, n = self.evidence(chance), self.difference.n
        if evidence.open:
            return evidence.shortage("items")
        test = "" if self.p_value is None else f", McNemar p = {self.p_value:.2g}"
        if evidence.sign == 0:
            seen = f"a drop of {100 * (evidence.detectable or 1.0):.1f} points would have been ({n} items, 80 % power)"
            return f"no difference detected{test}; {seen}"
        word, (low, high) = "better" if evidence.sign > 0 else "worse", self.difference.ci or (0.0, 0.0)
        size = f"{100 * abs(self.difference.value):.1f} points"
        return f"{arm} is {word} by {size} (95 % CI {100 * low:+.1f} to {100 * high:+.1f}{test})"


def compare_likelihoods(a: Sequence[float | None], b: Sequence[float | None]) -> Measurement | None:
    """Mean change from `a` to `b` of the log-likelihood of right answers, nats per item; None where one has none."""
    changes = [y - x for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    n = len(changes)
    if n < max(2, len(a)):
        return None
    return Measurement(
        metric="quantized - original, log-likelihood of right answers",
        value=sum(changes) / n,
        unit="nats/item",
        n=n,
        ci=mean_interval(changes),
        detectable=detectable_difference(stdev(changes), n),
    )


def task_evidence(task: TaskResult) -> Evidence:
    """Evidence that a task's items give of a difference between its arms."""
    discordant, n = task.only_original + task.only_quantized, task.original.n
    least, chance = task.detectable, chance_of(task.task, task.original.condition)
    return of_difference(task.original.value, task.difference.ci, task.p_value, n, least, discordant, chance)


def subject_evidence(task: TaskResult, subject: SubTask) -> Evidence:
    """The same of one of its subjects, where that was tested."""
    m = subject.difference
    if m is None:
        return Evidence(subject.n, few=True)
    chance = chance_of(task.task, task.original.condition)
    return of_difference(subject.original, m.ci, subject.p_value, subject.n, m.detectable or 1.0, chance=chance)


def chance_of(task: str, condition: Mapping[str, Scalar]) -> float:
    """The score of guessing, as it was measured with the task; 0 where a task has no options to guess from."""
    stated = condition.get("chance")
    return stated if isinstance(stated, float) else KNOWN_CHANCE.get(task, 0.0)


def task_verdict(task: TaskResult) -> str:
    """One sentence that a task's numbers support; a verdict of an older version is replaced where they support none."""
    evidence = task_evidence(task)
    text = evidence.shortage("items") if evidence.open else task.verdict
    if task.likelihood is None or evidence.chance is not None:
        return text
    (low, high), value = task.likelihood.ci or (-math.inf, math.inf), task.likelihood.value
    return f"{text}; likelihood of right answers: {value:+.3f} nats per item (95 % CI {low:+.3f} to {high:+.3f})"


def task_loss(task: TaskResult) -> str:
    """How much a task shows to be lost, in points, or else in nats where that is more than `FALL`; empty: none."""
    evidence = task_evidence(task)
    if evidence.sign < 0:
        return f"{100 * abs(task.difference.value):.1f} points"
    high = task.likelihood.ci[1] if task.likelihood and task.likelihood.ci else math.inf
    own = [row.original_likelihood for row in task.rows if row.original_likelihood is not None]
    least = FALL * sum(own) / len(own) if own else 0.0
    if evidence.chance is not None or task.likelihood is None or high >= least:
        return ""
    return f"{-task.likelihood.value:.3f} nats of the likelihood of right answers"


def compare_items(a: Sequence[float], b: Sequence[float]) -> Items:
    """Pair the scores of two arms, at least one each, in the same order."""
    n, means = len(a), (sum(a) / len(a), sum(b) / len(b))
    only_a, only_b = (sum(x > y for x, y in pairs) for pairs in (zip(a, b, strict=True), zip(b, a, strict=True)))
    if _right_or_wrong((*a, *b)):
        both = round(sum(a)) - only_a
        ci, detectable = proportion_difference(only_a, only_b, n), detectable_share(only_a + only_b, n)
        kept, p_value = proportion_ratio(both, only_a, only_b), mcnemar_exact(only_a, only_b)
    else:
        a_N, b_N = (torch.tensor(scores, dtype=torch.float64) for scores in (a, b))
        ci, p_value = bootstrap_ci(b_N - a_N), None
        kept = bootstrap_ratio(a_N, b_N) if means[0] else (math.nan, math.nan)
        detectable = min(1.0, detectable_difference(stdev((b_N - a_N).tolist()), n)) if n > 1 else 1.0
    metric, value = "quantized - original", means[1] - means[0]
    return Items(
        means=means,
        difference=Measurement(metric=metric, value=value, unit="", n=n, ci=ci, detectable=detectable),
        recovery=means[1] / means[0] if means[0] else None,
        recovery_ci=kept if means[0] else None,
        only_a=only_a,
        only_b=only_b,
        p_value=p_value,
    )


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Interval of one arm's mean score: Wilson's for right or wrong, else a bootstrap."""
    if _right_or_wrong(scores):
        return wilson_interval(round(sum(scores)), len(scores))
    return bootstrap_ci(torch.tensor(scores, dtype=torch.float64))


def _right_or_wrong(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)
