"""Evidence of a measured effect: the effect is shown, it is not, or too few values were measured to say anything.

Every report asks here before it names a gain, a loss or an interval.
"""

from dataclasses import dataclass
import math

from scipy import special

from qspec.numerics.statistics.paired import pairs_needed, shown_sign
from qspec.numerics.statistics.student import detectable_difference, quantile, values_needed

USEFUL = 2.0
"""Factor either way up to which an interval of a ratio says something that does not exclude 1."""
WIDE = 0.5
"""Width up to which an interval of a share says something."""
CHANGE, DROP = 0.10, 0.05
"""Effects that `Evidence.needed` is for: of a ratio, and of a score (which may be lower than that above chance)."""
GUESSED = 0.05
"""Chance of guessing as well as a score, from which the score is said to be at chance."""


@dataclass(frozen=True)
class Evidence:
    """Evidence that `n` values give of an effect.

    sign: 1 above no effect, -1 below, 0 not shown. ci: 95 % interval, None where it says nothing. detectable: smallest
    true effect that is shown in 4 of 5 repetitions, None where that is larger than what the quantity could do.
    few: so many values say nothing at all; needed: about how many would show `effect`, None where that is unknown.
    chance: the score of guessing, where the original's is no better, so that nothing can be lost.
    """

    n: int
    sign: int = 0
    ci: tuple[float, float] | None = None
    detectable: float | None = None
    few: bool = False
    needed: int | None = None
    effect: float = CHANGE
    chance: float | None = None

    @property
    def open(self) -> bool:
        """Whether values of this kind and number can say nothing."""
        return self.few or self.chance is not None

    @property
    def brief(self) -> str:
        """`shortage` for a cell of a table."""
        if self.chance is not None:
            return "at chance" if self.chance else "none right"
        return f"too few: {self.n}" if self.needed is None else f"too few: {self.n}, about {self.needed:,} needed"

    def shortage(self, values: str) -> str:
        """Why nothing is said, of values that are called `values` (prompts, items)."""
        if self.chance:
            guessed = f"by guessing ({100 * self.chance:.3g} %)"
            return f"at chance: {self.n} {values} are not answered better than {guessed}, so they can show no loss"
        if self.chance is not None:
            return f"the original is right in none of {self.n} {values}, so they can show no loss"
        if self.needed is None:
            return f"too few {values} to say: {self.n}"
        return (
            f"too few {values} to say: {self.n}, need about {self.needed:,}"
            f" (estimated from their spread, for an effect of {100 * self.effect:.2g} %)"
        )


def useful(ci: tuple[float, float] | None) -> bool:
    """Whether an interval of a positive quantity says something by itself: `USEFUL` times its middle, either way."""
    return ci is not None and 0 < ci[0] <= ci[1] <= USEFUL**2 * ci[0]


def of_ratio(ci: tuple[float, float] | None, n: int) -> Evidence:
    """Evidence of a ratio whose interval is Student's t over the logarithms of `n` ratios; no effect is 1."""
    if ci is None or n < 2 or not 0 < ci[0] <= ci[1] < math.inf:
        return Evidence(n, few=True)
    low, high = ci
    sign, half = shown_sign((low - 1, high - 1), None), math.log(high / low) / 2
    spread = half * math.sqrt(n) / quantile(0.975, n - 1)
    if useful(ci):
        return Evidence(n, sign, ci, math.expm1(detectable_difference(spread, n)))
    if sign:
        return Evidence(n, sign, ci)
    return Evidence(n, few=True, needed=values_needed(spread, math.log1p(CHANGE)))


def of_share(ci: tuple[float, float] | None, n: int) -> Evidence:
    """Evidence of a share whose interval is over `n` prompts; it says nothing where it is wider than `WIDE`."""
    if ci is None or n < 2:
        return Evidence(n, few=True)
    half = (ci[1] - ci[0]) / 2
    if 2 * half <= WIDE:
        return Evidence(n, ci=ci)
    spread = half * math.sqrt(n) / quantile(0.975, n - 1)
    return Evidence(n, few=True, needed=values_needed(spread, CHANGE))


def of_difference(
    score: float,
    ci: tuple[float, float] | None,
    p_value: float | None,
    n: int,
    detectable: float,
    discordant: int | None = None,
    chance: float = 0.0,
) -> Evidence:
    """Evidence of a difference from the original's `score` over `n` items, paired.

    p_value: None where items are not right or wrong; discordant: items that one arm alone got right, where known;
    chance: the score of guessing. Nothing below it can be lost, so items that show no smaller loss are too few.
    """
    if p_value is not None and special.bdtrc(round(score * n) - 1, n, chance) >= GUESSED:
        return Evidence(n, chance=chance)
    sign, room = shown_sign(ci, p_value), score - (0.0 if p_value is None else chance)
    if sign or detectable < room:
        return Evidence(n, sign, ci, detectable)
    effect = min(DROP, room / 2)
    if discordant is not None:
        needed = pairs_needed(discordant, n, effect)
    else:
        needed = math.ceil(n * (detectable / effect) ** 2)
    return Evidence(n, few=True, needed=needed, effect=effect)
