"""Who is who among the arms of a benchmark: the first plain one, the target, the pair itself, and the fastest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qspec.numerics.statistics.evidence import Evidence, of_ratio
from qspec.numerics.statistics.paired import geometric_mean
from qspec.schema.results import Acceptance, ArmSpeed, Equality, Ratio, Speed

FEWEST = 4
"""Prompts from which the fastest arm is named: two to choose it by, two to judge it by."""
BROUGHT = 0.01
"""Tokens that drafts must add to a step before a speed can be theirs."""


Row = TypeVar("Row", ArmSpeed, Ratio, Equality)


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


def idle_drafts(speed: Speed, arm: str, temperature: float) -> Acceptance | None:
    """How an arm's drafts fared if they brought nothing, so that no speed is theirs; else None, and of plain arms."""
    pooled = [a for a in speed.acceptance if (a.arm, a.temperature, a.category) == (arm, temperature, "all")]
    return next((a for a in pooled if a.tokens_per_step < 1 + BROUGHT), None)


def did_nothing(a: Acceptance) -> str:
    """Idle drafts' counts, in words."""
    return f"its drafts did nothing ({a.accepted:,} of {a.drafted:,} accepted in {a.steps:,} steps)"


def gain(ratio: Ratio) -> Evidence:
    """The evidence for a ratio from its prompts."""
    return of_ratio(ratio.speedup.ci, ratio.speedup.n)


@dataclass(frozen=True)
class Fastest:
    """The fastest arm by every other prompt, `chosen_on` of them, and on the others its speed over the pair's.

    Chosen and reported on the same prompts, the luckiest of several arms would look faster than it is.
    """

    arm: str
    chosen_on: int
    value: float
    over_pair: Evidence


def fastest(speed: Speed, temperature: float) -> Fastest | None:
    """The arm to use at a temperature; None of a single arm, or of less than `FEWEST` prompts that all arms answered.

    Arms whose drafts did nothing are left out: the plain arm of their target stands for them.
    """
    speedups = {
        r.arm: _by_prompt(r) for r in speed.ratios if (r.baseline, r.temperature) == (speed.arms[0].arm, temperature)
    }
    prompts = {prompt for values in speedups.values() for prompt in values}
    own, every = pair_arm(speed), {speed.arms[0].arm: dict.fromkeys(prompts, 1.0)} | speedups
    shared = sorted(set.intersection(*(set(values) for values in every.values())))
    arms = [arm for arm in every if arm == own or idle_drafts(speed, arm, temperature) is None]
    if len(arms) < 2 or len(shared) < FEWEST or own not in every:
        return None
    choosing, judging = shared[::2], shared[1::2]
    best = max(arms, key=lambda arm: geometric_mean([every[arm][prompt] for prompt in choosing])[0])
    value, ci = geometric_mean([every[best][prompt] / every[own][prompt] for prompt in judging])
    return Fastest(best, len(choosing), value, of_ratio(ci, len(judging)))


def _by_prompt(ratio: Ratio) -> Mapping[int, float]:
    return dict(zip(ratio.prompts or range(len(ratio.per_prompt)), ratio.per_prompt, strict=True))
