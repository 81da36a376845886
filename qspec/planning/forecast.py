"""What speculation may gain on a device: floors from bytes and operations, before any measurement.

Acceptance is assumed here and measured by the benchmark; formulas: `numerics.roofline`,
`numerics.speculation.speedup`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qspec.numerics.roofline import PassCost, Rates, break_even, bytes_moved, pass_seconds
from qspec.numerics.speculation.speedup import expected_tokens, optimal_gamma, walltime_speedup
from qspec.plan import LayerScheme
from qspec.schema.devices import DeviceSheet

ALPHAS = (0.6, 0.7, 0.8)
CONTEXT = 1024
BATCHES = tuple(sorted({round(2 ** (i / 4)) for i in range(49)}))
"""1 … 4096, four to an octave."""


@dataclass(frozen=True)
class Duo:
    """Costs and rates of both halves, and the largest batch that memory holds at `CONTEXT` tokens each.

    draft None: drafting is free; rates None: the device has no data sheet.
    """

    target: PassCost
    draft: PassCost | None
    target_rates: Rates | None
    draft_rates: Rates | None
    max_batch: int = 4096

    def cost_ratio(self, batch: int = 1) -> float:
        """c: a draft step over a target step. Without rates: bytes moved over bytes moved."""
        if self.draft is None:
            return 0.0
        draft, target = (
            bytes_moved(cost, batch, CONTEXT) if at is None else pass_seconds(cost, at, batch, CONTEXT, 1)
            for cost, at in ((self.draft, self.draft_rates), (self.target, self.target_rates))
        )
        return draft / target

    def verify_cost(self, batch: int = 1) -> Callable[[int], float]:
        """Rows to time of a target pass over the time of one row. Without rates: 1, as if more rows were free."""
        cost, at = self.target, self.target_rates
        if at is None:
            return lambda rows: 1.0
        one = pass_seconds(cost, at, batch, CONTEXT, 1)
        return lambda rows: pass_seconds(cost, at, batch, CONTEXT, rows) / one


@dataclass(frozen=True)
class Gain:
    """Prediction at one assumed acceptance, batch 1. `gamma`: the recipe's; `best_gamma` 0: do not speculate.

    stops_paying_at_batch: from this batch size on plain decoding is faster; None: unknown, or not up to `max_batch`.
    """

    alpha: float
    gamma: int
    tokens_per_step: float
    speedup: float
    best_gamma: int
    best_speedup: float
    stops_paying_at_batch: int | None


def rates(sheet: DeviceSheet, schemes: Mapping[str, LayerScheme | None]) -> Rates | None:
    """Rates of a device for the activation format of most layers; None where the sheet has no bandwidth."""
    if sheet.bandwidth_tb_s is None or sheet.bf16_tflops is None:
        return None
    formats = [s.activation.fmt.name if s and s.activation else "float" for s in schemes.values()]
    most = max(dict.fromkeys(formats), key=formats.count, default="float")
    matmul = {"int8": sheet.int8_tflops, "fp8_e4m3": sheet.fp8_tflops}.get(most) or sheet.bf16_tflops
    return Rates(sheet.bandwidth_tb_s * 1e12, matmul * 1e12, sheet.bf16_tflops * 1e12)


def gain(duo: Duo, gamma: int, max_gamma: int, alpha: float) -> Gain:
    """Speedup over plain decoding of the same quantized target, at the recipe's and at the best draft length."""
    c, verify = duo.cost_ratio(), duo.verify_cost()
    best = optimal_gamma(alpha, c, max_gamma, verify)
    return Gain(
        alpha=alpha,
        gamma=gamma,
        tokens_per_step=expected_tokens(alpha, gamma),
        speedup=walltime_speedup(alpha, gamma, c, verify(gamma + 1)),
        best_gamma=best,
        best_speedup=walltime_speedup(alpha, best, c, verify(best + 1)),
        stops_paying_at_batch=_stops_paying(duo, max_gamma, alpha),
    )


def _stops_paying(duo: Duo, max_gamma: int, alpha: float) -> int | None:
    if duo.target_rates is None:
        return None
    best = [
        (b, optimal_gamma(alpha, duo.cost_ratio(b), max_gamma, duo.verify_cost(b)))
        for b in BATCHES
        if b <= duo.max_batch
    ]
    return break_even([(batch, gamma > 0) for batch, gamma in best])
