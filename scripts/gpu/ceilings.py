"""What a device can do at most, measured: bytes and matrix products per second. `gpu_bench` divides by them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch

REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes/s, the best of reading and copying; products: operations/s by format, None where it cannot."""

    read: float
    copy: float
    products: dict[str, float | None]
    notes: dict[str, str]

    @property
    def bandwidth(self) -> float:
        return max(self.read, self.copy)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, inner: int = 1) -> float:
    """Median time of a call, the device waited for before and after `inner` of them in a row."""
    call()
    wait(device)
    times = list[float]()
    for _ in range(REPEATS):
        begin = perf_counter()
        for _ in range(inner):
            call()
        wait(device)
        times.append((perf_counter() - begin) / inner)
    return median(times)


def ceilings(device: torch.device, dry: bool) -> Ceilings:
    """Buffers of 4 GiB, products of 8192 x 8192; tiny ones in a dry run."""
    size, n, inner = (1 << 20, 64, 1) if dry else (4 << 30, 8192, 10)
    source, target = (torch.zeros(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    read = size / seconds(source.sum, device, inner)
    copy = 2 * size / seconds(partial(target.copy_, source), device, inner)
    notes, products = dict[str, str](), dict[str, float | None]()
    for name, make in (("bf16", _bf16), ("fp8", _fp8), ("int8", _int8)):
        try:
            products[name] = 2 * n**3 / seconds(make(n, device), device, inner)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            products[name], notes[name] = None, str(error).partition("\n")[0]
    return Ceilings(read, copy, products, notes)


def _bf16(n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    return lambda: a @ b


def _fp8(n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8(n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randint(-128, 127, (n, n), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())
