"""Budgets of a recipe against what was measured: met, missed, undecided, or not measured."""

from qspec.schema.results import Measurement, Results, Speed, TaskResult
from qspec.stages.document import Finding, interval, number, percent, percents


def budget_findings(results: Results) -> list[Finding]:
    """A sentence for every limit that the report can judge (`max_kl`, `min_recovery`, `ttft_s`)."""
    budget = results.recipe.get("budget") or {}
    found: list[Finding] = []
    fidelity, speed = results.accuracy.fidelity, results.speed
    tasks = [task for task in results.accuracy.tasks if task.recovery is not None]
    if (limit := budget.get("max_kl")) is not None:
        name = f"KL budget {number(limit)} nats/token"
        found.append(_missing(name) if fidelity is None else _at_most(name, fidelity.kl, limit))
    if (limit := budget.get("min_recovery")) is not None:
        name = f"recovery budget {percent(limit)}"
        found += [_recovery(name, task, limit) for task in tasks] or [_missing(name)]
    if (limit := budget.get("ttft_s")) is not None:
        name = f"first-token budget {number(limit)} s"
        found.append(_missing(name) if speed is None else _first_token(name, speed, limit))
    return found


def _missing(name: str) -> Finding:
    return Finding("open", f"{name}: not measured")


def _first_token(name: str, speed: Speed, limit: float) -> Finding:
    late = [arm for arm in speed.arms if arm.ttft.median > 1000 * limit]
    if late:
        arms = ", ".join(f"{arm.arm} ({number(arm.ttft.median)} ms)" for arm in late)
        return Finding("bad", f"{name} missed (median): {arms}")
    slowest = max(speed.arms, key=lambda arm: arm.ttft.median)
    text = f"{name} met by every arm; slowest: {slowest.arm}, {number(slowest.ttft.median)} ms (median)"
    return Finding("good", text)


def _recovery(name: str, task: TaskResult, limit: float) -> Finding:
    """Score kept, with its interval."""
    low, high = task.recovery_ci or tuple(1 + end / task.original.value for end in task.difference.ci or (0.0, 0.0))
    numbers = f"{task.task} keeps {percent(task.quantized.value / task.original.value)}"
    numbers += f" (95 % CI {percents((low, high))}, n = {task.original.n})"
    if low >= limit:
        return Finding("good", f"{name} met: {numbers}")
    if high < limit:
        return Finding("bad", f"{name} missed: {numbers}")
    return Finding("open", f"{name} undecided, the interval spans it: {numbers}")


def _at_most(name: str, measured: Measurement, limit: float) -> Finding:
    """Met or missed when the interval says so, else undecided."""
    low, high = measured.ci or (measured.value, measured.value)
    numbers = f"{number(measured.value)} (95 % CI {interval(measured.ci)}, n = {measured.n})"
    if high <= limit:
        return Finding("good", f"{name} met: {numbers}")
    if low > limit:
        return Finding("bad", f"{name} missed: {numbers}")
    return Finding("open", f"{name} undecided, the interval spans it: {numbers}")
