"""What a speed study says of timed groups of requests: latencies, throughput, ratios by repeat, distance to a ceiling.

Pure: no clock, no model. A group is one batch of qspec's own engine, or one load of a server.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from qspec.bridges.openai_api import Api, Streamed
from qspec.numerics.roofline import PassCost, bytes_moved
from qspec.numerics.statistics.paired import geometric_mean, quartiles
from qspec.speculation.types import Generation
from scripts.speed.matrix import Lengths

Row = dict[str, Any]


@dataclass(frozen=True)
class Timed:
    """A group of requests: seconds to each one's first token and per token after it, and of all together.

    drafted, accepted, steps: draft tokens (of a tree its depth) and decoding steps of all; grown: bytes that the
    process grew by at most; nodes, drafting: all tokens that were drafted, and the seconds that it took.
    """

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    tokens: int
    seconds: float
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    grown: int = 0
    nodes: int = 0
    drafting: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second from the first request to the last token."""
        return self.tokens / self.seconds


def timed(group: Sequence[Generation], seconds: float, grown: int = 0) -> Timed:
    """Of one batch. Prompts are read one after the other; a token's time counts from the end of the last of them."""
    last = max(g.ttft for g in group)
    tpot = [(g.seconds - (last - g.ttft)) / (len(g.tokens) - 1) for g in group if len(g.tokens) > 1]
    steps = [step for g in group for step in g.steps]
    return Timed(
        tuple(g.ttft for g in group),
        tuple(tpot),
        sum(len(g.tokens) for g in group),
        seconds,
        sum(step.drafted for step in steps),
        sum(step.accepted for step in steps),
        len(steps),
        grown,
        sum(step.nodes for step in steps),
        sum(step.t_draft for step in steps),
    )


def row(mine: Mapping[int, Timed], base: Mapping[int, Timed], ttft_limit: float) -> Row:
    """Of one arm, by repeat, beside the baseline in the same repeats, each of which asks prompts of its own."""
    runs = list(mine.values())
    worst = median(max(run.ttft) for run in runs)
    pairs = [(i, run) for i, run in mine.items() if i in base]
    made: Row = {
        "repeats": len(runs),
        "groups": len(pairs),
        "ttft_s": _spread([median(run.ttft) for run in runs], 4),
        "ttft_worst_s": round(worst, 4),
        "within_ttft": worst <= ttft_limit,
        "tpot_ms": _spread([1000 * median(run.tpot) for run in runs], 3),
        "tokens_s": _spread([run.rate for run in runs], 2),
        "speedup": [1.0] if base is mine else _ratio([run.rate / base[i].rate for i, run in pairs]),
        "tpot_speedup": [1.0] if base is mine else _ratio([median(base[i].tpot) / median(r.tpot) for i, r in pairs]),
        "grown_mb": round(max(run.grown for run in runs) / 1e6, 1),
    }
    if drafted := sum(run.drafted for run in runs):
        accepted, steps = sum(run.accepted for run in runs), sum(run.steps for run in runs)
        made["tokens_per_step"] = round(1 + accepted / steps, 3)
        made["drafted_per_step"] = round(drafted / steps, 3)
    if nodes := sum(run.nodes for run in runs):
        steps = sum(run.steps for run in runs)
        made["nodes_per_step"] = round(nodes / steps, 3)
        made["draft_ms"] = round(1000 * sum(run.drafting for run in runs) / steps, 3)
    return made


def ceiling(cost: PassCost, bandwidth: float, batch: int, lengths: Lengths, draft_bytes: float, of: Row) -> float:
    """Least milliseconds per token: what a step must read over the bandwidth, by the tokens that a step brought.

    Drafts of all requests are counted as one pass each. of: the row, for its drafts and tokens per step.
    """
    context = lengths.prompt + lengths.new // 2
    drafted, tokens = float(of.get("drafted_per_step", 0.0)), float(of.get("tokens_per_step", 1.0))
    return 1000 * (bytes_moved(cost, batch, context) + drafted * draft_bytes) / bandwidth / tokens


def largest_batches(rows: Sequence[Row], limit: float) -> list[Row]:
    """By model, arm and shape: the largest batch whose worst first token came in time; 0: none did."""
    largest: dict[tuple[str, str, str], int] = {}
    for each in rows:
        key = each["model"], each["arm"], each["shape"]
        largest[key] = max(largest.get(key, 0), each["batch"] if each["within_ttft"] else 0)
    return [
        {"model": model, "arm": arm, "shape": shape, "ttft_limit_s": limit, "largest_batch": batch}
        for (model, arm, shape), batch in largest.items()
    ]


def _spread(values: Sequence[float], digits: int) -> list[float]:
    """Median and quartiles."""
    q1, mid, q3 = quartiles(list(values))
    return [round(mid, digits), round(q1, digits), round(q3, digits)]


def _ratio(ratios: Sequence[float]) -> list[float] | None:
    """Geometric mean over groups of prompts and its interval (Student's t over logarithms), from one group without it;
    None of none.
    """
    if not ratios:
        return None
    value, ci = geometric_mean(ratios)
    return [round(number, 4) for number in (value, *(ci or ()))]


def load_server(api: Api, prompts: Sequence[Sequence[int]], new: int, at_once: int) -> Timed:
    """Ask all prompts, `at_once` at a time, for greedy answers of `new` tokens each.

    TTFT counts from the moment that a request is sent, not from when it waits for its turn. TPOT is between a request's
    first and last text.
    """
    begin = perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        streams = list(pool.map(lambda prompt: api.stream(prompt, new), prompts))
    return summed(streams, perf_counter() - begin)


def summed(streams: Sequence[Streamed], seconds: float) -> Timed:
    """One load as a group. A server may bring several tokens in an event; those of its first one are counted as one."""
    later = [(s.arrivals[-1] - s.arrivals[0]) / (s.tokens - 1) for s in streams if s.tokens > 1]
    return Timed(tuple(s.arrivals[0] for s in streams), tuple(later), sum(s.tokens for s in streams), seconds)
