"""Where a decoder's time goes: its parts run under a clock for as long as a block lasts."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import ParamSpec, TypeVar

from qspec.nn.eager.decoder import Decoder
from qspec.nn.eager.experts import Mlp

P = ParamSpec("P")
R = TypeVar("R")

MATMULS = ("q/k/v", "o", "gate/up", "down", "head")
PARTS = ("embedding", "norms", "attention", "activation", *MATMULS, "rest of the pass")
"""attention: rotation, KV cache and softmax; activation: of the MLP, or all of a mixture of experts."""


class Clock:
    """Seconds by part; a part that runs inside another counts for itself only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def wrap(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = perf_counter()
            self._inside.append(0.0)
            result = function(*args, **kwargs)
            whole = perf_counter() - begin
            self.seconds[part] += whole - self._inside.pop()
            if self._inside:
                self._inside[-1] += whole
            return result

        return timed


@contextmanager
def timed(decoder: Decoder) -> Iterator[Clock]:
    """Time the parts of every pass of `decoder` within the block; it is as before afterwards.

    Each call of a part costs about a microsecond more. Devices that run asynchronously charge whoever waits.
    """
    clock, layers, head = Clock(), decoder._layers, decoder._head
    methods = {"forward": "rest of the pass", "embed": "embedding", "_normed": "norms"}
    methods |= {"_attention": "attention", "_feed_forward": "activation"}
    for name, part in methods.items():
        setattr(decoder, name, clock.wrap(part, getattr(decoder, name)))
    decoder._head = head and clock.wrap("head", head)
    decoder._layers = [
        replace(
            layer,
            qkv=clock.wrap("q/k/v", layer.qkv),
            o=clock.wrap("o", layer.o),
            mlp=_timed_mlp(clock, layer.mlp) if isinstance(layer.mlp, Mlp) else layer.mlp,
        )
        for layer in layers
    ]
    try:
        yield clock
    finally:
        for name in methods:
            delattr(decoder, name)
        decoder._layers, decoder._head = layers, head


def _timed_mlp(clock: Clock, mlp: Mlp) -> Mlp:
    return replace(mlp, gate_up=clock.wrap("gate/up", mlp.gate_up), down=clock.wrap("down", mlp.down))
