"""Compiles kernels for GPUs that are not there: `python compiled.py 90` prints one line per kernel, with its resources.

The operations run as they do on a GPU, on CPU tensors, but a launch only compiles, down to machine code (ptxas).
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

SHARED = {89: 101376, 90: 232448}
"""Bytes of shared memory that one program may take."""


def compile_only(capability: int) -> None:
    """Launches compile for this capability, print what they need, and refuse too much shared memory."""
    seen = set[str]()
    compiled = JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        kernel = compiled(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            shared, text = kernel.metadata.shared, kernel.asm["ptx"]
            assert shared <= SHARED[capability], f"{kernel.name} takes {shared} bytes of shared memory"
            assert len(kernel.asm["cubin"]) > 0
            wide = sum("global.v4.b32" in line or "cp.async.cg" in line for line in text.splitlines())
            print(f"compiled {kernel.name} sm_{capability}: {shared} bytes shared, {wide} loads of 16 bytes")
        return kernel

    JITFunction.run = run
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def matmuls() -> None:
    from qspec.numerics.quantization.affine import quantize_weight
    from qspec.numerics.quantization.blocks import PerChannel, PerGroup
    from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
    from qspec.ops import reference_cuda as twins
    from qspec.ops.cuda import CudaWeight, few_rows, matmul, pack

    w_OK = torch.zeros(192, 512)
    floats = CudaWeight(w_OK.bfloat16(), None, None, None)
    for fmt, blocks in ((INT8, PerChannel()), (FP8_E4M3, PerChannel()), (INT4, PerGroup(128)), (INT4, PerGroup(32))):
        weight = pack(quantize_weight(w_OK, fmt, blocks))
        x = torch.zeros(1, 512).bfloat16(), None
        matmul.linear(x, weight)
        matmul.decoded(weight)
        if fmt != INT4:
            few_rows.few_rows(*twins.quantize_rows(torch.zeros(16, 512), fmt), weight, few_rows.Tiles(64, 128, 4))
        else:
            matmul.linear((torch.zeros(64, 512).bfloat16(), None), weight)
    matmul.linear((torch.zeros(3, 512).bfloat16(), None), floats)


def rows() -> None:
    from qspec.numerics.quantization.formats import FP8_E4M3, INT8
    from qspec.ops.cuda import rows

    x, gain = torch.zeros(1, 4096).bfloat16(), torch.zeros(4096)
    for fmt in (None, FP8_E4M3, INT8):
        rows.add_rms_norm(x, x, gain, 1e-5, fmt, None)
        rows.silu_mul(x, fmt, torch.ones(1) if fmt == FP8_E4M3 else None)


def caches() -> None:
    from qspec.ops.cuda import KVLayer, attention, rope

    def cache(dtype: torch.dtype, *scale: float | torch.Tensor) -> KVLayer:
        return KVLayer(torch.zeros(1, 8, 4096, 128).to(dtype), torch.zeros(1, 8, 4096, 128).to(dtype), *scale)

    by_token = torch.zeros(1, 8, 4096), torch.zeros(1, 8, 4096)
    q, zero = torch.zeros(1, 5, 32, 128).bfloat16(), torch.zeros(1, 5, dtype=torch.long)
    table = torch.zeros(4096, 128).bfloat16()
    for layer in (
        cache(torch.bfloat16),
        cache(torch.float8_e4m3fn, 0.1, 0.1),
        cache(torch.float8_e4m3fn, *by_token),
        cache(torch.int8, *by_token),
    ):
        attention.attend(q, layer, zero[:, 0], zero, 0.1)
        rope.rope_write(q, q[:, :, :8], q[:, :, 8:16], table, table, zero, zero, layer)
    attention.attend(q[:, :1], cache(torch.float32), zero[:, 0], zero[:, :1], 0.1, splits=1)


PARTS = {"rows": rows, "matmuls": matmuls, "caches": caches}

if __name__ == "__main__":
    compile_only(int(sys.argv[1]))
    for part in sys.argv[2:] or PARTS:
        PARTS[part]()
