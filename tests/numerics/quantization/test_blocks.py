"""Blocks hold what the granularity says, and come back whole."""

from hypothesis import given, strategies as st
import pytest
import torch

from qspec.numerics.quantization.blocks import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    from_blocks,
    scale_shape,
    to_blocks,
)

sizes = st.integers(1, 9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, int], Granularity]:
    """A matrix shape and a granularity that it divides into; tiles may overhang both edges."""
    n, k = draw(sizes), draw(sizes)
    groups = st.sampled_from([g for g in range(1, k + 1) if k % g == 0]).map(PerGroup)
    simple: st.SearchStrategy[Granularity] = st.sampled_from([PerTensor(), PerChannel(), PerToken()])
    return (n, k), draw(simple | groups | st.builds(PerBlock, sizes, sizes))


@given(cases())
def test_round_trip(case: tuple[tuple[int, int], Granularity]) -> None:
    """Catches a transposed tile, or padding of a ragged edge that leaks into the matrix."""
    shape, granularity = case
    x_NK = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    assert torch.equal(from_blocks(to_blocks(x_NK, granularity), shape, granularity), x_NK)


@given(cases())
def test_one_block_per_scale(case: tuple[tuple[int, int], Granularity]) -> None:
    """Catches a scale tensor whose shape does not count the blocks."""
    shape, granularity = case
    scales = torch.Size(scale_shape(shape, granularity)).numel()
    assert to_blocks(torch.zeros(shape), granularity).shape[0] == scales


@given(sizes, sizes, sizes, sizes)
def test_tiles_lie_where_their_scale_does(n: int, k: int, rows: int, cols: int) -> None:
    """Catches tiles in column-major order, which a round trip alone cannot see."""
    x_NK = torch.arange(1.0, 1 + n * k).reshape(n, k)
    amax = to_blocks(x_NK, PerBlock(rows, cols)).amax(1).reshape(scale_shape((n, k), PerBlock(rows, cols)))
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            assert amax[i, j] == x_NK[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols].max()


def test_rows_and_groups_keep_their_order() -> None:
    """Catches groups that run down columns instead of along rows."""
    x_NK = torch.arange(8.0).reshape(2, 4)
    assert to_blocks(x_NK, PerGroup(2)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert to_blocks(x_NK, PerChannel()).tolist() == x_NK.tolist()
    assert to_blocks(x_NK, PerTensor()).tolist() == [list(range(8))]


def test_group_that_does_not_divide() -> None:
    """Catches a ragged last group that would silently straddle two rows."""
    with pytest.raises(ValueError, match="10 columns do not divide into groups of 4"):
        to_blocks(torch.zeros(2, 10), PerGroup(4))
