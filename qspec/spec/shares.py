"""Whose seconds those of a shared pass are."""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

RECENT = 32
"""Passes that the seconds of a further row are estimated from."""


class PassShares:
    """Splits passes over the rows of several requests: what drafts add is theirs who drafted, the rest is everyone's.

    Shared out evenly, a draft would cost its request one n-th of what it costs the batch, and each would draft at the
    others' expense. What a row adds is the slope of a line through recent passes: at least nothing, at most the mean of
    a pass's rows; nothing before passes differ in rows.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def of(self, seconds: float, rows: Sequence[int]) -> list[float]:
        """Seconds of each request, by its rows in a pass; they add up."""
        total, requests = sum(rows), len(rows)
        self._passes.append((total, seconds))
        row = min(max(0.0, self._slope()), seconds / total)
        everyones = (seconds - row * (total - requests)) / requests
        return [everyones + row * (own - 1) for own in rows]

    def _slope(self) -> float:
        rows, seconds = zip(*self._passes, strict=True)
        mean_rows, mean_seconds = fmean(rows), fmean(seconds)
        over = sum((r - mean_rows) * (s - mean_seconds) for r, s in self._passes)
        under = sum((r - mean_rows) ** 2 for r in rows)
        return over / under if under else 0.0
