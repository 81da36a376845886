"""Speed in the report: arms, ratios on the same prompts, by length and kind of prompt and by batch, where time goes."""

from collections.abc import Callable, Sequence
import math

from qspec.numerics.statistics.evidence import of_ratio
from qspec.numerics.statistics.paired import geometric_mean
from qspec.readable import count, interval, number, percent, size, times
from qspec.report.accuracy import conditions
from qspec.report.arms import drafting, gain, over_first
from qspec.report.document import (
    Bar,
    Bars,
    Block,
    Dots,
    Heading,
    Paragraph,
    Plot,
    Point,
    Series,
    Stack,
    Table,
    least,
    sure_cell,
    tabulate,
)
from qspec.report.verdict import batch_gain
from qspec.schema.results import BatchSpeed, Ratio, Speed, Spread

Naming = Callable[[str, float], str]
"""Label of an arm at a temperature."""


def speed_blocks(speed: Speed) -> list[Block]:
    """Rates, ratios, and what they depend on."""
    name = naming(speed)
    return [
        Heading("Speed"),
        Paragraph(f"Measured in turns on the same prompts: {conditions(speed.condition)}."),
        _rates(speed, name),
        *_ratios(speed, name),
        *_lengths(speed, name),
        *_kinds(speed, name),
        _arms(speed, name),
        *_batches(speed, name),
    ]


def naming(speed: Speed) -> Naming:
    """Temperatures are named where there are several."""
    several = len({arm.temperature for arm in speed.arms}) > 1
    return lambda arm, temperature: f"{arm}, temperature {temperature:g}" if several else arm


def against(ratio: Ratio, name: Naming) -> str:
    return f"{name(ratio.arm, ratio.temperature)} against {ratio.baseline}"


def _rates(speed: Speed, name: Naming) -> Bars:
    bars = tuple(
        Bar(name(a.arm, a.temperature), a.decode_rate.median, number(a.decode_rate.median), quartiles(a.decode_rate))
        for a in speed.arms
    )
    return Bars("Decoding speed, tokens/s (median; line: quartiles)", bars, axis="tokens/s")


def _ratios(speed: Speed, name: Naming) -> list[Block]:
    """Each ratio around 1, and as a table what would have shown."""
    gains = [(r, gain(r)) for r in speed.ratios]
    bars = tuple(Bar(against(r, name), r.speedup.value, times(r.speedup.value), e.ci) for r, e in gains)
    table = tabulate(
        "Speedup, how sure",
        gains,
        ("", lambda row: against(row[0], name)),
        ("speedup", lambda row: times(row[0].speedup.value)),
        ("95 % CI", lambda row: sure_cell(row[1])),
        ("detectable", lambda row: least(row[1])),
        ("prompts", lambda row: count(row[0].speedup.n)),
    )
    caption = "Speedup: time per token of the baseline over the arm's, same prompts (line: 95 % CI)"
    dots = Dots(caption, bars, mark=1.0, axis="speedup")
    return [dots, table] if bars else []


def _lengths(speed: Speed, name: Naming) -> list[Block]:
    """Speedup of every prompt by its length: against the first arm, and of drafts against their own target."""
    drafts, others = drafting(speed), over_first(speed)
    captions = ("Speedup over the first arm by prompt length", "Speedup of drafting by prompt length")
    return [
        Plot(f"{caption} (each point a prompt)", "prompt tokens", "speedup", series, guide="one", log_x=True)
        for caption, ratios in zip(captions, (others, drafts), strict=True)
        if (series := tuple(_by_length(speed, r, against(r, name)) for r in ratios if len(r.prompts) > 1))
    ]


def _by_length(speed: Speed, ratio: Ratio, label: str) -> Series:
    facts = [(speed.prompts[i], value) for i, value in zip(ratio.prompts, ratio.per_prompt, strict=True)]
    points = (Point(prompt.category, max(1, prompt.tokens), value) for prompt, value in facts)
    return Series(label, tuple(sorted(points, key=lambda point: point.x)))


def _kinds(speed: Speed, name: Naming) -> list[Block]:
    """Speedup of drafting by kind of prompt; kinds of one prompt have no interval."""
    bars: list[Bar] = []
    for ratio in drafting(speed):
        kinds: dict[str, list[float]] = {}
        for i, value in zip(ratio.prompts, ratio.per_prompt, strict=False):
            kinds.setdefault(speed.prompts[i].category, []).append(value)
        for kind, values in kinds.items() if len(kinds) > 1 else ():
            value, ci = geometric_mean(values)
            evidence = of_ratio(ci, len(values))
            text = f"{times(value)} ({sure_cell(evidence)}; {len(values)} prompts)"
            bars.append(Bar(f"{name(ratio.arm, ratio.temperature)}: {kind}", value, text, evidence.ci))
    caption = "Speedup of drafting over the same target without, by kind of prompt (line: 95 % CI)"
    return [Dots(caption, tuple(bars), mark=1.0, axis="speedup")] if bars else []


def _arms(speed: Speed, name: Naming) -> Table:
    return tabulate(
        f"Medians over runs. Ceiling: memory bandwidth {size(speed.bandwidth.value)}/s over bytes read per token",
        speed.arms,
        ("arm", lambda a: name(a.arm, a.temperature)),
        ("TTFT, ms", lambda a: number(a.ttft.median)),
        ("ms per token", lambda a: number(a.tpot.median)),
        ("quartiles", lambda a: interval(quartiles(a.tpot))),
        ("tokens/s", lambda a: number(a.decode_rate.median)),
        ("tokens/s with prefill", lambda a: number(a.total_rate.median)),
        ("runs", lambda a: count(a.tpot.n)),
        ("ceiling, tokens/s", lambda a: "–" if a.ceiling_tokens_s is None else number(a.ceiling_tokens_s)),
        ("of ceiling", lambda a: percent((a.decode_rate.median / (a.ceiling_tokens_s or math.nan)), 0)),
    )


def _batches(speed: Speed, name: Naming) -> list[Block]:
    if not speed.batches:
        return []
    table = tabulate(
        "Tokens per second of all requests together, after their first tokens; speedup over the same batch plain",
        speed.batches,
        ("arm", lambda b: name(b.arm, b.temperature)),
        ("batch", lambda b: count(b.batch)),
        ("tokens/s", lambda b: number(b.rate.median)),
        ("quartiles", lambda b: interval(quartiles(b.rate))),
        ("speedup", lambda b: "" if b.speedup is None else times(b.speedup.value)),
        ("95 % CI", lambda b: "" if b.speedup is None else sure_cell(batch_gain(b))),
        ("draft length", lambda b: "" if b.speedup is None else number(b.draft_length)),
        ("equal answers", lambda b: "" if b.speedup is None or not b.answers else f"{b.equal} of {b.answers}"),
    )
    return [Heading("Several requests at once"), *_batch_plots(speed.batches, name), table]


def _batch_plots(batches: Sequence[BatchSpeed], name: Naming) -> list[Block]:
    arms = dict.fromkeys((b.arm, b.temperature) for b in batches)
    rates = [
        Series(name(*arm), tuple(Point("", b.batch, b.rate.median, y_interval=quartiles(b.rate)) for b in own), True)
        for arm in arms
        if (own := sorted((b for b in batches if (b.arm, b.temperature) == arm), key=lambda b: b.batch))
    ]
    gains = [
        Series(name(*arm), tuple(Point("", b.batch, s.value, y_interval=batch_gain(b).ci) for b, s in pairs), True)
        for arm in arms
        if (pairs := [(b, b.speedup) for b in batches if (b.arm, b.temperature) == arm and b.speedup is not None])
    ]
    caption = "Tokens per second of all requests by batch (line: quartiles)"
    plots = [Plot(caption, "batch", "tokens/s", tuple(rates), log_x=True, line="quartiles")]
    if gains:
        caption = "Speedup of drafting by batch (line: 95 % CI)"
        plots.append(Plot(caption, "batch", "speedup", tuple(gains), guide="one", log_x=True))
    return [*plots]


def time_blocks(speed: Speed) -> list[Block]:
    """Shares of the decoding time."""
    name, parts = naming(speed), ("draft", "verify", "other")
    rows = tuple((name(a.arm, a.temperature), tuple(a.time_share[part] for part in parts)) for a in speed.arms)
    return [Heading("Where the time goes"), Stack("Shares of the decoding time", parts, rows)]


def quartiles(spread: Spread) -> tuple[float, float]:
    return spread.q1, spread.q3
