"""What the numbers carry, in sentences: budgets met or missed, faster or slower, lossless or not."""

import math

from qspec.numerics.paired import shown_sign
from qspec.schema.results import Equality, Measurement, Ratio, Results, Speed, TaskResult
from qspec.stages.document import Finding, Tone, interval, number, percent
from qspec.stages.prove import CERTAIN

MANY_CUT = 0.2
"""Share of truncated answers from which a score is called weak evidence."""


def findings(results: Results) -> list[Finding]:
    """The verdict, most important first: losslessness, accuracy, speed, whether to speculate, budgets."""
    found: list[Finding] = []
    if results.speed is not None:
        found += losslessness(results.speed)
    found += [_task(task) for task in results.accuracy.tasks]
    if results.speed is not None:
        found += [_faster(ratio) for ratio in results.speed.ratios]
        found += [*_advice(results.speed), *_batch_advice(results.speed), *_fastest(results.speed)]
    return [*found, *_budgets(results)] or [Finding("plain", "nothing was measured")]


def blockers(results: Results) -> list[str]:
    """What speaks against giving a pair to others: drafts that change the output, and budgets that were missed."""
    told = losslessness(results.speed) if results.speed else []
    return [finding.text for finding in [*told, *_budgets(results)] if finding.tone == "bad"]


def losslessness(speed: Speed) -> list[Finding]:
    """Greedy answers token for token, then the law of sampled ones."""
    found = [_lossless(equality) for equality in speed.equality]
    law = speed.marginals
    if law is None:
        return found
    n = f"{law.samples} texts of {law.positions} tokens behind each of {law.prompts} prompts, with drafts and without"
    if law.p_value < CERTAIN:
        text = f"sampled texts with drafts follow another law than without: p = {law.p_value:.3g} ({n})"
        return [*found, Finding("bad", text)]
    text = f"sampled texts: no difference detected between drafts and none, permutation p = {law.p_value:.2g} ({n})"
    return [*found, Finding("good", text)]


def _lossless(equality: Equality) -> Finding:
    same = f"{equality.arm}: {equality.equal} of {equality.n} greedy answers equal those of {equality.baseline}"
    if not equality.mismatches:
        return Finding("good", f"{same} token for token")
    ties = sum(m.near_tie for m in equality.mismatches)
    if equality.lossless:
        margin = number(max(m.margin for m in equality.mismatches))
        return Finding("good", f"{same}; the other {ties} part at near ties (logit gap at most {margin})")
    wrong = len(equality.mismatches) - ties
    return Finding("bad", f"{same}; {wrong} part where no near tie explains it: speculation is not lossless here")


def _task(task: TaskResult) -> Finding:
    tones: dict[int, Tone] = {1: "good", 0: "open", -1: "bad"}
    sign = shown_sign(task.difference.ci, task.p_value)
    cut = max(task.original_cut, task.quantized_cut)
    caution = f"; {percent(cut)} of the answers were cut at the token limit, so the score says little" * (
        cut > MANY_CUT
    )
    return Finding(tones[sign], f"{task.task} ({task.backend}): {task.verdict}{caution}")


def _faster(ratio: Ratio) -> Finding:
    low, high = ratio.speedup.ci or (0.0, float("inf"))
    at = f" at temperature {ratio.temperature:g}" if ratio.temperature else ""
    numbers = f"{number(ratio.speedup.value)}× (95 % CI {interval(ratio.speedup.ci)}, {ratio.speedup.n} prompts){at}"
    pair = f"{ratio.arm} against {ratio.baseline}"
    if ratio.speedup.n < 2:
        return Finding("open", f"{pair}: {number(ratio.speedup.value)}× on a single prompt{at}, no interval")
    if low > 1:
        return Finding("good", f"{pair}: faster, {numbers}")
    if high < 1:
        return Finding("bad", f"{pair}: slower, {numbers}")
    seen = ratio.speedup.detectable
    least = "" if seen is None or math.isinf(seen) else f"; one of {percent(seen)} would have been shown"
    return Finding("open", f"{pair}: no difference in speed shown, {numbers}{least}")


def _advice(speed: Speed) -> list[Finding]:
    """Where a draft does not pay."""
    advice: list[Finding] = []
    plain = {p.arm: p.baseline for p in speed.predictions}
    for ratio in speed.ratios:
        if plain.get(ratio.arm) == ratio.baseline and ratio.speedup.value < 1:
            at = f" at temperature {ratio.temperature:g}" if ratio.temperature else ""
            text = f"do not speculate with this draft here{at}: {ratio.arm} runs at {number(ratio.speedup.value)}×"
            advice.append(Finding("bad", f"{text} the speed of {ratio.baseline}"))
    return advice


def _batch_advice(speed: Speed) -> list[Finding]:
    """The batch sizes at which drafts have stopped to pay, and batches that change an answer."""
    advice: list[Finding] = []
    for b in speed.batches:
        at = f"at batch {b.batch}" + (f", temperature {b.temperature:g}" if b.temperature else "")
        if b.equal < b.answers:
            text = f"{b.arm} {at}: {b.equal} of {b.answers} greedy answers equal those of {b.baseline}"
            advice.append(Finding("open", text))
        if b.speedup is not None and b.speedup.value < 1:
            tone: Tone = "bad" if (b.speedup.ci or (0.0, math.inf))[1] < 1 else "open"
            text = f"{at}: {b.arm} runs at {number(b.speedup.value)}× the speed of {b.baseline}, cap it by_batch"
            advice.append(Finding(tone, text))
    return advice


def _fastest(speed: Speed) -> list[Finding]:
    """The arm to use, by median decoding speed, at every temperature."""
    found: list[Finding] = []
    for temperature in dict.fromkeys(arm.temperature for arm in speed.arms):
        best = max((a for a in speed.arms if a.temperature == temperature), key=lambda a: a.decode_rate.median)
        at = f" at temperature {temperature:g}" if temperature else ""
        text = f"fastest arm{at}: {best.arm}, {number(best.decode_rate.median)} tokens/s (median of {best.tpot.n} runs)"
        found.append(Finding("plain", text))
    return found


def _budgets(results: Results) -> list[Finding]:
    budget = results.recipe.get("budget") or {}
    found: list[Finding] = []
    fidelity, speed = results.accuracy.fidelity, results.speed
    if (limit := budget.get("max_kl")) is not None and fidelity is not None:
        found.append(_at_most(f"KL budget {number(limit)} nats/token", fidelity.kl, limit))
    if (limit := budget.get("min_recovery")) is not None:
        found += [_recovery(task, limit) for task in results.accuracy.tasks if task.recovery is not None]
    if (limit := budget.get("ttft_s")) is not None and speed is not None:
        found.append(_first_token(speed, limit))
    return found


def _first_token(speed: Speed, limit: float) -> Finding:
    name = f"first-token budget {number(limit)} s"
    late = [arm for arm in speed.arms if arm.ttft.median > 1000 * limit]
    if late:
        arms = ", ".join(f"{arm.arm} ({number(arm.ttft.median)} ms)" for arm in late)
        return Finding("bad", f"{name} missed (median): {arms}")
    slowest = max(speed.arms, key=lambda arm: arm.ttft.median)
    text = f"{name} met by every arm; slowest: {slowest.arm}, {number(slowest.ttft.median)} ms (median)"
    return Finding("good", text)


def _recovery(task: TaskResult, limit: float) -> Finding:
    """Score kept, with its interval."""
    low, high = task.recovery_ci or tuple(1 + end / task.original.value for end in task.difference.ci or (0.0, 0.0))
    numbers = f"{task.task} keeps {percent(task.quantized.value / task.original.value)}"
    numbers += f" (95 % CI {percent(low)} to {percent(high)}, n = {task.original.n})"
    name = f"recovery budget {percent(limit)}"
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
