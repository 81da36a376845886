"""The answer of a report at a glance: one or two sentences, and the numbers that carry them."""

import math

from qspec.numerics.statistics.paired import shown_sign
from qspec.readable import interval, number, percent, percents, size, times
from qspec.report.arms import drafting, over_first, pair_arm, target_arm
from qspec.report.document import Tile, Tiles, Tone
from qspec.report.verdict import TONES, budget_findings, lossless, losslessness
from qspec.schema.results import Measurement, Ratio, Results, Speed, TaskResult

COARSE = 0.05
"""Drop of a score from which a test that could not have shown less is called coarse."""


def lead(results: Results) -> str:
    """What to do with the pair, in the order of importance."""
    parts = [*_broken(results), *_speed(results.speed), *_accuracy(results), *_drafting(results.speed)]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _broken(results: Results) -> list[str]:
    changed = [f for f in (losslessness(results.speed) if results.speed else []) if f.tone == "bad"]
    missed = [f.text.partition(" missed")[0] for f in budget_findings(results) if f.tone == "bad"]
    found = ["drafting changes the output"] if changed else []
    return [*found, *([f"missed: {', '.join(missed)}"] if missed else [])]


def _speed(speed: Speed | None) -> list[str]:
    ratio = speed and best_ratio(speed)
    if not ratio:
        return []
    sign, numbers = _sign(ratio.speedup), f"{times(ratio.speedup.value)} the speed of {ratio.baseline}"
    shown = {1: "", -1: "", 0: ", no difference shown"}[sign]
    return [f"{ratio.arm} decodes at {numbers}{shown}"]


def _accuracy(results: Results) -> list[str]:
    tasks, fidelity = results.accuracy.tasks, results.accuracy.fidelity
    lost = [task for task in tasks if shown_sign(task.difference.ci, task.p_value) < 0]
    if lost:
        return [f"{lost[0].task} loses {100 * abs(lost[0].difference.value):.1f} points"]
    if tasks:
        least = min(task.detectable for task in tasks)
        if least >= 1:
            return [f"accuracy was hardly tested: {tasks[0].original.n} items can show no loss"]
        if least > COARSE:
            return [f"accuracy was tested coarsely: only a drop of {100 * least:.0f} points or more would have shown"]
        return [f"no loss of accuracy is shown; a drop of {100 * least:.1f} points would have been"]
    if fidelity is None:
        return ["accuracy was not measured"]
    agree = percent(fidelity.top1_agreement.value)
    return [f"no task was asked; it names the original's most likely token at {agree} of the positions"]


def _drafting(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    found: list[str] = []
    ratios = [ratio for ratio in drafting(speed) if ratio.baseline == target_arm(speed)]
    for ratio in (r for r in ratios if r.temperature == speed.arms[0].temperature):
        word = {1: "pays", 0: "shows no gain", -1: "does not pay"}[_sign(ratio.speedup)]
        found.append(f"{ratio.arm} {word} ({times(ratio.speedup.value)})")
    return [", ".join(found)] if found else []


def _sign(speedup: Measurement) -> int:
    low, high = (speedup.ci if speedup.n > 1 else None) or (0.0, math.inf)
    return shown_sign((low - 1, high - 1), None)


def best_ratio(speed: Speed) -> Ratio | None:
    """The fastest arm over the first plain one, at the first temperature; None where nothing else was timed."""
    found = [r for r in over_first(speed) if r.temperature == speed.arms[0].temperature] if speed.arms else []
    return max(found, key=lambda ratio: ratio.speedup.value, default=None)


def tiles(results: Results) -> Tiles:
    """What a reader looks for first."""
    found = [_recovery(task) for task in results.accuracy.tasks if task.recovery is not None][:1]
    fidelity, speed = results.accuracy.fidelity, results.speed
    if fidelity is not None:
        kl = fidelity.kl
        note = f"95 % CI {interval(kl.ci, 2)} nats/token, {kl.n} windows"
        found.append(Tile("KL to the original", number(kl.value), note))
    if speed is not None:
        found += _speed_tiles(speed)
    return Tiles("At a glance", tuple(found))


def _recovery(task: TaskResult) -> Tile:
    tone = TONES[shown_sign(task.difference.ci, task.p_value)]
    least = f"; {100 * task.detectable:.1f} points would have shown" if task.detectable < 1 else "; too few to judge"
    note = f"95 % CI {percents(task.recovery_ci)}, {task.original.n} items{least}"
    return Tile(f"{task.task} score kept", percent(task.recovery or 0.0), note, tone)


def _speed_tiles(speed: Speed) -> list[Tile]:
    found: list[Tile] = []
    ratio, own = best_ratio(speed), pair_arm(speed)
    if ratio is not None:
        found.append(_ratio_tile(f"{ratio.arm} over {ratio.baseline}", ratio))
    found += [_ratio_tile(f"{r.arm} over {r.baseline}", r) for r in drafting(speed) if r.arm == own][:1]
    for a in [a for a in speed.acceptance if (a.category, a.arm) == ("all", own)][:1]:
        note = f"95 % CI {interval(a.alpha.ci, 2) or 'none'}, {number(a.tokens_per_step)} tokens a step"
        found.append(Tile(f"Acceptance α, {a.arm}", number(a.alpha.value), note))
    if speed.equality:
        equal, n = sum(e.equal for e in speed.equality), sum(e.n for e in speed.equality)
        tone: Tone = "good" if all(lossless(e).tone == "good" for e in speed.equality) else "bad"
        found.append(Tile("Same greedy answers", f"{equal} of {n}", "token for token, with drafts and without", tone))
    first, last = speed.arms[0], next(arm for arm in speed.arms if arm.arm == target_arm(speed))
    if last.weight_bytes and first.weight_bytes:
        kept = f"{percent(last.weight_bytes / first.weight_bytes, 0)} of {size(first.weight_bytes)}"
        found.append(Tile("Weights a pass reads", size(last.weight_bytes), kept))
    return found


def _ratio_tile(label: str, ratio: Ratio) -> Tile:
    note = f"95 % CI {interval(ratio.speedup.ci) or 'none'}, {ratio.speedup.n} prompts"
    return Tile(label, times(ratio.speedup.value), note, TONES[_sign(ratio.speedup)])
