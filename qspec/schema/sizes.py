"""Sizes as people write them: `200MB`, `2 GiB`, `1.5e9`."""

import re

from qspec.errors import RecipeError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for base, unit in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, what: str) -> int:
    """Bytes; MB is 10^6, MiB 2^20. `what` names the value in the `RecipeError` for anything else."""
    found = _SIZE.fullmatch(str(text))
    count = float(found[1]) * _UNITS.get(found[2].lower(), 0) if found else 0.0
    if not 0.5 < count < 2**63:
        raise RecipeError(f"{what} {text!r}", "is no size in memory", "give a number and a unit: 200MB, 2GiB")
    return round(count)
