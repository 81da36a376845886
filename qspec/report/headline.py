"""The front of a report: what to do with the pair, the numbers that carry it, one picture, and what it costs."""

from qspec.measure.items import task_evidence, task_loss
from qspec.numerics.statistics.evidence import Evidence, of_share
from qspec.readable import Interval, count, duration, interval, number, percent, percents, size, times
from qspec.report.arms import did_nothing, drafting, gain, idle_drafts, over_first, pair_arm, plain_of, target_arm
from qspec.report.document import (
    Block,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Table,
    Tile,
    Tiles,
    Tone,
    compact,
    sure,
)
from qspec.report.quality import NOT_READY, quality_findings
from qspec.report.verdict import TONES, budget_findings, lossless, losslessness
from qspec.schema.results import ArmSpeed, Ratio, Results, Speed, TaskResult

COARSE = 0.05
"""Drop of a score from which a test that could not have shown less is called coarse."""


def lead(results: Results) -> str:
    """Advice on the pair, in the order of importance."""
    parts = [*_broken(results), *_speed(results), *_accuracy(results), *_drafting(results.speed)]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _broken(results: Results) -> list[str]:
    changed = [f for f in (losslessness(results.speed) if results.speed else []) if f.tone == "bad"]
    missed = [f.text.partition(" missed")[0] for f in budget_findings(results) if f.tone == "bad"]
    reasons = [f"not ready: {f.text}" for f in quality_findings(results) if f.word == NOT_READY][:1]
    reasons += ["drafting changes the output"] if changed else []
    return [*reasons, *([f"missed: {', '.join(missed)}"] if missed else [])]


def _speed(results: Results) -> list[str]:
    """The pair's own speed, how sure it is, and how far from the original the pair stands."""
    ratio = results.speed and pair_ratio(results.speed)
    if not ratio:
        return []
    evidence, fidelity = gain(ratio), results.accuracy.fidelity
    if evidence.few:
        return [f"{ratio.arm} over {ratio.baseline}: {evidence.shortage('prompts')}"]
    unsure = ", no difference shown" if evidence.sign == 0 else ""
    apart = f", at KL {number(fidelity.kl.value)} nats/token from it" if fidelity else ""
    speed = f"{ratio.arm} decodes at {times(ratio.speedup.value)} the speed of {ratio.baseline}"
    return [f"{speed} ({sure(evidence, 'prompts')}{unsure}){apart}"]


def _accuracy(results: Results) -> list[str]:
    tasks, fidelity = results.accuracy.tasks, results.accuracy.fidelity
    every = [(task, task_evidence(task)) for task in tasks]
    if lost := [f"{task.task} loses {loss}" for task in tasks if (loss := task_loss(task))]:
        return lost[:1]
    if seen := [evidence.detectable or 0.0 for _, evidence in every if not evidence.open]:
        if min(seen) > COARSE:
            points = f"only a drop of {100 * min(seen):.0f} points or more would have shown"
            return [f"accuracy was tested coarsely: {points}"]
        return [f"no loss of accuracy is shown; a drop of {100 * min(seen):.1f} points would have been"]
    if fidelity is None:
        return [f"accuracy was not tested: {_open(*every[0])}" if every else "accuracy was not measured"]
    agree = percent(fidelity.top1_agreement.value)
    clause = f"accuracy was not tested by a task ({_open(*every[0])})" if every else "no task was asked"
    return [f"{clause}; it names the original's most likely token at {agree} of the positions"]


def _open(task: TaskResult, evidence: Evidence) -> str:
    return f"{task.task}: {evidence.shortage('items')}"


def _drafting(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    parts: list[str] = []
    ratios = [ratio for ratio in drafting(speed) if ratio.baseline == target_arm(speed)]
    for ratio in (r for r in ratios if r.temperature == speed.arms[0].temperature):
        idle, evidence = idle_drafts(speed, ratio.arm, ratio.temperature), gain(ratio)
        if idle is not None:
            parts.append(f"{ratio.arm}: {did_nothing(idle)}")
        elif evidence.few:
            parts.append(f"{ratio.arm}: {evidence.shortage('prompts')}")
        else:
            word = {1: "pays", 0: "is not shown to pay", -1: "does not pay"}[evidence.sign]
            parts.append(f"{ratio.arm} {word} ({times(ratio.speedup.value)})")
    return [", ".join(parts)] if parts else []


def pair_ratio(speed: Speed) -> Ratio | None:
    """The pair over the original, at the first temperature; its target where its drafts did nothing.

    No other arm stands for the pair, however fast it was. None where the pair was not timed beside the original.
    """
    if not speed.arms:
        return None
    first = speed.arms[0].temperature
    own = pair_arm(speed) if idle_drafts(speed, pair_arm(speed), first) is None else target_arm(speed)
    return next((r for r in over_first(speed) if (r.arm, r.temperature) == (own, first)), None)


def tiles(results: Results) -> Tiles:
    """The numbers that a reader looks for first."""
    shown = [_recovery(task) for task in results.accuracy.tasks if task.recovery is not None][:1]
    fidelity, speed = results.accuracy.fidelity, results.speed
    if fidelity is not None:
        kl = fidelity.kl
        note = f"95 % CI {interval(kl.ci, 2)} nats/token, {kl.n} windows"
        shown.append(Tile("KL to the original", number(kl.value), note))
    if speed is not None:
        shown += _speed_tiles(speed)
    return Tiles("At a glance", tuple(shown))


def _recovery(task: TaskResult) -> Tile:
    evidence, label = task_evidence(task), f"{task.task} score kept"
    if evidence.open:
        return Tile(label, "–", evidence.shortage("items"), "open")
    seen = "" if evidence.detectable is None else f"; {100 * evidence.detectable:.1f} points would have shown"
    note = f"95 % CI {percents(task.recovery_ci)}, {task.original.n} items{seen}"
    return Tile(label, percent(task.recovery or 0.0), note, TONES[evidence.sign])


def _speed_tiles(speed: Speed) -> list[Tile]:
    shown: list[Tile] = []
    ratio, own = pair_ratio(speed), pair_arm(speed)
    if ratio is not None:
        shown.append(_ratio_tile(speed, ratio))
    shown += [_ratio_tile(speed, r) for r in drafting(speed) if r.arm == own][:1]
    for a in [a for a in speed.acceptance if (a.category, a.arm) == ("all", own)][:1]:
        alpha = of_share(a.alpha.ci, a.prompts)
        note = f"{alpha.brief if alpha.few else sure(alpha, 'prompts')}; {number(a.tokens_per_step)} tokens a step"
        shown.append(Tile(f"Acceptance α, {a.arm}", number(a.alpha.value), note))
    if speed.equality:
        equal, n = sum(e.equal for e in speed.equality), sum(e.n for e in speed.equality)
        tone: Tone = "good" if all(lossless(e).tone == "good" for e in speed.equality) else "bad"
        shown.append(Tile("Same greedy answers", f"{equal} of {n}", "token for token, with drafts and without", tone))
    first, last = speed.arms[0], next(arm for arm in speed.arms if arm.arm == target_arm(speed))
    if last.weight_bytes and first.weight_bytes:
        kept = f"{percent(last.weight_bytes / first.weight_bytes, 0)} of {size(first.weight_bytes)}"
        shown.append(Tile("Weights a pass reads", size(last.weight_bytes), kept))
    return shown


def _ratio_tile(speed: Speed, ratio: Ratio) -> Tile:
    label, evidence = f"{ratio.arm} over {ratio.baseline}", gain(ratio)
    idle = idle_drafts(speed, ratio.arm, ratio.temperature)
    if idle is not None:
        return Tile(label, times(ratio.speedup.value), did_nothing(idle), "open")
    return Tile(label, times(ratio.speedup.value), sure(evidence, "prompts"), TONES[evidence.sign])


def picture(results: Results) -> list[Plot]:
    """Accuracy against speed of every arm that was timed beside the first: quantization moves both, drafts speed alone.

    Accuracy is the score kept of a task that could show a loss, else the KL to the original.
    """
    speed, fidelity = results.speed, results.accuracy.fidelity
    kept = [task for task in results.accuracy.tasks if task.recovery is not None and not task_evidence(task).open]
    if speed is None or not speed.arms or not (kept or fidelity):
        return []
    if kept:
        what, own = f"{kept[0].task} score kept, higher is better", (kept[0].recovery or 0.0, kept[0].recovery_ci)
    else:
        assert fidelity is not None
        what, own = "KL to the original, nats/token, lower is better", (fidelity.kl.value, fidelity.kl.ci)
    first, plain = speed.arms[0], plain_of(speed)
    bars: dict[str, tuple[float, Interval]] = {first.arm: (1.0, None)}
    for ratio in speed.ratios:
        idle = idle_drafts(speed, ratio.arm, ratio.temperature)
        if (ratio.baseline, ratio.temperature) == (first.arm, first.temperature) and idle is None:
            bars[ratio.arm] = ratio.speedup.value, gain(ratio).ci
    series: list[Series] = []
    for arm, (value, ci) in bars.items():
        loss, loss_ci = (float(bool(kept)), None) if plain.get(arm, arm) == "original" else own
        series.append(Series(arm, (Point("", value, loss, ci, loss_ci),)))
    caption = "Accuracy against speed (lines: 95 % CI); drafts change the speed alone"
    return [Plot(caption, f"decoding speed over {first.arm}", what, tuple(series))] if len(series) > 1 else []


def cost(results: Results) -> list[Block]:
    """The bytes that arms hold and read, and the time that the run took."""
    timed = results.speed.arms if results.speed is not None else ()
    arms = list({arm.arm: arm for arm in timed if arm.weight_bytes}.values())
    rows = tuple(_cost(arm, arms[0]) for arm in arms)
    columns = ("arm", "target's weights", "of the first arm's", "draft", "KV cache per token", "first token, ms")
    caption = "Bytes that an arm keeps in memory, and its time to the first token (median)"
    blocks: list[Block] = [compact(caption, columns, rows)] if rows else []
    if results.seconds:
        stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in results.seconds.items())
        blocks.append(Paragraph(f"The run took {duration(sum(results.seconds.values()))}: {stages}."))
    return [Heading("What it costs"), *blocks] if blocks else []


def _cost(arm: ArmSpeed, first: ArmSpeed) -> tuple[str, ...]:
    draft, cache = arm.draft_bytes, arm.kv_bytes_per_token
    share = percent(arm.weight_bytes / first.weight_bytes, 0)
    parts = size(draft) if draft else "", size(cache) if cache else ""
    return arm.arm, size(arm.weight_bytes), share, *parts, number(arm.ttft.median)


def differing_answers(results: Results) -> list[Block]:
    """Answers of both arms, where they differ."""
    rows = results.accuracy.answers.rows if results.accuracy.answers else ()
    apart = [(i, row) for i, row in enumerate(rows, 1) if row.original != row.quantized]
    if not apart:
        return []
    caption = f"Greedy answers to beginnings of held-out texts: {len(apart)} of {len(rows)} differ"
    cells = tuple((count(i), " ".join(r.original.split()), " ".join(r.quantized.split())) for i, r in apart)
    return [Heading("Answers side by side"), Table(caption, ("", "original", "quantized"), cells)]
