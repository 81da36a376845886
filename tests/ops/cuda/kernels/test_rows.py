"""Row kernels against their eager twins."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.formats import FP8_E4M3, INT8, NumFormat
from qspec.ops import cuda, reference_cuda as twins
from qspec.ops.reference_cuda import Rows

FORMATS = (INT8, FP8_E4M3)


def steps(got: Tensor, want: Tensor) -> Tensor:
    """How many codes of a format lie between two."""
    a, b = (x.view(torch.uint8).int() if x.is_floating_point() else x.int() for x in (got, want))
    return (a - b).abs()


def check(got: Rows, want: Rows, fmt: NumFormat | None) -> None:
    """Equal but for the last bit of sums and exp: a value at a tie goes one step the other way, and rarely."""
    if fmt is None:
        torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2**-7, atol=1e-6)
        return
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)
    apart = steps(got[0], want[0])
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.02


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_code_and_tie_under_a_given_scale(device: torch.device, fmt: NumFormat) -> None:
    """Catches ties not to even, a lost subnormal, and no saturation."""
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.storage).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    hard = torch.cat((grid, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), torch.tensor([1e30, -1e30, 1e-30, -0.0])))
    x, one = hard.expand(2, -1).to(device), torch.ones(1, device=device)
    got, want = cuda.quantize_rows(x, fmt, one), twins.quantize_rows(x, fmt, one)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert got[1].stride() == (0,), "one scale, which `matmul` recognises"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_rows_under_their_own_range(device: torch.device, fmt: NumFormat, width: int) -> None:
    """Catches a division by 0, a tail that is read, and a scale of another row."""
    x = torch.randn(3, width, device=device) * torch.tensor([[1.0], [1e4], [0.0]], device=device)
    for y in (x, x.bfloat16()):
        got, want = cuda.quantize_rows(y, fmt), twins.quantize_rows(y, fmt)
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [None, INT8, FP8_E4M3])
def test_norms_and_activations(device: torch.device, fmt: NumFormat | None, dtype: torch.dtype) -> None:
    """Catches swapped halves, a residual read before it is rounded, and a stored scale that is ignored."""
    x, residual, gain = (torch.randn(4, 100, device=device).to(dtype) for _ in range(3))
    for scale in (None, torch.tensor([0.02], device=device)):
        if fmt is None and scale is not None:
            continue
        for added in (None, residual):
            got = cuda.add_rms_norm(x, added, gain[0], 1e-5, fmt, scale)
            want = twins.add_rms_norm(x, added, gain[0], 1e-5, fmt, scale)
            check(got[:2], want[:2], fmt)
            assert torch.equal(got[2], want[2])
        check(cuda.silu_mul(x, fmt, scale), twins.silu_mul(x, fmt, scale), fmt)


@pytest.mark.parametrize("fmt", [None, INT8, FP8_E4M3])
def test_rows_of_several_blocks(device: torch.device, fmt: NumFormat | None) -> None:
    """Catches a block of an MLP's row that is left out, read past its end, or not seen by the whole row's range."""
    from qspec.ops.cuda import rows

    x = torch.randn(2, 2 * (2 * rows.SILU_BLOCK + 3), device=device).bfloat16()
    x[1, rows.SILU_BLOCK : rows.SILU_BLOCK + 2] = 50.0  # the largest lie in the second block and in the last
    x[0, 2 * rows.SILU_BLOCK + 2] = 50.0
    for scale in (None,) if fmt is None else (None, torch.tensor([0.02], device=device)):
        check(cuda.silu_mul(x, fmt, scale), twins.silu_mul(x, fmt, scale), fmt)


def test_nan_stays_nan(device: torch.device) -> None:
    """Catches a NaN of a GPU, all ones, that bfloat16's rounding turns into -0."""
    nan = torch.tensor([[0x7FFFFFFF, -1, 0x7FC00000]], dtype=torch.int32).view(torch.float32).to(device)
    normed, _, total = cuda.add_rms_norm(nan.bfloat16(), nan.bfloat16(), torch.ones(3, device=device), 1e-5, None)
    assert normed.isnan().all()
    assert total.isnan().all()
