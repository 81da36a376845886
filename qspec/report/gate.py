"""Gates: conditions under which a pair must not pass, and whether noise could explain the outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
import operator
import re

from qspec.errors import RecipeError, SourceError
from qspec.readable import interval, number
from qspec.report.document import Finding
from qspec.report.measured import EVERY, METRICS, Value, measured
from qspec.schema.problems import closest
from qspec.schema.results import Results

MISSED = 3
"""Exit status of a command whose gates were missed."""
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FORM = re.compile(r"\s*(\w+)\s*(?:\[([^\]]+)\])?(?:\.(low|high))?\s*(<=|>=|<|>)\s*(\S+?)(%?)\s*")


@dataclass(frozen=True)
class Gate:
    """Fails if `metric[label].end compare limit`. end: of the interval, empty for the value itself."""

    text: str
    metric: str
    label: str
    end: str
    compare: str
    limit: float


@dataclass(frozen=True)
class GateOutcome:
    """One gate on one value."""

    gate: Gate
    label: str
    value: Value

    @property
    def judged(self) -> float:
        """The number that is compared: the value, or an end of its interval."""
        if not self.gate.end:
            return self.value.value
        low, high = self.value.ci or (-math.inf, math.inf)
        return low if self.gate.end == "low" else high

    @property
    def missed(self) -> bool:
        return COMPARE[self.gate.compare](self.judged, self.gate.limit)

    @property
    def noise(self) -> str:
        """Whether the outcome could be another one in a repetition."""
        if self.value.ci is None:
            return "no interval, so noise cannot be judged"
        low, high = self.value.ci
        could = low <= self.gate.limit <= high
        if self.missed:
            return "noise could explain it" if could else "noise does not explain it"
        return "but noise could hide a miss" if could else "beyond noise"


def parse(text: str) -> Gate:
    """A gate from `metric[label].low<limit`. Raises `RecipeError` for another form or an unknown metric."""
    match = _FORM.fullmatch(text)
    try:
        limit = float(match[5]) / (100 if match[6] else 1) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit):
        fix = "write for example recovery<0.99, alpha[coding]<0.6 or speedup.low<1"
        raise RecipeError(f"--fail-if {text!r}", "is no condition", fix)
    if match[1] not in METRICS:
        fix = f"{closest(match[1], list(METRICS))}use one of: {', '.join(METRICS)}"
        raise RecipeError(f"--fail-if {text!r}", f"asks for {match[1]!r}, which is no metric", fix)
    return Gate(text.strip(), match[1], (match[2] or "").strip(), match[3] or "", match[4], limit)


def judge(gates: Sequence[Gate], results: Results, against: Results | None = None) -> list[GateOutcome]:
    """Every gate on the values that it names. Raises `SourceError` for one that was not measured: that is no pass."""
    return [outcome for gate in gates for outcome in _judge(gate, results, against)]


def _judge(gate: Gate, results: Results, against: Results | None) -> list[GateOutcome]:
    values = measured(results, gate.metric, against)
    named = {label: value for label, value in values.items() if gate.label in ("", label)}
    if not values:
        at_chance = gate.metric == "recovery" and results.accuracy.tasks
        rule = f"{gate.metric} was not measured" + " by a task above chance" * bool(at_chance)
        raise SourceError(f"{results.name}: gate {gate.text}", rule, "measure it, or drop the gate")
    if not named:
        fix = f"{closest(gate.label, list(values))}measured: {', '.join(values)}"
        raise SourceError(f"{results.name}: gate {gate.text}", f"{gate.label!r} was not measured", fix)
    if not gate.label and gate.metric not in EVERY:
        named = dict(list(named.items())[:1])
    return [_known(GateOutcome(gate, label, value), results) for label, value in named.items()]


def _known(outcome: GateOutcome, results: Results) -> GateOutcome:
    """An outcome that asks for an interval's end has one."""
    if outcome.gate.end and outcome.value.ci is None:
        rule = f"{outcome.gate.metric}[{outcome.label}] has no interval"
        fix = f"measure more, or judge the value: drop .{outcome.gate.end}"
        raise SourceError(f"{results.name}: gate {outcome.gate.text}", rule, fix)
    return outcome


def sentence(outcome: GateOutcome, name: str = "") -> Finding:
    """A gate's outcome in one line; `name`: the pair's, where there are several."""
    gate, value = outcome.gate, outcome.value
    which = f"{name}: " if name else ""
    sure = f"95 % CI {interval(value.ci, 4)}, n = {value.n}" if value.ci else f"n = {value.n}"
    text = f"{which}{gate.metric}[{outcome.label}] = {number(value.value, 4)} ({sure}); {outcome.noise}"
    if outcome.missed:
        return Finding("bad", f"{text}; fails if {gate.text}", "missed")
    return Finding("good", f"{text}; would fail if {gate.text}", "met")
