"""How an engine's process answers: a JSON object a line on standard input, one a line back. Standard library only.

{"load": options}                           -> what `open_engine` tells of itself: version, weight_bytes
{"generate": {prompts, new, speculation}}   -> {ttft_s, seconds, first, ids}
{"logits": {ids, path}}                     -> {}; raw float32 logits `[T, V]` behind every id are in the file
An exception is answered as {"error": "Type: message"}, and the next command is awaited.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import sys
from time import perf_counter
from typing import Any, Protocol

Prompts = list[list[int]]
Options = Mapping[str, Any]


class Engine(Protocol):
    """A loaded model. `facts`: version of the library, and bytes of weights that a decoding step reads."""

    facts: dict[str, Any]

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: "Clock") -> list[list[int]]:
        """Greedy answers of exactly `new` tokens, stop tokens or not; tells `clock` as tokens come."""

    def write_logits(self, ids: Sequence[int], path: str) -> None:
        """Raw float32 logits `[T, V]` behind every id."""


class Clock:
    """Seconds from the request to the moment when every answer has its first token, and to the end.

    `first`: tokens that were out by then, over all answers: with drafts, or in batches, more than one each.
    """

    def __init__(self, answers: int) -> None:
        self._lengths = [0] * answers
        self._begin = perf_counter()
        self.ttft_s, self.first = 0.0, 0

    def add(self, tokens: int, answer: int = 0) -> None:
        """That many more tokens of an answer have come."""
        self._lengths[answer] += tokens
        if not self.first and all(self._lengths):
            self.ttft_s, self.first = perf_counter() - self._begin, sum(self._lengths)

    def seconds(self) -> float:
        return perf_counter() - self._begin


def serve(open_engine: Callable[[Options], Engine]) -> None:
    """Answer commands until standard input ends. What libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        (command, options), *_ = json.loads(line).items()
        try:
            if command == "load":
                engine = open_engine(options)
                reply = engine.facts
            else:
                assert engine is not None, f"{command} before load"
                reply = answer(engine, command, options)
        except Exception as error:  # noqa: BLE001  whatever a library raises is its answer
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        out.write(json.dumps(reply) + "\n")


def answer(engine: Engine, command: str, options: Options) -> dict[str, Any]:
    if command == "logits":
        engine.write_logits(options["ids"], options["path"])
        return {}
    assert command == "generate", f"unknown command {command}"
    prompts, new = options["prompts"], options["new"]
    clock = Clock(len(prompts))
    ids = engine.generate(prompts, new, options["speculation"], clock)
    seconds = clock.seconds()
    lengths = {len(tokens) for tokens in ids}
    assert lengths == {new}, f"answers of {lengths} tokens, {new} were asked for"
    return {"ttft_s": clock.ttft_s, "seconds": seconds, "first": clock.first, "ids": ids}
