"""Who is who among the arms of a benchmark: the first plain one, the target, and the pair itself."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from qspec.schema.results import Ratio, Speed


class OfArm(Protocol):
    """A row of results that belongs to an arm."""

    @property
    def arm(self) -> str: ...


Row = TypeVar("Row", bound=OfArm)


def at(temperature: float) -> str:
    """Where a temperature is worth a word."""
    return f" at temperature {temperature:g}" if temperature else ""


def plain_of(speed: Speed) -> dict[str, str]:
    """The plain arm of the same target, of every arm that drafts."""
    return {p.arm: p.baseline for p in speed.predictions} | {e.arm: e.baseline for e in speed.equality}


def target_arm(speed: Speed) -> str:
    """The last plain arm: the quantized target, where there is one."""
    plain = [arm.arm for arm in speed.arms if not arm.speculative]
    return (plain or [arm.arm for arm in speed.arms])[-1]


def pair_arm(speed: Speed) -> str:
    """The arm that is the pair itself: the first that drafts over the target; the target if none does."""
    plain, target = plain_of(speed), target_arm(speed)
    return next((arm.arm for arm in speed.arms if plain.get(arm.arm) == target), target)


def pair_first(speed: Speed, rows: Sequence[Row]) -> list[Row]:
    """Rows in their order, but those of the pair itself in front."""
    own = pair_arm(speed)
    return sorted(rows, key=lambda row: row.arm != own)


def drafting(speed: Speed) -> list[Ratio]:
    """Arms that draft against the same target without."""
    plain = plain_of(speed)
    return [ratio for ratio in speed.ratios if plain.get(ratio.arm) == ratio.baseline]


def over_first(speed: Speed) -> list[Ratio]:
    """Arms of other targets against the first plain arm, the original."""
    plain, first = plain_of(speed), speed.arms[0].arm
    return [r for r in speed.ratios if r.baseline == first and plain.get(r.arm) != first]
