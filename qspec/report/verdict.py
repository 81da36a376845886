"""The numbers' findings in sentences: what holds, what was lost, and what did not pay."""

from pathlib import Path

from qspec.measure.items import subject_evidence, task_evidence, task_loss, task_verdict
from qspec.measure.prove import CERTAIN, SHIFT
from qspec.numerics.statistics.evidence import Evidence, of_ratio
from qspec.numerics.statistics.pareto import paying
from qspec.numerics.statistics.predictive import TOLERANCE, miss, off
from qspec.pair.check import measured, read_manifest, stale
from qspec.readable import interval, number, percent, percents, times
from qspec.report.arms import Fastest, at, did_nothing, drafting, fastest, gain, idle_drafts, pair_arm, plain_of
from qspec.report.document import Finding, Tone, least, sure
from qspec.report.quality import lost_acceptance, quality_findings, quality_obstacles
from qspec.schema.results import (
    BatchSpeed,
    Equality,
    Fidelity,
    Marginals,
    Measurement,
    Prediction,
    Ratio,
    Results,
    Speed,
    SubTask,
    TaskResult,
)

MANY_CUT = 0.2
"""Share of truncated answers from which a score is called weak evidence."""
LOSS, OPEN, FEW = "loss", "not shown", "too few"
WORDS: dict[int, str] = {1: "", 0: OPEN, -1: LOSS}
TONES: dict[int, Tone] = {1: "good", 0: "open", -1: "bad"}


def findings(results: Results) -> list[Finding]:
    """The verdict, most important first; what is dangerous comes before all, what did not pay last."""
    speed = results.speed
    proven = [] if speed is None else [*losslessness(speed), *lost_acceptance(speed)]
    listed = sorted([*proven, *quality_findings(results)], key=lambda finding: finding.tone != "danger")
    listed += [_task(task) for task in results.accuracy.tasks]
    if results.accuracy.fidelity is not None:
        listed.append(_fidelity(results.accuracy.fidelity))
    listed += budget_findings(results)
    listed += [
        _lost(s) for task in results.accuracy.tasks for s in task.sub_tasks if subject_evidence(task, s).sign < 0
    ]
    if speed is not None:
        listed += [_paid(ratio, speed) for ratio in judged(speed)]
        listed += [*_fastest(speed), *off_predictions(speed), *_idle(speed)]
        listed += [*_batch_advice(speed), *_schedule(results), *_prefill(speed)]
    return listed or [Finding("plain", "nothing was measured")]


def blockers(results: Results) -> list[str]:
    """Why a pair is not ready, and not to be given to others: its quality, drafts that change the output or that are
    spoilt, budgets that were missed.
    """
    speed = results.speed
    listed = [*losslessness(speed), *lost_acceptance(speed)] if speed else []
    against = [finding.text for finding in [*listed, *budget_findings(results)] if finding.tone in ("bad", "danger")]
    return [*quality_obstacles(results), *against]


def obstacles(pair: Path) -> list[str]:
    """Why a pair in a folder is not ready: `blockers` of what was measured, and what was not measured as it is now."""
    manifest = read_manifest(pair)
    results = measured(pair, manifest)
    return ["nothing was measured"] if results is None else [*blockers(results), *stale(manifest, results)]


def losslessness(speed: Speed) -> list[Finding]:
    """Greedy answers token for token, then seeded ones, then the distribution of sampled ones."""
    seeded = [] if speed.seeded is None else [lossless(speed.seeded, "seeded texts")]
    return [*map(lossless, speed.equality), *seeded, *([] if speed.marginals is None else [_sampled(speed.marginals)])]


def _sampled(marginals: Marginals) -> Finding:
    """Whether sampled tokens follow the target's distribution, and which departure from it would have been found."""
    texts = f"{marginals.samples} texts of {marginals.positions} tokens behind {marginals.prompts} prompts"
    n = f"p = {marginals.p_value:.2g}, {texts}"
    if marginals.p_value < CERTAIN:
        return Finding("bad", f"sampled text with drafts follows another distribution than the target's: {n}")
    if marginals.drafted is None or marginals.detectable is None:
        return Finding("open", f"sampled text: no difference shown, and none stated that would have been ({n})")
    if not marginals.drafted:
        return Finding("open", f"sampled text: no draft was judged, so nothing is shown of drafts ({n})")
    seen = f"would have been found in 4 of 5 cases ({marginals.drafted} drafted tokens, {n})"
    shift = f"a shift of {percent(marginals.detectable)} of the probability towards the drafts"
    if marginals.detectable > SHIFT:
        return Finding("open", f"sampled text is not shown to leave the target's distribution; only {shift} {seen}")
    return Finding("good", f"sampled text follows the target's distribution; {shift} {seen}")


def lossless(equality: Equality, texts: str = "greedy answers") -> Finding:
    """Whether drafts left the texts as they are."""
    same = f"{equality.arm}: {equality.equal} of {equality.n} {texts} equal those of {equality.baseline}"
    if not equality.mismatches:
        return Finding("good", f"{same} token for token")
    ties = sum(m.near_tie for m in equality.mismatches)
    if equality.lossless:
        margin = number(max(m.margin for m in equality.mismatches))
        return Finding("good", f"{same}; the other {ties} part at near ties (logit gap at most {margin})")
    wrong = len(equality.mismatches) - ties
    return Finding("bad", f"{same}; {wrong} part where no near tie explains it: speculation is not lossless here")


def _task(task: TaskResult) -> Finding:
    evidence = task_evidence(task)
    cut = max(task.original_cut, task.quantized_cut)
    caution = f"; {percent(cut)} of the answers were cut at the token limit, so the score says little" * (
        cut > MANY_CUT
    )
    condition = task.original.condition
    question = not condition.get("continues_text")
    if question and condition.get("has_chat_template") and not condition.get("chat_template"):
        caution += "; the model was asked without its chat template"
    text = f"{task.task} ({task.backend}): {task_verdict(task)}{caution}"
    return Finding("bad" if task_loss(task) else TONES[evidence.sign], text, FEW if evidence.open else "")


def _fidelity(fidelity: Fidelity) -> Finding:
    """Predictions on held-out text; how much perplexity may rise is for a budget to say."""
    ratio, same = fidelity.perplexity_ratio, fidelity.top1_agreement
    text = f"{ratio.condition.get('data', 'held-out text')}: perplexity {times(ratio.value)} the original's"
    agreement = f"the same most likely token at {percent(same.value)} of the positions"
    return Finding("plain", f"{text} ({sure(of_ratio(ratio.ci, ratio.n), 'windows')}), {agreement}")


def _lost(sub_task: SubTask) -> Finding:
    ci = sub_task.difference.ci if sub_task.difference else None
    numbers = f"{percent(sub_task.original)} to {percent(sub_task.quantized)}, 95 % CI of the difference {percents(ci)}"
    return Finding(
        "bad", f"{sub_task.task} loses, corrected for the number of subjects: {numbers}, {sub_task.n} items", LOSS
    )


def judged(speed: Speed) -> list[Ratio]:
    """Ratios that say something of their arm: of one whose drafts did nothing, the plain arm has said it."""
    return [ratio for ratio in speed.ratios if idle_drafts(speed, ratio.arm, ratio.temperature) is None]


def _idle(speed: Speed) -> list[Finding]:
    """Arms whose drafts did nothing, whatever speed was measured of them."""
    every = dict.fromkeys((ratio.arm, ratio.temperature) for ratio in speed.ratios)
    return [
        Finding("open", f"{arm}{at(temperature)}: {did_nothing(idle)}, so no speed is theirs", "no drafts")
        for arm, temperature in every
        if (idle := idle_drafts(speed, arm, temperature)) is not None
    ]


def _faster(ratio: Ratio) -> Finding:
    """Faster, slower, neither shown, or too few prompts to say."""
    evidence, pair = gain(ratio), f"{ratio.arm} against {ratio.baseline}"
    numbers = f"{times(ratio.speedup.value)} ({sure(evidence, 'prompts')}){at(ratio.temperature)}"
    if evidence.few:
        return Finding("open", f"{pair}: {numbers}", FEW)
    seen = f"; a change of {least(evidence)} would have been" if evidence.detectable else ""
    word = {1: "faster", -1: "slower", 0: "no difference in speed shown"}[evidence.sign]
    return Finding(
        TONES[evidence.sign], f"{pair}: {word}, {numbers}{seen * (evidence.sign == 0)}", WORDS[evidence.sign]
    )


def _paid(ratio: Ratio, speed: Speed) -> Finding:
    """Whether an arm is faster; where it drafts over the same target and is slower, what follows."""
    finding = _faster(ratio)
    drafts = plain_of(speed).get(ratio.arm) == ratio.baseline
    advice = "; do not speculate with this draft here" if drafts and finding.tone == "bad" else ""
    return Finding(finding.tone, f"{finding.text}{advice}", finding.word)


def _batch_advice(speed: Speed) -> list[Finding]:
    """The batch sizes at which drafts have stopped to pay, and batches that change an answer."""
    return [finding for b in speed.batches for finding in (_changed(b), _stopped(b)) if finding is not None]


def _schedule(results: Results) -> list[Finding]:
    """The cap by batch that the measured sizes ask for, if the recipe does not have it yet.

    Drafts are kept up to the largest batch at which they are shown to pay; where nothing is shown there is no advice.
    """
    speed, length = results.speed, (results.recipe.get("speculation") or {}).get("draft_length")
    if speed is None or not speed.batches or not length:
        return []
    own, first = pair_arm(speed), speed.arms[0].temperature
    alone = next((gain(r) for r in drafting(speed) if (r.arm, r.temperature) == (own, first)), None)
    if alone is None:
        return []
    rows = [b for b in speed.batches if (b.arm, b.temperature) == (own, first) and b.speedup is not None]
    shown = {1: alone} | {b.batch: batch_gain(b) for b in rows}
    drafts = {1: True} | {b.batch: b.draft_length > 0 for b in rows}
    lows = {size: evidence.ci[0] if evidence.ci and drafts[size] else 0.0 for size, evidence in shown.items()}
    last, ranges = paying(lows, length["k"] if length["policy"] == "fixed" else length["max_k"])
    by_batch = [list(part) for part in ranges]
    if max(lows) <= last or by_batch == length["by_batch"] or (last == 0 and alone.sign >= 0):
        return []
    undecided = [size for size, evidence in shown.items() if size > last and not evidence.sign and drafts[size]]
    sizes = f"; not decided at batch {', '.join(map(str, undecided))}" if undecided else ""
    upto = f"up to batch {last}" if last else "at no batch"
    text = f"drafts are shown to pay {upto}{sizes}: speculation.draft_length.by_batch: {by_batch}"
    return [Finding("plain", text, "do")]


def batch_gain(b: BatchSpeed) -> Evidence:
    """The evidence of the groups of prompts for drafting at a batch size."""
    return Evidence(0, few=True) if b.speedup is None else of_ratio(b.speedup.ci, b.speedup.n)


def _batch(b: BatchSpeed) -> str:
    return f"at batch {b.batch}" + (f", temperature {b.temperature:g}" if b.temperature else "")


def _changed(b: BatchSpeed) -> Finding | None:
    if b.equal == b.answers:
        return None
    text = f"{b.arm} {_batch(b)}: {b.equal} of {b.answers} greedy answers equal those of {b.baseline}"
    return Finding("open", text)


def _stopped(b: BatchSpeed) -> Finding | None:
    """A batch size at which drafts are not shown to pay, unless there are none."""
    evidence = batch_gain(b)
    if b.speedup is None or evidence.sign > 0 or not b.draft_length:
        return None
    text = f"{_batch(b)}: {b.arm} runs at {times(b.speedup.value)} the speed of {b.baseline}"
    if evidence.sign < 0:
        return Finding("bad", f"{text}, cap it by_batch", LOSS)
    return Finding("open", f"{text} ({sure(evidence, 'groups of prompts')})", FEW if evidence.few else OPEN)


def off_predictions(speed: Speed) -> list[Finding]:
    """Arms of which the model of speculation foretold another speed than was measured."""
    return [_off(p) for p in speed.predictions if off(p.predicted, p.measured)]


def _off(p: Prediction) -> Finding:
    numbers = f"predicted {times(p.predicted)}, measured {times(p.measured)}"
    by = f"off by {percent(miss(p.predicted, p.measured), 0)}, beyond the tolerance of {percent(TOLERANCE, 0)}"
    text = f"{p.arm}{at(p.temperature)}: {numbers}, {by}: the model of speculation does not hold here"
    return Finding("open", text, "off")


def _prefill(speed: Speed) -> list[Finding]:
    """Plain arms whose first token does not come earlier than the baseline's."""
    plain = [arm for arm in speed.arms if not arm.speculative and arm.temperature == speed.arms[0].temperature]
    base, listed = plain[0] if plain else None, list[Finding]()
    for arm in plain[1:]:
        if base is not None and arm.ttft.median >= base.ttft.median:
            medians = f"{number(arm.ttft.median)} ms, {base.arm} {number(base.ttft.median)} (medians of {arm.ttft.n})"
            listed.append(Finding("open", f"prefill is not shown to be faster: {arm.arm} needs {medians}", OPEN))
    return listed


def _fastest(speed: Speed) -> list[Finding]:
    """Whether another arm than the pair is the one to use, at every temperature."""
    listed: list[Finding] = []
    for temperature in dict.fromkeys(arm.temperature for arm in speed.arms):
        if not any(arm.temperature == temperature and arm.decode_rate.n for arm in speed.arms):
            listed.append(Finding("open", f"no arm was timed{at(temperature)}: every answer ended at its first token"))
        elif (best := fastest(speed, temperature)) is not None:
            listed.append(_beside_pair(best, pair_arm(speed), at(temperature)))
    return listed


def _beside_pair(best: Fastest, own: str, when: str) -> Finding:
    chosen = f"fastest arm by {best.chosen_on} of the prompts{when}: {best.arm}"
    if best.arm == own:
        return Finding("plain", chosen)
    numbers = f"{times(best.value)} the speed of {own} on the others ({sure(best.over_pair, 'prompts')})"
    if best.over_pair.sign > 0:
        return Finding("open", f"{chosen}, {numbers}: use it instead", "faster")
    return Finding("plain", f"{chosen}, but not shown to beat the pair: {numbers}")


def budget_findings(results: Results) -> list[Finding]:
    """A sentence for every limit that the report can judge (all but `memory_gb` and `minutes`)."""
    budget = results.recipe.get("budget") or {}
    listed: list[Finding] = []
    fidelity, speed = results.accuracy.fidelity, results.speed
    tasks = [task for task in results.accuracy.tasks if task.recovery is not None]
    if (limit := budget.get("max_kl")) is not None:
        name = f"KL budget {number(limit)} nats/token"
        listed.append(_missing(name) if fidelity is None else _at_most(name, fidelity.kl, limit))
    if (limit := budget.get("min_agreement")) is not None:
        name = f"agreement budget {percent(limit)}"
        listed.append(_missing(name) if fidelity is None else _at_least(name, fidelity.top1_agreement, limit))
    if (limit := budget.get("min_recovery")) is not None:
        name = f"recovery budget {percent(limit)}"
        listed += [_recovery(name, task, limit) for task in tasks] or [_missing(name)]
    if (limit := budget.get("ttft_s")) is not None:
        name = f"first-token budget {number(limit)} s"
        listed.append(_missing(name) if speed is None else _first_token(name, speed, limit))
    return listed


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
    evidence = task_evidence(task)
    if evidence.open:
        return Finding("open", f"{name} undecided: {task.task}: {evidence.shortage('items')}")
    low, high = task.recovery_ci or tuple(1 + end / task.original.value for end in task.difference.ci or (0.0, 0.0))
    numbers = f"{task.task} keeps {percent(task.quantized.value / task.original.value)}"
    numbers += f" (95 % CI {percents((low, high))}, n = {task.original.n})"
    return _decided(name, numbers, met=low >= limit, missed=high < limit)


def _at_most(name: str, measured: Measurement, limit: float) -> Finding:
    """Met or missed when the interval says so, else undecided."""
    low, high = measured.ci or (measured.value, measured.value)
    numbers = f"{number(measured.value)} (95 % CI {interval(measured.ci)}, n = {measured.n})"
    return _decided(name, numbers, met=high <= limit, missed=low > limit)


def _at_least(name: str, measured: Measurement, limit: float) -> Finding:
    low, high = measured.ci or (measured.value, measured.value)
    numbers = f"{percent(measured.value)} (95 % CI {percents(measured.ci)}, n = {measured.n})"
    return _decided(name, numbers, met=low >= limit, missed=high < limit)


def _decided(name: str, numbers: str, *, met: bool, missed: bool) -> Finding:
    if met or missed:
        return Finding("good" if met else "bad", f"{name} {'met' if met else 'missed'}: {numbers}")
    return Finding("open", f"{name} undecided, the interval spans it: {numbers}")
