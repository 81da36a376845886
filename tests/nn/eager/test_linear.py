"""Merged linear layers with weights kept apart: one matmul, one sparse sum, each row as if alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qspec.nn.eager.decoder import EXACT_ROWS
from qspec.nn.eager.linear import merged_linear, picked_rows, taken_rows
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.outliers import split
from qspec.ops.cpu import SparseLinear
from qspec.records import QLinear
from qspec.scheme_table import SCHEMES

K = 96
NAMES = ("W8A8", "FP8", "FP8_DYNAMIC", "W4A16")


def layer(n: int, name: str, share: float, seed: int = 0) -> tuple[QLinear, Tensor]:
    """A layer under a scheme and its float weight; static inputs have scale 1/64."""
    w_NK = torch.randn(n, K, generator=torch.Generator().manual_seed(seed)) ** 3
    scheme = SCHEMES[name].layer(32)
    assert scheme is not None
    weight, apart = scheme.weight, None
    dense_NK = w_NK
    if share:
        dense_NK, apart = split(w_NK, share, weight.fmt, weight.granularity)
    scale = torch.tensor([1 / 64]) if scheme.static_input else None
    codes = quantize_weight(dense_NK, weight.fmt, weight.granularity)
    return QLinear(codes, scheme.activation, scale, None, apart), w_NK


def inputs(t: int) -> Tensor:
    return torch.randn(t, K, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("name", NAMES)
def test_outliers_add_to_the_rounded_part(name: str) -> None:
    """Would catch a sparse part that is dropped, added twice, or given rounded inputs."""
    linear, _ = layer(32, name, 2.0)
    assert linear.outliers is not None
    x_TK = inputs(5)
    dense = merged_linear([replace(linear, outliers=None)], [None], torch.float32)(x_TK)
    want = dense + x_TK @ linear.outliers.dense().T
    torch.testing.assert_close(merged_linear([linear], [None], torch.float32)(x_TK), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shares", [(1.0, 2.0, 1.0), (0.0, 2.0, 0.0)])
def test_members_keep_their_own_outliers(name: str, shares: tuple[float, ...]) -> None:
    """Would catch rows of one member's sparse part that land in another's, or members without one that shift them."""
    members = [layer(n, name, share, i)[0] for i, (n, share) in enumerate(zip((32, 16, 16), shares, strict=True))]
    if name == "FP8":  # merged where their scales are one
        shared = members[0].weight.scale
        members = [replace(m, weight=replace(m.weight, scale=shared)) for m in members]
    bias_N = torch.arange(32.0)
    x_TK = inputs(7)
    merged = merged_linear(members, [bias_N, None, None], torch.float32)(x_TK)
    apart = torch.cat([merged_linear([m], [None], torch.float32)(x_TK) for m in members], 1)
    apart[:, :32] += bias_N
    torch.testing.assert_close(merged, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_their_twins(name: str) -> None:
    """Would catch a fast path that computes another matrix than the eager one."""
    members = [layer(32, name, 2.0, i)[0] for i in range(2)]
    x_TK = inputs(11)
    fast = merged_linear(members, [None, None], torch.float32)(x_TK)
    twin = merged_linear(members, [None, None], torch.float32, "reference")(x_TK)
    bound = 2e-2 if name == "W4A16" else 1e-5  # the INT4 kernel multiplies in bfloat16 (8 bits)
    torch.testing.assert_close(fast, twin, rtol=bound, atol=bound * float(twin.abs().max()))


def test_members_in_float_or_of_other_formats() -> None:
    """Would catch a split matmul that forgets the outliers of its parts."""
    (linear, w_NK), (other, _) = layer(32, "W8A8", 2.0), layer(16, "W4A16", 1.0, 1)
    x_TK = inputs(3)
    merged = merged_linear([linear, w_NK, other], [None] * 3, torch.float32)(x_TK)
    parts = [merged_linear([member], [None], torch.float32)(x_TK) for member in (linear, w_NK, other)]
    torch.testing.assert_close(merged, torch.cat(parts, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.3, 5.0])
@pytest.mark.parametrize("n", [32, 640])
def test_a_row_s_sum_does_not_depend_on_the_others(n: int, share: float) -> None:
    """Would catch a kernel that sums in another order for more rows: verifying drafts would decide differently."""
    linear, _ = layer(n, "W8A8", share)
    assert linear.outliers is not None
    sparse, x_TK = SparseLinear(linear.outliers), inputs(EXACT_ROWS)
    whole = merged_linear([linear], [None], torch.float32)
    alone = [torch.cat([f(x_TK[i : i + 1]) for i in range(EXACT_ROWS)]) for f in (sparse, whole)]
    for t in range(1, EXACT_ROWS + 1):
        assert torch.equal(sparse(x_TK[:t]), alone[0][:t]), t
        assert torch.equal(whole(x_TK[:t]), alone[1][:t]), t


def test_reduced_precision_inputs_come_back_as_they_were() -> None:
    """Would catch a float32 result in a bfloat16 model, or a sum that is rounded before it is added."""
    linear, _ = layer(32, "W8A8", 2.0)
    assert merged_linear([linear], [None], torch.bfloat16)(inputs(3).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("share", [0.0, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_a_range_are_the_same_rows_picked(name: str, share: float) -> None:
    """Would catch a range with scales, outliers or a bias of other rows than it has codes of."""
    linear = replace(layer(32, name, share)[0], bias=torch.arange(32.0))
    for part in (taken_rows(linear, 8, 20), picked_rows(linear, torch.arange(8, 20))):
        assert torch.equal(part.weight.dequantize(), linear.weight.dequantize()[8:20])
        assert part.bias is not None
        assert torch.equal(part.bias, torch.arange(8.0, 20.0))
        if linear.outliers is not None:
            assert part.outliers is not None
            assert torch.equal(part.outliers.dense(), linear.outliers.dense()[8:20])
