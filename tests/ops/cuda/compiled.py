"""Compiles kernels for GPUs that are not there: `python compiled.py 90` prints one line of JSON per kernel.

The operations run as they do on a GPU, on CPU tensors of the shapes of a 70B model, but a launch only compiles, down to
machine code (ptxas). Their memory is never touched.
"""

from contextlib import redirect_stdout
import io
import json
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.ops.cuda import CudaWeight, KVLayer, attention, few_rows, matmul, rope, rows

LONG = os.environ.get("QSPEC_LONG") == "1"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, INTERMEDIATE, HEADS, GROUPS, HEAD = 8192, 28672, 64, 8, 128


def compile_only(capability: int) -> None:
    """Launches compile for this capability, and print what became of each kernel."""
    seen = set[str]()
    compiled = JITFunction.run
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        with redirect_stdout(io.StringIO()) as log:
            kernel = compiled(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"name": kernel.name, **resources(kernel, log.getvalue()), **variant(kwargs)}))
        return kernel

    JITFunction.run = run
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def resources(kernel: CompiledKernel, log: str) -> dict[str, Any]:
    """Bytes of shared memory and of spilled registers, registers, products by the tensor cores, loads of 16 bytes."""
    text = kernel.asm["ptx"]
    assert len(kernel.asm["cubin"]) > 0
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    return {
        "shared": kernel.metadata.shared,
        "spilled": int(spilled),
        "registers": int(registers),
        "products": sorted(set(re.findall(r"mma(?:_async)?\.sync\.aligned\.([\w.]+)", text))),
        "wide": sum("global.v4.b32" in line or "cp.async.cg" in line for line in text.splitlines()),
    }


def variant(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The constants that a kernel was compiled for."""
    found = {name: value for name, value in kwargs.items() if isinstance(value, bool | int) and name.isupper()}
    return found | {"DOT": str(kwargs.get("DOT"))}


def bytes_of(*size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(size, dtype=torch.uint8).view(dtype)


def weight(fmt: NumFormat | None, group: int | None, outputs: int, inputs: int) -> CudaWeight:
    if fmt is None:
        return CudaWeight(torch.empty(outputs, inputs, dtype=BF16), None, None, None)
    codes = bytes_of(outputs, inputs // 2) if fmt == INT4 else bytes_of(outputs, inputs, dtype=fmt.storage)
    scale = torch.empty(outputs, inputs // group) if group else torch.empty(outputs)
    return CudaWeight(codes, scale, fmt, group)


def matmuls() -> None:
    """By weights and inputs; every way to cut them that is tried on a GPU."""
    kinds: list[tuple[NumFormat | None, int | None, torch.dtype]] = [
        (None, None, BF16),
        (INT8, None, torch.int8),
        (FP8_E4M3, None, FP8),
        (INT4, 128, BF16),
        (INT8, None, BF16),
    ]
    if LONG:
        kinds += [(FP8_E4M3, None, BF16), (INT4, 128, torch.int8), (INT8, 128, BF16), (INT4, 32, BF16)]
    for fmt, group, kind in kinds:
        w = weight(fmt, group, HIDDEN, INTERMEDIATE)
        for count in (1, 16, 64) if LONG else (64,) if fmt == INT4 else (16,):
            x = torch.empty(count, INTERMEDIATE * kind.itemsize, dtype=torch.uint8).view(kind)
            scale_N = None if kind == BF16 else torch.empty(count)
            if few_rows.product(kind, w) is not None and (count <= matmul.FEW or kind == BF16):
                ways = few_rows.tilings(count, w, 132)
                for tiles in ways if LONG else ways[:: 2 if kind == FP8 else 4]:
                    few_rows.few_rows(x, scale_N, w, tiles)
        if fmt is not None and kind == BF16:
            matmul.decoded(w)


def norms() -> None:
    x, long, one = torch.empty(1, HIDDEN, dtype=BF16), torch.empty(1, 2 * INTERMEDIATE, dtype=BF16), torch.ones(1)
    for fmt, scale in ((None, None), (FP8_E4M3, one), (INT8, None)):
        for residual in (None, x) if LONG or scale is not None else (x,):
            rows.add_rms_norm(x, residual, torch.empty(HIDDEN), 1e-5, fmt, scale)
        rows.silu_mul(long, fmt, scale)
    rows.quantize_rows(x, FP8_E4M3, None)


def caches() -> None:
    """By what a cache holds; few query rows, a whole tile of them, and parts or one program for all."""

    def cache(dtype: torch.dtype, *scale: float | Tensor) -> KVLayer:
        keys = torch.empty(1, GROUPS, 4096, HEAD, dtype=dtype)
        return KVLayer(keys, torch.empty_like(keys), *scale)

    by_token, table = [torch.empty(1, GROUPS, 4096) for _ in range(2)], torch.empty(4096, HEAD, dtype=BF16)
    kinds = cache(BF16), cache(FP8, 0.1, 0.1), cache(torch.int8, *by_token)
    for count in (1, 3, 64) if LONG else (1, 64):
        q, zero = torch.empty(1, count, HEADS, HEAD, dtype=BF16), torch.zeros(1, count, dtype=torch.long)
        for layer in (*kinds, cache(FP8, *by_token)) if LONG else kinds[: 3 if count == 1 else 2]:
            for splits in (None, 1) if LONG else (None if count == 1 else 1,):
                attention.attend(q, layer, zero[:, 0], zero, 0.1, splits)
            if count == 1:
                rope.rope_write(q, q[:, :, :8], q[:, :, 8:16], table, table, zero, zero, layer)
    attention.attend(q[:, :1], cache(torch.float32), zero[:, 0], zero[:, :1], 0.1, splits=1)


PARTS = {"norms": norms, "matmuls": matmuls, "caches": caches}

if __name__ == "__main__":
    compile_only(int(sys.argv[1]))
    for part in sys.argv[2:] or PARTS:
        PARTS[part]()
