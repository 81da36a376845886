"""Numbers as people read and write them: digits, units, intervals, sizes."""

import math
import re

from qspec.errors import RecipeError

Interval = tuple[float, float] | None
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for base, unit in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


class Numeral(str):
    """The text of a number, which remembers the number: what tables sort by, and what files of data hold."""

    value: float

    def __new__(cls, text: str, value: float) -> "Numeral":
        made = super().__new__(cls, text)
        made.value = value
        return made


class Range(str):
    """The text of an interval, which remembers its ends."""

    ends: tuple[float, float]

    def __new__(cls, text: str, ends: tuple[float, float]) -> "Range":
        made = super().__new__(cls, text)
        made.ends = ends
        return made


def number(value: float, digits: int = 3) -> Numeral:
    """`digits` significant digits without an exponent where that is readable: 1.42, 0.00034, 12,345, –, ∞."""
    return Numeral(_digits(value, digits), value)


def _digits(value: float, digits: int) -> str:
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(share: float, digits: int = 1) -> Numeral:
    return Numeral("–" if math.isnan(share) else f"{100 * share:.{digits}f} %", share)


def times(ratio: float) -> Numeral:
    return Numeral(f"{number(ratio)}×", ratio)


def count(items: int) -> Numeral:
    return Numeral(f"{items:,}", items)


def interval(ci: Interval, digits: int = 3) -> str:
    """`1.30 to 1.55`, or nothing."""
    return "" if ci is None else Range(f"{number(ci[0], digits)} to {number(ci[1], digits)}", ci)


def percents(ci: Interval) -> str:
    """`97.1 % to 99.8 %`, or nothing."""
    return "" if ci is None else Range(f"{percent(ci[0])} to {percent(ci[1])}", ci)


def size(amount: float) -> Numeral:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return Numeral(f"{number(amount / scale)} {unit}", amount)
    return Numeral(f"{number(amount)} B", amount)


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, whichever reads best."""
    for unit, scale in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"


def parse_bytes(text: str | int, what: str) -> int:
    """Bytes; MB is 10^6, MiB 2^20. `what` names the value in the `RecipeError` for anything else."""
    match = _SIZE.fullmatch(str(text))
    count = float(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0.0
    if not 0.5 < count < 2**63:
        raise RecipeError(f"{what} {text!r}", "is no size in memory", "give a number and a unit: 200MB, 2GiB")
    return round(count)
