"""Several processes on one job, as `torchrun` starts them; one process where it does not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
import os
from typing import TypeVar

from torch import Tensor
import torch.distributed as dist

R = TypeVar("R")


@contextmanager
def processes() -> Iterator[int]:
    """The group that the environment names, for as long as a block lasts (gloo); this process's number in it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield rank_and_world()[0]
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def rank_and_world() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()


def first_makes(make: Callable[[], R]) -> R:
    """The first process makes and keeps a result; the others wait, and call `make` to find what is kept."""
    rank, _ = rank_and_world()
    if rank:
        barrier()
    made = make()
    if not rank:
        barrier()
    return made


def average(values: Sequence[Tensor], weight: float = 1.0) -> None:
    """Replace tensors by their means over all processes; the weights of all must have the mean 1."""
    if dist.is_initialized():
        for value in values:
            value *= weight
            dist.all_reduce(value)
            value /= dist.get_world_size()


def first(value: Tensor) -> Tensor:
    """The first process's tensor."""
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return value
