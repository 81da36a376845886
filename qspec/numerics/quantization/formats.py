"""Number formats are data: a name, a width, the largest magnitudes, and how codes are stored."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumFormat:
    """One storage format for quantized values.

    `qmin`/`qmax` bound the representable code values (for floats: the largest finite magnitudes).
    """

    name: str
    bits: int
    is_float: bool
    qmin: float
    qmax: float
    storage: torch.dtype


INT4 = NumFormat("int4", 4, False, -8, 7, torch.int8)
INT8 = NumFormat("int8", 8, False, -128, 127, torch.int8)
FP8_E4M3 = NumFormat("fp8_e4m3", 8, True, -448.0, 448.0, torch.float8_e4m3fn)

FORMATS = {f.name: f for f in (INT4, INT8, FP8_E4M3)}

SCALE_FLOOR = 1.0 / (448.0 * 512.0)
"""Smallest scale ever exported: below it, FP8 serving kernels underflow (vLLM uses the same floor)."""
SCALE_CEILING = 2.0**16
"""Largest scale that is read or exported: what is above no model has, and sums of such products overflow."""
HALF_FLOOR = 74 * 2.0**-24
"""The float16 next above `SCALE_FLOOR`."""
