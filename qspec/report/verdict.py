"""What the numbers carry, in sentences: what holds, what was lost, and what did not pay."""

import math

from qspec.measure.prove import CERTAIN
from qspec.numerics.statistics.paired import shown_sign
from qspec.numerics.statistics.pareto import paying
from qspec.readable import interval, number, percent, percents, times
from qspec.report.arms import at, drafting, pair_arm, plain_of
from qspec.report.document import Finding, Tone
from qspec.schema.results import (
    Acceptance,
    BatchSpeed,
    Equality,
    Fidelity,
    Measurement,
    Ratio,
    Results,
    Speed,
    TaskResult,
)

MANY_CUT = 0.2
"""Share of truncated answers from which a score is called weak evidence."""


LEAST_KEPT = 0.9
"""Share of the original's tokens per step, below which a pair's drafts are called spoilt."""


LOSS, NO_GAIN = "loss", "no gain"


TONES: dict[int, Tone] = {1: "good", 0: "open", -1: "bad"}


def findings(results: Results) -> list[Finding]:
    """The verdict, most important first: losslessness, accuracy, budgets, speed. What did not pay: `negatives`."""
    found, speed = list[Finding](), results.speed
    if speed is not None:
        found += [*losslessness(speed), *lost_acceptance(speed)]
    found += [_task(task) for task in results.accuracy.tasks]
    if results.accuracy.fidelity is not None:
        found.append(_fidelity(results.accuracy.fidelity))
    found += budget_findings(results)
    if speed is not None:
        found += [finding for ratio in speed.ratios if (finding := _faster(ratio)).tone == "good"]
        found += _fastest(speed)
    return found or [Finding("plain", "nothing was measured")]


def negatives(results: Results) -> list[Finding]:
    """What did not pay, or shows no gain: arms, drafts, batch sizes, prompts, subjects that lost."""
    found = [_lost(task, name) for task in results.accuracy.tasks for name in _lost_subjects(task)]
    if results.speed is None:
        return found
    found += [finding for ratio in results.speed.ratios if (finding := _unpaid(ratio, results.speed))]
    return [*found, *_batch_advice(results.speed), *_schedule(results), *_prefill(results.speed)]


def blockers(results: Results) -> list[str]:
    """What speaks against giving a pair to others: drafts that change the output or that rounding has spoilt, budgets
    that were missed.
    """
    told = [*losslessness(results.speed), *lost_acceptance(results.speed)] if results.speed else []
    return [finding.text for finding in [*told, *budget_findings(results)] if finding.tone == "bad"]


def losslessness(speed: Speed) -> list[Finding]:
    """Greedy answers token for token, then the law of sampled ones."""
    found = [lossless(equality) for equality in speed.equality]
    law = speed.marginals
    if law is None:
        return found
    n = f"{law.samples} texts of {law.positions} tokens behind each of {law.prompts} prompts, with drafts and without"
    if law.p_value < CERTAIN:
        text = f"sampled texts with drafts follow another law than without: p = {law.p_value:.3g} ({n})"
        return [*found, Finding("bad", text)]
    text = f"sampled texts: no difference detected between drafts and none, permutation p = {law.p_value:.2g} ({n})"
    return [*found, Finding("good", text)]


def lost_acceptance(speed: Speed) -> list[Finding]:
    """Drafts of the pair that fare worse than those on the original: rounding, or a kernel, has spoilt a layer.

    Judged by teacher-forced acceptance, which no draft-length policy moves; drafts without laws have none.
    """
    if not speed.arms:
        return []
    own, first = pair_arm(speed), speed.arms[0].arm
    before = next((arm for arm, base in plain_of(speed).items() if base == first and arm != own), None)
    pooled = {(a.arm, a.temperature): a for a in speed.acceptance if a.category == "all"}
    both = [(pooled.get((before or "", temperature)), a) for (arm, temperature), a in pooled.items() if arm == own]
    return [finding for base, a in both if base is not None and (finding := _spoilt(base, a)) is not None]


def _spoilt(before: Acceptance, after: Acceptance) -> Finding | None:
    was, now = before.teacher_forced, after.teacher_forced
    if was is None or now is None or now.value >= LEAST_KEPT * was.value:
        return None
    (low, _), (_, high) = (forced.ci or (0.0, math.inf) for forced in (was, now))
    told = f"{number(now.value)} of its drafts stand, teacher-forced, against {number(was.value)} of {before.arm}"
    text = f"{after.arm}: {told}{at(after.temperature)}: rounding spoils the drafts"
    if high < LEAST_KEPT * low:
        return Finding("bad", text, LOSS)
    return Finding("open", f"{text}, or noise", NO_GAIN)


def lossless(equality: Equality) -> Finding:
    """Whether drafts left the greedy answers as they are."""
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
    sign = shown_sign(task.difference.ci, task.p_value)
    cut = max(task.original_cut, task.quantized_cut)
    caution = f"; {percent(cut)} of the answers were cut at the token limit, so the score says little" * (
        cut > MANY_CUT
    )
    asked = task.original.condition
    if asked.get("has_chat_template") and not asked.get("chat_template"):
        caution += "; the model was asked without its chat template"
    return Finding(TONES[sign], f"{task.task} ({task.backend}): {task.verdict}{caution}")


def _fidelity(found: Fidelity) -> Finding:
    """Predictions on held-out text; how much perplexity may rise is for a budget to say."""
    ratio, same = found.perplexity_ratio, found.top1_agreement
    text = f"{ratio.condition.get('data', 'held-out text')}: perplexity {times(ratio.value)} the original's"
    agreement = f"the same most likely token at {percent(same.value)} of the positions"
    return Finding("plain", f"{text} (95 % CI {interval(ratio.ci)}, {ratio.n} windows), {agreement}")


def _lost_subjects(task: TaskResult) -> list[str]:
    return [s.task for s in task.sub_tasks if s.difference and shown_sign(s.difference.ci, s.p_value) < 0]


def _lost(task: TaskResult, name: str) -> Finding:
    sub_task = next(s for s in task.sub_tasks if s.task == name)
    ci = sub_task.difference.ci if sub_task.difference else None
    numbers = f"{percent(sub_task.original)} to {percent(sub_task.quantized)}, 95 % CI of the difference {percents(ci)}"
    return Finding("bad", f"{name} loses, corrected for the number of subjects: {numbers}, {sub_task.n} items", LOSS)


def _faster(ratio: Ratio) -> Finding:
    """Faster, slower, or neither shown."""
    low, high = ratio.speedup.ci or (0.0, math.inf)
    pair, size = f"{ratio.arm} against {ratio.baseline}", times(ratio.speedup.value)
    if ratio.speedup.n < 2:
        return Finding("open", f"{pair}: {size} on a single prompt{at(ratio.temperature)}, no interval", NO_GAIN)
    numbers = f"{size} (95 % CI {interval(ratio.speedup.ci)}, {ratio.speedup.n} prompts){at(ratio.temperature)}"
    if low > 1:
        return Finding("good", f"{pair}: faster, {numbers}")
    if high < 1:
        return Finding("bad", f"{pair}: slower, {numbers}", LOSS)
    return Finding("open", f"{pair}: no difference in speed shown, {numbers}{_seen(ratio.speedup.detectable)}", NO_GAIN)


def _seen(detectable: float | None) -> str:
    if detectable is None or math.isinf(detectable):
        return ""
    return f"; one of {percent(detectable)} would have been"


def _unpaid(ratio: Ratio, speed: Speed) -> Finding | None:
    """An arm that is not shown to be faster; where it drafts over the same target, what follows."""
    found = _faster(ratio)
    if found.tone == "good":
        return None
    drafts = plain_of(speed).get(ratio.arm) == ratio.baseline
    advice = "; do not speculate with this draft here" if drafts and ratio.speedup.value < 1 else ""
    return Finding(found.tone, f"{found.text}{advice}", found.word)


def _batch_advice(speed: Speed) -> list[Finding]:
    """The batch sizes at which drafts have stopped to pay, and batches that change an answer."""
    return [finding for b in speed.batches for finding in (_changed(b), _stopped(b)) if finding is not None]


def _schedule(results: Results) -> list[Finding]:
    """The cap by batch that the measured sizes ask for, if the recipe does not have it yet."""
    speed, length = results.speed, (results.recipe.get("speculation") or {}).get("draft_length")
    if speed is None or not speed.batches or not length:
        return []
    own, first = pair_arm(speed), speed.arms[0].temperature
    alone = next((r.speedup.value for r in drafting(speed) if (r.arm, r.temperature) == (own, first)), None)
    if alone is None:
        return []
    rows = [b for b in speed.batches if (b.arm, b.temperature) == (own, first) and b.speedup is not None]
    gains = {1: alone} | {b.batch: b.speedup.value if b.draft_length and b.speedup else 0.0 for b in rows}
    last, ranges = paying(gains, length["k"] if length["policy"] == "fixed" else length["max_k"])
    told = [list(part) for part in ranges]
    if max(gains) <= last or told == length["by_batch"]:
        return []
    return [Finding("plain", f"of these sizes follows speculation.draft_length.by_batch: {told}", "do")]


def _batch(b: BatchSpeed) -> str:
    return f"at batch {b.batch}" + (f", temperature {b.temperature:g}" if b.temperature else "")


def _changed(b: BatchSpeed) -> Finding | None:
    if b.equal == b.answers:
        return None
    text = f"{b.arm} {_batch(b)}: {b.equal} of {b.answers} greedy answers equal those of {b.baseline}"
    return Finding("open", text)


def _stopped(b: BatchSpeed) -> Finding | None:
    if b.speedup is None or b.speedup.value >= 1:
        return None
    tone: Tone = "bad" if (b.speedup.ci or (0.0, math.inf))[1] < 1 else "open"
    text = f"{_batch(b)}: {b.arm} runs at {times(b.speedup.value)} the speed of {b.baseline}, cap it by_batch"
    return Finding(tone, text, LOSS if tone == "bad" else NO_GAIN)


def _prefill(speed: Speed) -> list[Finding]:
    """Plain arms whose first token does not come earlier than the baseline's."""
    plain = [arm for arm in speed.arms if not arm.speculative and arm.temperature == speed.arms[0].temperature]
    base, found = plain[0] if plain else None, list[Finding]()
    for arm in plain[1:]:
        if base is not None and arm.ttft.median >= base.ttft.median:
            medians = f"{number(arm.ttft.median)} ms against {number(base.ttft.median)} ms (medians of {arm.ttft.n})"
            found.append(
                Finding("open", f"no gain in prefill: the first token of {arm.arm} comes after {medians}", NO_GAIN)
            )
    return found


def _fastest(speed: Speed) -> list[Finding]:
    """The arm to use, by median decoding speed, at every temperature."""
    found: list[Finding] = []
    for temperature in dict.fromkeys(arm.temperature for arm in speed.arms):
        timed = [a for a in speed.arms if a.temperature == temperature and a.decode_rate.n]
        if not timed:
            found.append(Finding("open", f"no arm was timed{at(temperature)}: every answer ended at its first token"))
            continue
        best = max(timed, key=lambda a: a.decode_rate.median)
        rate = f"{number(best.decode_rate.median)} tokens/s (median of {best.tpot.n} runs)"
        found.append(Finding("plain", f"fastest arm{at(temperature)}: {best.arm}, {rate}"))
    return found


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
