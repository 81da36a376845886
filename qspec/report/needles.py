"""Numbers hidden in running text, in the report: found by context length, and what the KV cache has to do with it."""

from qspec.numerics.statistics.evidence import Evidence, of_difference
from qspec.numerics.statistics.paired import shown_sign
from qspec.readable import count, interval, number, percent, percents
from qspec.report.document import Block, Finding, Heading, Paragraph, Plot, Point, Series, compact, least
from qspec.report.verdict import LOSS, TONES
from qspec.schema.results import Measurement, Needles, Retrieval

ARMS = {"original": "original", "quantized": "quantized", "float_kv": "quantized, float KV cache"}
METHOD = (
    "A number is hidden in running text and asked for at its end; it is found where every token of the answer is the "
    "likeliest. The answer's log-likelihood moves before any number is lost. A proxy for long contexts, no task."
)


def needle_blocks(needles: Needles) -> list[Block]:
    """Shares found as a plot, and as a table what was lost."""
    arms = {arm: label for arm, label in ARMS.items() if arm in needles.pooled.found}
    series = tuple(
        Series(label, tuple(_point(r.length, r.found[arm]) for r in needles.lengths), joined=True)
        for arm, label in arms.items()
    )
    caption = f"Hidden numbers found by context length (line: 95 % CI; text {needles.condition.get('data')})"
    plot = Plot(caption, "context, tokens", "share found", series, log_x=True)
    heads = ["context", "n", *arms.values(), "difference", "95 % CI", "detectable drop", "p", "nll of the answer"]
    columns = (*heads, "95 % CI", "of that KV cache", "95 % CI")
    rows = tuple(_row(r, list(arms)) for r in (*needles.lengths, needles.pooled))
    table = compact("Quantized against original; nll in nats per token of the answer", columns, rows)
    return [Heading("Long contexts"), Paragraph(METHOD), plot, table]


def _point(length: int, found: Measurement) -> Point:
    return Point("", length, found.value, y_interval=found.ci)


def _row(r: Retrieval, arms: list[str]) -> tuple[str, ...]:
    return (
        count(r.length) if r.length else "all",
        count(r.difference.n),
        *(percent(r.found[arm].value) for arm in arms),
        percent(r.difference.value),
        percents(r.difference.ci),
        found.brief if (found := _evidence(r)).open else least(found),
        "" if r.p_value is None else number(r.p_value, 2),
        number(r.nll.value, 2),
        interval(r.nll.ci, 2),
        "" if r.kv_nll is None else number(r.kv_nll.value, 2),
        "" if r.kv_nll is None else interval(r.kv_nll.ci, 2),
    )


def needle_finding(needles: Needles) -> Finding:
    """Over all lengths, in one sentence."""
    pooled, longest = needles.pooled, max(r.length for r in needles.lengths)
    if not pooled.found["original"].value:
        return Finding(
            "plain", f"numbers hidden in up to {longest:,} tokens: the original finds none, so none can be lost"
        )
    found = f"{percent(pooled.found['quantized'].value)} found, original {percent(pooled.found['original'].value)}"
    judged = _evidence(pooled)
    carried = judged.shortage("numbers") if judged.open else pooled.verdict
    return Finding(TONES[judged.sign], f"numbers hidden in up to {longest:,} tokens: {found}; {carried}")


def _evidence(r: Retrieval) -> Evidence:
    """What the numbers hidden at a length allow to be said; nobody guesses five digits."""
    m, original = r.difference, r.found["original"]
    return of_difference(original.value, m.ci, r.p_value, m.n, m.detectable or 1.0)


def lost_contexts(needles: Needles) -> list[Finding]:
    """Context lengths at which numbers are lost, and whether that is the KV cache's doing."""
    lost: list[Finding] = []
    for r in needles.lengths:
        if _evidence(r).sign < 0:
            cache = r.kv_difference is not None and shown_sign(r.kv_difference.ci, r.kv_p_value) < 0
            why = "; the KV cache alone loses them: do not quantize it so from here on" if cache else ""
            lost.append(Finding("bad", f"contexts of {r.length:,} tokens: {r.verdict}{why}", LOSS))
    return lost
