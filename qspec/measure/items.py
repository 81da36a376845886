"""Two arms on the same items of a task: the paired difference, what is kept, and what may be concluded from it.

Right or wrong: McNemar's exact test and intervals that keep a width when no item differs. Scored: a bootstrap of pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qspec.numerics.statistics.fidelity import bootstrap_ci, mcnemar_exact, wilson_interval
from qspec.numerics.statistics.paired import (
    bootstrap_ratio,
    detectable_share,
    proportion_difference,
    proportion_ratio,
    shown_sign,
)
from qspec.numerics.statistics.student import detectable_difference, deviation
from qspec.schema.results import Measurement


@dataclass(frozen=True)
class Items:
    """What the items of arms `a` and `b` say. `difference` is b - a, `recovery` b / a (None: a has no score).

    `only_a` / `only_b`: items that one arm did better on. `p_value`: None where items are not right or wrong.
    """

    means: tuple[float, float]
    difference: Measurement
    recovery: float | None
    recovery_ci: tuple[float, float] | None
    only_a: int
    only_b: int
    p_value: float | None

    @property
    def sign(self) -> int:
        """-1: b is shown to be worse, 1: better, 0: neither."""
        return shown_sign(self.difference.ci, self.p_value)

    def verdict(self, arm: str) -> str:
        """What the numbers carry, in one sentence about `b`, which is called `arm`."""
        test = "" if self.p_value is None else f", McNemar p = {self.p_value:.2g}"
        n, least = self.difference.n, self.difference.detectable or 0.0
        if self.sign == 0:
            if least >= 1:
                return f"no difference detected{test}; {n} items can show none"
            seen = f"a drop of {100 * least:.1f} points would have been ({n} items, 80 % power)"
            return f"no difference detected{test}; {seen}"
        word, (low, high) = "better" if self.sign > 0 else "worse", self.difference.ci or (0.0, 0.0)
        size = f"{100 * abs(self.difference.value):.1f} points"
        return f"{arm} is {word} by {size} (95 % CI {100 * low:+.1f} to {100 * high:+.1f}{test})"


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
        ci, kept, p_value = bootstrap_ci(b_N - a_N), bootstrap_ratio(a_N, b_N), None
        detectable = min(1.0, detectable_difference(deviation((b_N - a_N).tolist()), n)) if n > 1 else 1.0
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
