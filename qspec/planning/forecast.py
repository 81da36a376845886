"""Speedups that speculation may reach on a device: floors from bytes and operations, before any measurement.

Acceptance, and what drafts cost that read no weights, are those that such drafts had where they were measured, else
assumed; the benchmark measures them here. Formulas: `numerics.roofline`, `numerics.speculation.speedup`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
import json
from typing import Any

from qspec.eval_files import eval_dir
from qspec.numerics.roofline import PassCost, Rates, break_even, bytes_moved, pass_seconds
from qspec.numerics.speculation.speedup import expected_tokens
from qspec.plan import LayerScheme
from qspec.schema.devices import DeviceSheet

ALPHAS = (0.6, 0.7, 0.8)
CONTEXT = 1024
BATCHES = tuple(sorted({round(2 ** (i / 4)) for i in range(49)}))
"""1 … 4096, four to an octave."""


BASELINE = "eval/baselines/spec_bench.json"
"""Drafts that were measured, on one CPU: what each kind is assumed to do elsewhere."""


@dataclass(frozen=True)
class Prior:
    """Assumptions about drafts before they are measured, in units of a target step.

    alphas: acceptance of a draft token; several where none was measured. share: of steps in which anything is drafted;
    idle: what a look that finds nothing costs; c: a draft token's cost, of drafts without weights all of it; row: what
    each further row adds to a pass, where no data sheet tells. source: where that is from, in words.
    """

    alphas: tuple[float, ...] = ALPHAS
    share: float = 1.0
    idle: float = 0.0
    c: float = 0.0
    row: float = 0.0
    source: str = "acceptance is assumed, no draft of this kind was measured"


def prior(drafter: str, policy: str) -> Prior:
    """The prior of drafts under a draft-length policy, from the largest measurement of `drafter` (its name there).

    Without one acceptance is assumed; rows cost what they did there.
    """
    rows, cpu = _measured()
    kind = "optimal" if policy == "optimal" else "fixed"
    own = [row for row in rows if row["drafter"] == drafter and row["policy"].startswith(kind)]
    if not own:
        return Prior(row=_row_cost(max(rows, key=lambda row: row["n"])))
    most = max(own, key=lambda row: row["n"])
    origin = f"as {drafter} drafts ({most['policy']}) had on {most['n']} Spec-Bench prompts, {most['model']} on {cpu}"
    return Prior(
        alphas=(round(most["alpha"], 2),),
        share=1 - most["idle_share"],
        idle=most["idle_cost"],
        c=most["c"],
        row=_row_cost(most),
        source=f"{origin}: {most['speedup']:.2f}x there ({BASELINE})",
    )


@cache
def _measured() -> tuple[list[dict[str, Any]], str]:
    """Rows over all categories, greedy, and the CPU's name."""
    data = json.loads((eval_dir() / "baselines/spec_bench.json").read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if row["category"] == "all" and row["temperature"] == 0]
    return rows, str(data["environment"]["cpu"])


def _row_cost(row: Mapping[str, Any]) -> float:
    """The cost of a further row of a pass: the rest of a step's cost beside drafting and looks that drafted nothing."""
    share = 1 - row["idle_share"]
    drafted, step = row["drafted_per_step"] / share, row["tokens_per_step"] / row["speedup"]
    verified = (step - row["idle_share"] * (1 + row["idle_cost"])) / share - drafted * row["c"]
    return max(0.0, float(verified - 1) / float(drafted))


@dataclass(frozen=True)
class Duo:
    """Costs and rates of both halves, and the largest batch that memory holds at `CONTEXT` tokens each.

    draft None: it has no weights; rates None: the device has no data sheet. prior: of the draft.
    """

    target: PassCost
    draft: PassCost | None
    target_rates: Rates | None
    draft_rates: Rates | None
    max_batch: int = 4096
    prior: Prior = Prior()

    def cost_ratio(self, batch: int = 1) -> float:
        """c: a draft step over a target step. Without rates: bytes moved over bytes moved, or what was measured."""
        if self.draft is None:
            return self.prior.c
        draft, target = (
            bytes_moved(cost, batch, CONTEXT) if at is None else pass_seconds(cost, at, batch, CONTEXT, 1)
            for cost, at in ((self.draft, self.draft_rates), (self.target, self.target_rates))
        )
        return draft / target if self.target_rates is not None else max(draft / target, self.prior.c)

    def verify_cost(self, batch: int = 1) -> Callable[[int], float]:
        """Rows to time of a target pass over the time of one row. Without rates: as the prior has it."""
        cost, at = self.target, self.target_rates
        if at is None:
            return lambda rows: 1 + self.prior.row * (rows - 1)
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
    tokens, seconds = _tokens(duo, alpha), _seconds(duo)
    best = _best(duo, max_gamma, alpha)
    return Gain(
        alpha=alpha,
        gamma=gamma,
        tokens_per_step=tokens(gamma),
        speedup=tokens(gamma) / seconds(gamma),
        best_gamma=best,
        best_speedup=tokens(best) / seconds(best),
        stops_paying_at_batch=_stops_paying(duo, max_gamma, alpha),
    )


def _tokens(duo: Duo, alpha: float) -> Callable[[int], float]:
    """Draft length to tokens per step."""
    return lambda gamma: 1 + duo.prior.share * (expected_tokens(alpha, gamma) - 1)


def _seconds(duo: Duo, batch: int = 1) -> Callable[[int], float]:
    """Draft length to a step's time over plain decoding's; at 0 nothing is looked for."""
    c, verify, prior = duo.cost_ratio(batch), duo.verify_cost(batch), duo.prior
    idle = (1 - prior.share) * (1 + prior.idle)
    return lambda gamma: idle + prior.share * (gamma * c + verify(gamma + 1)) if gamma else 1.0


def _best(duo: Duo, max_gamma: int, alpha: float, batch: int = 1) -> int:
    """The draft length of the largest speedup, the shortest of equals; 0: plain decoding is fastest."""
    tokens, seconds = _tokens(duo, alpha), _seconds(duo, batch)
    return max(range(max_gamma + 1), key=lambda gamma: tokens(gamma) / seconds(gamma))


def _stops_paying(duo: Duo, max_gamma: int, alpha: float) -> int | None:
    if duo.target_rates is None:
        return None
    best = [(batch, _best(duo, max_gamma, alpha, batch)) for batch in BATCHES if batch <= duo.max_batch]
    return break_even([(batch, gamma > 0) for batch, gamma in best])
