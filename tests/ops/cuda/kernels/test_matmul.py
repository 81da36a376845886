"""Matmuls of codes against their eager twin."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.ops import cuda, reference_cuda as twins
from qspec.ops.cuda import CudaWeight
from qspec.ops.reference_cuda import Rows

pytest.importorskip("triton")
BF16, F32 = torch.bfloat16, torch.float32
CASES = [
    (INT8, INT8, PerChannel(), BF16),
    (INT8, INT8, PerTensor(), F32),
    (INT8, INT8, PerGroup(32), F32),
    (INT8, INT4, PerGroup(64), F32),
    (FP8_E4M3, FP8_E4M3, PerChannel(), BF16),
    (FP8_E4M3, FP8_E4M3, PerTensor(), BF16),
    (FP8_E4M3, FP8_E4M3, PerTensor(), F32),
    (BF16, INT4, PerGroup(32), BF16),
    (F32, INT4, PerGroup(64), F32),
    (BF16, INT8, PerChannel(), BF16),
    (F32, INT8, PerGroup(16), F32),
    (F32, FP8_E4M3, PerChannel(), F32),
    (BF16, None, None, BF16),
]
"""Inputs, weights, their scales, outputs."""


def weight_of(
    shape: tuple[int, int], fmt: NumFormat | None, blocks: Granularity | None, dtype: torch.dtype, device: torch.device
) -> CudaWeight:
    w_OK = torch.randn(shape, device=device) * torch.logspace(-2, 2, shape[0], device=device)[:, None]
    if fmt is None or blocks is None:
        return CudaWeight(w_OK.to(dtype), None, None, None, dtype)
    return cuda.pack(quantize_weight(w_OK, fmt, blocks), dtype)


def rows_of(x_NK: Tensor, kind: NumFormat | torch.dtype, scale: Tensor | None = None) -> Rows:
    return (x_NK.to(kind), None) if isinstance(kind, torch.dtype) else twins.quantize_rows(x_NK, kind, scale)


def check(got: Tensor, want: Tensor, x: Rows, weight: CudaWeight) -> None:
    """Equal up to the order of float32 sums, bfloat16's last bit, and what a GPU's tensor cores keep of sums of FP8 (14
    bits on Hopper); relative to the sum of magnitudes."""
    scale = 1.0 if x[1] is None else x[1][:, None]
    size = (x[0].float().abs() @ twins.unpacked(weight).abs().T) * scale
    step = 2.0**-8 if weight.dtype == BF16 else 2.0**-20
    if got.is_cuda and x[0].element_size() == 1 and x[0].is_floating_point():
        step = max(step, 2.0**-11)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert ((got.float() - want.float()).abs() <= step * size + 1e-30).all()


@pytest.mark.parametrize(("kind", "fmt", "blocks", "dtype"), CASES)
def test_few_rows(
    device: torch.device,
    kind: NumFormat | torch.dtype,
    fmt: NumFormat | None,
    blocks: Granularity | None,
    dtype: torch.dtype,
) -> None:
    """Catches tails that are read, nibbles, groups and scales of another row, parts left out, sums in another order."""
    from qspec.ops.cuda import few_rows

    weight = weight_of((37, 128), fmt, blocks, dtype, device)
    group = few_rows.stored_group(weight)
    for rows, splits, scale in ((16, 1, None), (5, 3, torch.tensor([0.03], device=device))):
        x = rows_of(torch.randn(rows, 128, device=device) * 3, kind, scale)
        tiles = few_rows.Tiling(32, min(32, group or 32), splits)
        got = few_rows.few_rows(*x, weight, tiles)
        check(got, twins.linear(x, weight), x, weight)
    assert torch.equal(got, few_rows.few_rows(*x, weight, tiles)), "the same bits again"


@pytest.mark.parametrize("width", [1, 20, 62])
def test_integers_are_exact_for_any_width(device: torch.device, width: int) -> None:
    """Catches INT8 sums that leave int32, a tail of inputs or outputs, and padding that torch's matmul asks for."""
    for rows in (3, 17):
        weight = weight_of((11, width), INT8, PerChannel(), F32, device)
        x = rows_of(torch.randn(rows, width, device=device), INT8)
        assert torch.equal(cuda.linear(x, weight), twins.linear(x, weight))


@pytest.mark.parametrize(("kind", "fmt", "blocks", "dtype"), CASES)
def test_many_rows(
    device: torch.device,
    kind: NumFormat | torch.dtype,
    fmt: NumFormat | None,
    blocks: Granularity | None,
    dtype: torch.dtype,
) -> None:
    """Catches FP8 scales on the wrong axis, padding that is returned, weights decoded under another group's scale."""
    weight = weight_of((9, 192), fmt, blocks, dtype, device)
    for scale in (None, torch.tensor([0.03], device=device)):
        x = rows_of(torch.randn(65, 192, device=device), kind, scale)
        got = cuda.linear(x, weight)
        check(got, twins.linear(x, weight), x, weight)
        assert got.is_contiguous()


def test_huge_and_empty(device: torch.device) -> None:
    """Catches scales that are applied before the sum (and overflow), the scale's floor, and a launch of no program."""
    weight = weight_of((8, 64), INT8, PerChannel(), BF16, device)
    for kind in (INT8, BF16):
        x = rows_of(torch.tensor([[1e30], [0.0], [1e-30]], device=device).expand(3, 64), kind)
        check(cuda.linear(x, weight), twins.linear(x, weight), x, weight)
        none = rows_of(torch.zeros(0, 64, device=device), BF16)
        assert cuda.linear(none, weight).shape == (0, 8)


def test_tilings_cover_the_sum() -> None:
    """Catches a split that reads no input, one that leaves inputs out, and steps across groups."""
    from qspec.ops.cuda import few_rows

    for outputs, width, fmt, group in ((4096, 14336, INT8, None), (128256, 4096, None, None), (24, 96, INT4, 32)):
        codes = torch.empty(outputs, width, dtype=torch.int8 if fmt else BF16, device="meta")
        weight = CudaWeight(codes, torch.empty(outputs, 1, device="meta") if fmt else None, fmt, group)
        for tiles in few_rows.tilings(1, weight, 132):
            assert 1 <= tiles.splits <= max(width // tiles.inputs, 1)
            assert group is None or few_rows.stored_group(weight) % tiles.inputs == 0


def test_inputs_that_do_not_fit_are_refused() -> None:
    """Catches a kernel that reads behind the end of its inputs."""
    weight = CudaWeight(torch.zeros(8, 64), None, None, None, F32)
    with pytest.raises(ValueError, match="60 inputs"):
        cuda.linear((torch.zeros(1, 60), None), weight)
