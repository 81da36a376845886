"""Load a server with several requests at once, and time what it streams."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from qspec.bridges.openai_api import Api, Streamed
from qspec.stages.speed_study import Timed


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
