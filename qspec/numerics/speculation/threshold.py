"""Where to stop drafting: the confidence below which a draft token is more likely refused than worth another one."""

from collections.abc import Sequence

MISS_COST = 3.0
"""Price of stopping behind an accepted token; drafting on behind a rejected one is 1 (transformers' choice)."""


def best_threshold(confidences: Sequence[float], hits: Sequence[bool], miss_cost: float = MISS_COST) -> float | None:
    """Threshold of the least `FPR + miss_cost * FNR`, drafting on at or above it; the lowest of equals.

    hits: whether each token was accepted. FPR: share of rejected tokens at or above it; FNR: share of accepted ones
    below. None unless tokens of both kinds were seen.
    """
    good = sum(hits)
    bad = len(hits) - good
    if not good or not bad:
        return None
    best, cost, kept_good, kept_bad = 1.0, miss_cost, 0, 0
    ranked = sorted(zip(confidences, hits, strict=True), reverse=True)
    for i, (confidence, hit) in enumerate(ranked):
        kept_good, kept_bad = kept_good + hit, kept_bad + (not hit)
        if i + 1 < len(ranked) and ranked[i + 1][0] == confidence:
            continue  # equal confidences fall together
        now = kept_bad / bad + miss_cost * (1 - kept_good / good)
        if now <= cost:
            best, cost = confidence, now
    return best
