"""Rotations: Hadamard matrices of every order that models need, their transform, random matrices elsewhere."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.rotation import (
    hadamard_transform,
    in_blocks,
    paley,
    rotation,
    split_order,
)

# Paley I over primes (12, 20, 44, 60), over prime cubes (28, 344), Paley II (36, 76, 148), over squares (20 * 5 = 100).
PALEY = (12, 20, 28, 36, 44, 60, 76, 100, 108, 148, 344)
# float64: sums of up to 2^11 terms of 1/sqrt(K), each good to 1.1e-16.
EXACT = 1e-12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def hadamard_matrix(size: int) -> Tensor:
    """Hadamard matrix `[K, K]` of ±1, float64: Sylvester's `2^k` (x) the dense factor."""
    split = split_order(size)
    assert split is not None, f"no Hadamard matrix of order {size}"
    power, rest = split
    h_KK = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power.bit_length() - 1):
        h_KK = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h_KK)
    return torch.kron(h_KK, paley(rest)) if rest > 1 else h_KK


@pytest.mark.parametrize("size", [1, 2, 4, 64, *PALEY, 96, 576, 896, 1536])
def test_hadamard_matrices(size: int) -> None:
    """Catches a quadratic character of the wrong field, a border of the wrong sign, a product of unequal orders."""
    h_KK = hadamard_matrix(size)
    assert h_KK.dtype == torch.float64
    assert set(h_KK.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(h_KK @ h_KK.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize(
    ("size", "split"),
    [
        (576, (16, 36)),  # SmolLM2-135M
        (896, (32, 28)),  # Qwen2.5-0.5B
        (960, (16, 60)),  # SmolLM2-360M
        (1152, (32, 36)),  # Gemma 3 1B
        (1536, (128, 12)),
        (4096, (4096, 1)),
        (4864, (64, 76)),
        (5120, (256, 20)),
        (8960, (64, 140)),
        (11008, (32, 344)),  # Llama 2 7B
        (13824, (128, 108)),
        (14336, (512, 28)),  # Llama 3 8B
        (18944, (128, 148)),  # Qwen2.5-7B
        (29568, (32, 924)),  # Qwen2.5-72B
    ],
)
def test_orders_of_real_models(size: int, split: tuple[int, int]) -> None:
    """Catches an order of a known model that falls back to a dense random matrix, or to a larger dense factor."""
    assert split_order(size) == split


@pytest.mark.parametrize("size", [1, 3, 6, 14, 50, 4 * 23])
def test_orders_without_a_matrix(size: int) -> None:
    """Catches a matrix claimed for orders that have none, or none of this kind (92)."""
    assert split_order(size) == ((1, 1) if size == 1 else None)


@pytest.mark.parametrize("size", [1, 8, 12, 96, 576])
def test_the_transform_is_the_product(size: int) -> None:
    """Catches a butterfly over the wrong axis, Paley's matrix transposed, or a missing 1/sqrt(K)."""
    x = draw(2, 3, size)
    for row_exact in (True, False):
        y = hadamard_transform(x, row_exact)
        torch.testing.assert_close(y, x @ (hadamard_matrix(size) / size**0.5), rtol=0, atol=EXACT)
    norms = hadamard_transform(x).norm(dim=-1)
    torch.testing.assert_close(norms, x.norm(dim=-1), rtol=EXACT, atol=0)


@pytest.mark.parametrize("size", [64, 96, 148, 1536])
def test_rows_do_not_depend_on_each_other(size: int) -> None:
    """Catches sums whose order changes with the number of rows: verification would then differ from plain decoding."""
    x = draw(67, size).float()
    together = hadamard_transform(x)
    assert all(torch.equal(hadamard_transform(x[i : i + 1])[0], together[i]) for i in range(len(x)))
    assert torch.equal(hadamard_transform(x[3:20]), together[3:20])


def test_short_dtypes_are_summed_in_float32() -> None:
    """Catches a bfloat16 butterfly: ten roundings instead of one."""
    x = draw(4, 1024).bfloat16()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.float()).bfloat16())


@pytest.mark.parametrize("size", [14, 50, 64, 576])
def test_rotations_are_orthogonal(size: int) -> None:
    """Catches signs that are not ±1, a QR factor with the scale left in, or `apply` of the transpose."""
    turn = rotation(size, 1)
    q_KK = turn.matrix()
    torch.testing.assert_close(q_KK @ q_KK.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=EXACT)
    x = draw(3, size)
    torch.testing.assert_close(turn.apply(x), x @ q_KK, rtol=0, atol=EXACT)


@pytest.mark.parametrize("size", [50, 64])
def test_seeds(size: int) -> None:
    """Catches a rotation that differs between the pieces of a model, or does not depend on its seed."""
    assert torch.equal(rotation(size, 7).matrix(), rotation(size, 7).matrix())
    assert not torch.equal(rotation(size, 7).matrix(), rotation(size, 8).matrix())


def test_random_matrices_have_no_preferred_signs() -> None:
    """Catches QR without its sign fix: Householder's diagonal is then always of one sign."""
    diagonals = torch.stack([rotation(14, seed).matrix().diagonal() for seed in range(60)])
    assert (diagonals.mean(0).abs() < 0.15).all()  # of 60 draws with spread 14^-0.5: 4 standard errors


def test_an_outlier_is_spread_evenly() -> None:
    """Catches a rotation that leaves a lone channel concentrated: spreading it is what it is for."""
    x = torch.zeros(1, 576, dtype=torch.float64)
    x[0, 17] = 100.0
    spread = rotation(576, 0).apply(x).abs()
    torch.testing.assert_close(spread, torch.full_like(spread, 100 / 24), rtol=EXACT, atol=0)


def test_blocks_cover_all_rows() -> None:
    """Catches a last block that is dropped, or a shape lost."""
    x = draw(3, 300, 1000)
    assert torch.equal(in_blocks(x, lambda block: 2 * block), 2 * x)
