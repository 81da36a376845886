"""Row kernels in Triton's interpreter (on a GPU where there is one) against their eager twins."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CODE = """
import torch
from qspec.numerics.formats import FP8_E4M3, FP8_E5M2, INT8
from qspec.ops import cuda, reference_cuda as twins

torch.manual_seed(0)
count = 0

def codes(x):
    return x.view(torch.uint8).int() if x.element_size() == 1 and x.is_floating_point() else x

def near(got, want, fmt):
    # sums and exp may differ in the last bit: a value at a tie goes one step the other way, and rarely
    global count
    count += 1
    if got[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)
    step = (codes(got[0]) - codes(want[0])).abs()
    if fmt is None:
        torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-6)
    else:
        assert step.max() <= 1 and (step > 0).float().mean() < 0.02, step

for fmt in (INT8, FP8_E4M3, FP8_E5M2):
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.storage).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    hard = torch.cat((grid, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), torch.tensor([1e30, -1e30, 1e-30, -0.0])))
    one = torch.ones(1)
    got, want = cuda.quantize_rows(hard[None], fmt, one), twins.quantize_rows(hard[None], fmt, one)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)), fmt
    for width in (1, 7, 64, 100):
        x = torch.randn(3, width) * torch.tensor([[1.0], [1e4], [0.0]])
        for y in (x, x.bfloat16()):
            got, want = cuda.quantize_rows(y, fmt), twins.quantize_rows(y, fmt)
            assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])
            count += 1

for fmt in (None, INT8, FP8_E4M3):
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (None, torch.tensor([0.02])):
            if fmt is None and scale is not None:
                continue
            x, r, w = torch.randn(4, 100).to(dtype), torch.randn(4, 100).to(dtype), torch.rand(100).to(dtype)
            for residual in (None, r):
                args = (x, residual, w, 1e-5, fmt, scale)
                got, want = cuda.add_rms_norm(*args), twins.add_rms_norm(*args)
                near(got, want, fmt)
                assert torch.equal(got[2], want[2])
            near(cuda.silu_mul(x, fmt, scale), twins.silu_mul(x, fmt, scale), fmt)
print("interpreted", count)
"""


def test_row_kernels_equal_their_twins() -> None:
    """Catches FP8 or bfloat16 ties not to even, no saturation, a division by 0, a tail that is read, swapped halves.

    In a process of its own: Triton's interpreter is chosen when triton is imported.
    """
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "interpreted 54"
