"""Weights kept apart: which are chosen, and what the two parts hold."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.quantization.outliers import (
    SparseMatrix,
    budget,
    concatenated,
    nothing,
    same_matrix,
    split,
    stored_bytes,
)

CASES = [(INT4, PerGroup(32)), (INT8, PerChannel()), (FP8_E4M3, PerTensor()), (INT4, PerBlock(16, 48))]
SHARES = (0.1, 0.5, 2.0)


def heavy_tailed(n: int = 128, k: int = 192) -> tuple[Tensor, Tensor]:
    """A weight with Student's t (3 degrees of freedom) and second moments of its inputs over two orders."""
    generator = torch.Generator().manual_seed(1)
    chi = torch.randn(3, n, k, generator=generator).square().sum(0) / 3
    w_NK = 0.02 * torch.randn(n, k, generator=generator) / chi.sqrt()
    return w_NK, torch.randn(k, generator=generator).exp().square()


def output_error(w_NK: Tensor, kept_NK: Tensor, moment_K: Tensor, fmt: NumFormat, granularity: Granularity) -> float:
    """Expected squared error of the output when the elements of the mask stay in float."""
    rounded = quantize_weight(w_NK.masked_fill(kept_NK, 0), fmt, granularity).dequantize()
    delta_NK = torch.where(kept_NK, w_NK.half().float(), rounded) - w_NK
    return float((delta_NK.double().square() * moment_K).sum())


def top(score_NK: Tensor, count: int) -> Tensor:
    mask = torch.zeros(score_NK.numel(), dtype=torch.bool)
    mask[score_NK.flatten().topk(count).indices] = True
    return mask.reshape(score_NK.shape)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("fmt", "granularity"), CASES)
def test_no_worse_than_simpler_choices(fmt: NumFormat, granularity: Granularity, share: float) -> None:
    """Would catch a criterion that forgets the inputs (magnitude), or that a block's scale shrinks (own error)."""
    w_NK, moment_K = heavy_tailed()
    count = budget((128, 192), share)
    own = (quantize_weight(w_NK, fmt, granularity).dequantize() - w_NK).square() * moment_K
    _, sparse = split(w_NK, share, fmt, granularity, True, moment_K)
    error = output_error(w_NK, sparse.dense() != 0, moment_K, fmt, granularity)
    assert error < output_error(w_NK, top(w_NK.abs(), count), moment_K, fmt, granularity)
    # FP8 weighs own errors, so the choices are the same there but for ties.
    assert error <= output_error(w_NK, top(own, count), moment_K, fmt, granularity) * (1 + 1e-6)


def test_two_large_weights_of_one_block() -> None:
    """Would catch leave-one-out scores: taking one of two equal extremes out gains nothing, taking both nearly all."""
    w_NK = torch.linspace(-0.1, 0.1, 256).reshape(4, 64)
    w_NK[1, 3], w_NK[1, 40] = 8.0, -8.5
    _, sparse = split(w_NK, 100 * 2 / 256, INT4, PerChannel())
    assert sparse.rows.tolist() == [1, 1]
    assert sparse.indices.tolist() == [3, 40]


@pytest.mark.parametrize(("fmt", "granularity"), CASES)
def test_the_parts_hold_each_value_once(fmt: NumFormat, granularity: Granularity) -> None:
    """Would catch a dense part that still has the outlier, codes there other than that of 0, or a share overrun."""
    w_NK, moment_K = heavy_tailed()
    dense_NK, sparse = split(w_NK, 1.0, fmt, granularity, True, moment_K)
    kept_NK = sparse.dense() != 0
    assert int(kept_NK.sum()) == budget((128, 192), 1.0) == sparse.values.numel()
    assert torch.equal(sparse.dense()[kept_NK], w_NK[kept_NK].half().float())
    assert torch.equal(dense_NK, w_NK.masked_fill(kept_NK, 0))
    assert (quantize_weight(dense_NK, fmt, granularity).codes.float()[kept_NK] == 0).all()


def test_the_share_is_met_on_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a price from a sample that stands for some columns only, or parts that do not fit together."""
    w_NK, moment_K = heavy_tailed(256, 512)
    whole = split(w_NK, 0.5, INT4, PerGroup(32), True, moment_K)[1]
    monkeypatch.setattr("qspec.numerics.quantization.outliers.SAMPLE", 1 << 14)
    monkeypatch.setattr("qspec.numerics.quantization.outliers.CHUNK", 1 << 12)
    sampled = split(w_NK, 0.5, INT4, PerGroup(32), True, moment_K)[1]
    errors = [output_error(w_NK, s.dense() != 0, moment_K, INT4, PerGroup(32)) for s in (whole, sampled)]
    assert sampled.values.numel() >= 0.95 * budget((256, 512), 0.5)  # an eighth of the blocks finds the price to 5 %
    assert errors[1] < 1.02 * errors[0]


def test_without_statistics_all_inputs_are_alike() -> None:
    """Would catch a default that is not a second moment of 1."""
    w_NK, _ = heavy_tailed()
    assert same_matrix(
        split(w_NK, 0.5, INT8, PerChannel())[1], split(w_NK, 0.5, INT8, PerChannel(), True, torch.ones(192))[1]
    )


@pytest.mark.parametrize(("fmt", "granularity"), CASES)
def test_exact_weights_have_no_outliers(fmt: NumFormat, granularity: Granularity) -> None:
    """Would catch a search that fails without errors, or keeps apart what rounding does not touch."""
    w_NK = torch.zeros(32, 96)
    w_NK[:, ::2] = 1.0 * fmt.qmax  # scale 1 (or its power of two), so that every value is a code
    for exact_NK in (w_NK, torch.zeros(32, 96)):
        dense_NK, sparse = split(exact_NK, 5.0, fmt, granularity)
        assert sparse.values.numel() == 0
        assert torch.equal(dense_NK, exact_NK)


def test_matmul_is_that_of_the_dense_matrix() -> None:
    """Would catch rows and columns mixed up, or an empty row that moves the next ones."""
    w_NK = torch.zeros(5, 7)
    w_NK[0, 6], w_NK[3, 0], w_NK[3, 5] = 1.5, -2.0, 0.25
    sparse = SparseMatrix.from_dense(w_NK, w_NK != 0)
    assert sparse.indptr.tolist() == [0, 1, 1, 1, 3, 3]
    assert torch.equal(sparse.dense(), w_NK)
    x_TK = torch.randn(3, 7)
    assert torch.allclose(sparse.matmul(x_TK), x_TK @ w_NK.T)
    both = concatenated([sparse, nothing((2, 7)), sparse])
    assert torch.equal(both.dense(), torch.cat([w_NK, torch.zeros(2, 7), w_NK]))


def test_bytes_are_those_of_the_parts() -> None:
    """Would catch indices or row ends that are not counted, or wide ones that are counted narrow."""
    w_NK, _ = heavy_tailed()
    sparse = split(w_NK, 1.0, INT4, PerGroup(32))[1]
    parts = (sparse.indptr, sparse.stored_indices, sparse.values)
    assert sparse.nbytes == sum(part.nbytes for part in parts) == stored_bytes((128, 192), 1.0)
    assert stored_bytes((2, 1 << 15), 1.0) == budget((2, 1 << 15), 1.0) * (2 + 4) + 3 * 4
    assert stored_bytes((128, 192), 0.0) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"indptr": torch.tensor([0, 2, 1, 3])},
        {"indptr": torch.tensor([0, 1, 2, 4])},
        {"indices": torch.tensor([0, 1, 7])},
        {"indices": torch.tensor([0, -1, 2])},
        {"values": torch.ones(2)},
    ],
)
def test_parts_that_are_no_matrix(change: dict[str, Tensor]) -> None:
    """Would catch a damaged file whose indices lead out of the input at run time."""
    good = SparseMatrix(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2]), torch.ones(3), 7)
    with pytest.raises(ValueError, match=r"indices|row ends"):
        replace(good, **change)


@pytest.mark.parametrize(
    ("indptr", "indices"),
    [
        ([0, 2, 3], [1, 1, 0]),
        ([0, 2, 3], [2, 1, 0]),
        ([0, 2, 3], [0, 4, 0]),
        ([0, 2, 3], [-1, 2, 0]),
        ([0, 3, 2], [0, 1, 2]),
        ([1, 2, 3], [0, 1, 2]),
    ],
)
def test_indices_that_describe_no_matrix(indptr: list[int], indices: list[int]) -> None:
    """Would catch columns outside of the input, or named twice: one reader adds them, another takes the last."""
    with pytest.raises(ValueError, match=r"sparse|row ends"):
        SparseMatrix(torch.tensor(indptr).int(), torch.tensor(indices).int(), torch.ones(3), 4)


def test_rows_without_outliers_between_others() -> None:
    """Would catch a first column of a row that counts as falling behind the row before, or behind an empty one."""
    matrix = SparseMatrix(torch.tensor([0, 2, 2, 3]).int(), torch.tensor([1, 3, 0]).int(), torch.ones(3), 4)
    assert matrix.dense().sum() == 3
