"""Scales of charts: they hold every interval, in decades where values span them, and have round ticks."""

from collections.abc import Iterable
from dataclasses import dataclass
import math

from qspec.readable import Interval

DECADES = 30.0
"""Ratio of the largest to the least value from which on a scale is logarithmic, if all of them are positive."""
REACH = 30.0
"""A linear scale holds intervals up to so many times the spread of the values; longer ones end in an arrow."""


@dataclass(frozen=True)
class Axis:
    """A scale from `low` to `high`. doubling: ticks at powers of two, for lengths and batches."""

    low: float
    high: float
    log: bool = False
    doubling: bool = False

    def share(self, value: float) -> float:
        """Place of a value, from 0 to 1; what lies beyond the scale is placed at its end."""
        if math.isnan(value):
            return 0.0
        if self.log:
            value = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            value = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, value))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, most: int = 6, least: float = 0.0) -> list[float]:
        """Round numbers on the scale, about `most`, at least `least` apart where it is linear."""
        if not self.log or (not self.doubling and self.high / self.low < 5):
            return linear_ticks(self.low, self.high, least, most)
        factors = (1.0,) if self.doubling or self.high / self.low > 10.0 ** (most / 2) else (1.0, 2.0, 5.0)
        base = 2.0 if self.doubling else 10.0
        first, last = math.floor(math.log(self.low, base)), math.ceil(math.log(self.high, base))
        found = [base**i * factor for i in range(first, last + 1) for factor in factors]
        found = [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
        return found[:: max(1, math.ceil(len(found) / most))] or [self.low]


def axis_over(
    values: Iterable[tuple[float, Interval]],
    marks: Iterable[float] = (),
    *,
    log: bool | None = None,
    zero: bool = False,
) -> Axis:
    """The scale of values with their intervals, and of reference lines.

    log: None: where they span decades. zero: it begins at 0, as bars do, or below.
    """
    listed = list(values)
    centres = [value for value, _ in listed if math.isfinite(value)] + list(marks)
    centres = centres or [0.0, 1.0]
    ends = [end for _, ci in listed for end in ci or () if math.isfinite(end)]
    least, most = min(*centres, *centres, *ends), max(*centres, *centres, *ends)
    if log or (log is None and not zero and least > 0 and most / least > DECADES):
        room = max(1.1, (most / least) ** 0.06)
        return Axis(least / room, most * room, log=True, doubling=bool(log))
    return _linear(centres, ends, zero)


def linear_ticks(low: float, high: float, least: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart, at least `least`) between the ends."""
    rough = max(least, (high - low) / most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """A tick as it is written: 0.001, 12,000, 2e6."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    return f"{value:.3g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


def _linear(centres: list[float], ends: list[float], zero: bool) -> Axis:
    low, high = min(centres), max(centres)
    spread = max(high - low, 0.5 * abs(low), 0.5 * abs(high)) or 1.0
    held = [end for end in ends if low - REACH * spread <= end <= high + REACH * spread]
    low, high = min(low, *held, low), max(high, *held, high)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    if zero or 0 <= low < 0.4 * high:
        return Axis(min(0.0, low - room if low < 0 else 0.0), high + room)
    return Axis(low - room, high + room)
