"""Which layers of a model stay in memory under a limit, and which are read again for every pass. Bytes throughout."""

from collections.abc import Mapping
from dataclasses import dataclass

from qspec.errors import RecipeError

BUFFERS = 2
"""Places that layers are read into: one runs while the next is read."""


@dataclass(frozen=True)
class Residency:
    """resident, streamed: names of layers; total: the most that is in memory; read: what a pass reads."""

    resident: tuple[str, ...]
    streamed: tuple[str, ...]
    total: int
    read: int

    def __str__(self) -> str:
        layers = len(self.resident) + len(self.streamed)
        return f"{len(self.resident)} of {layers} layers in memory, {megabytes(self.read)} read for every pass"


@dataclass(frozen=True)
class Sizes:
    """What a model takes. fixed: all that belongs to no layer; layers: each layer's weights, by name."""

    fixed: int
    layers: Mapping[str, int]

    def holding(self, count: int) -> Residency:
        """With `count` layers in memory, spread evenly: while they run, the disk is not idle."""
        names, total = list(self.layers), len(self.layers)
        resident = [name for i, name in enumerate(names) if (i + 1) * count // total > i * count // total]
        streamed = [name for name in names if name not in resident]
        moving = [self.layers[name] for name in streamed]
        held = self.fixed + sum(self.layers[name] for name in resident) + BUFFERS * max(moving, default=0)
        return Residency(tuple(resident), tuple(streamed), held, sum(moving))

    def under(self, limit: int) -> Residency:
        """With as many layers in memory as `limit` allows; raises `RecipeError` where it does not allow for none."""
        ways = [self.holding(count) for count in range(len(self.layers), -1, -1)]
        found = next((way for way in ways if way.total <= limit), None)
        if found is not None:
            return found
        least = megabytes(min(way.total for way in ways))
        rule = (
            f"the model takes {least} at the least: {megabytes(self.fixed)} for embedding, head and KV cache, the rest "
            f"for {BUFFERS} buffers of the largest layer"
        )
        fix = f"give at least {least}, or lower speculation.max_length, which sizes the KV cache"
        raise RecipeError(f"memory limit {megabytes(limit)}", rule, fix)


def megabytes(count: int) -> str:
    """`12.3 MB`, of 10^6 bytes, as limits are written; rounded up, so that it is always enough."""
    return f"{-(-count // 100_000) / 10:.1f} MB"
