"""Granularity: which elements share one scale. All shape work happens here, so quantizers see `[blocks, size]` only.

A weight is `[out, in]`, activations are `[tokens, features]`.

| granularity | blocks of a weight `[N, K]` | scale shape |
|---|---|---|
| PerTensor | 1 block of N*K | `[1]` |
| PerChannel | N blocks of K (one per output row) | `[N, 1]` |
| PerToken | as PerChannel, on activations `[T, K]` | `[T, 1]` |
| PerGroup(g) | N*K/g blocks of g | `[N, K/g]` |
| PerBlock(r, c) | ceil(N/r)*ceil(K/c) tiles (edges padded with zeros) | `[ceil(N/r), ceil(K/c)]` |
"""

from dataclasses import dataclass

from torch import Tensor
import torch.nn.functional as F


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""


@dataclass(frozen=True)
class PerChannel:
    """One scale per row of a weight `[N, K]` (its output channel)."""


@dataclass(frozen=True)
class PerToken:
    """One scale per row of an activation `[T, K]`."""


@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` consecutive elements of a row."""

    size: int


@dataclass(frozen=True)
class PerBlock:
    """One scale per tile of `rows` x `cols`."""

    rows: int
    cols: int


Granularity = PerTensor | PerChannel | PerToken | PerGroup | PerBlock


def granularity_name(granularity: Granularity) -> str:
    """Its name for people: what shares a scale."""
    match granularity:
        case PerTensor():
            return "tensor"
        case PerChannel():
            return "channel"
        case PerToken():
            return "token"
        case PerGroup(size):
            return f"group {size}"
        case PerBlock(rows, cols):
            return f"tile {rows}x{cols}"


def scale_shape(shape: tuple[int, int], granularity: Granularity) -> tuple[int, ...]:
    """Shape of the scale tensor for a matrix of `shape` `(N, K)`."""
    n, k = shape
    match granularity:
        case PerTensor():
            return (1,)
        case PerChannel() | PerToken():
            return (n, 1)
        case PerGroup(size):
            if k % size:
                raise ValueError(f"{k} columns do not divide into groups of {size}")
            return (n, k // size)
        case PerBlock(rows, cols):
            return (-(-n // rows), -(-k // cols))


def to_blocks(x_NK: Tensor, granularity: Granularity) -> Tensor:
    """Reshape a matrix to `[blocks, size]`, one row per scale, in the scale tensor's row-major order."""
    shape = scale_shape((x_NK.shape[0], x_NK.shape[1]), granularity)
    match granularity:
        case PerBlock(rows, cols):
            padded = F.pad(x_NK, (0, shape[1] * cols - x_NK.shape[1], 0, shape[0] * rows - x_NK.shape[0]))
            tiles = padded.reshape(shape[0], rows, shape[1], cols).transpose(1, 2)
            return tiles.reshape(shape[0] * shape[1], rows * cols)
        case PerTensor():
            return x_NK.reshape(1, -1)
        case _:
            return x_NK.reshape(shape[0] * shape[1], -1)


def from_blocks(blocks: Tensor, shape: tuple[int, int], granularity: Granularity) -> Tensor:
    """Inverse of `to_blocks` for a matrix of `shape` `(N, K)`; block padding is dropped."""
    match granularity:
        case PerBlock(rows, cols):
            tiles = scale_shape(shape, granularity)
            grid = blocks.reshape(tiles[0], tiles[1], rows, cols).transpose(1, 2)
            return grid.reshape(tiles[0] * rows, tiles[1] * cols)[: shape[0], : shape[1]]
        case _:
            return blocks.reshape(shape)
