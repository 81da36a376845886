"""Range of a block before its scale: maximum, percentile of |x|, or the clip of least squared error."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Clip:
    """How the range of a block is chosen before its scale.

    `percentile` (of |x|, in percent) is read by the method of that name only.
    """

    method: Literal["absmax", "percentile", "mse"] = "absmax"
    percentile: float = 99.9
