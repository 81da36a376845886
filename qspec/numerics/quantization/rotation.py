"""Orthogonal rotations: Hadamard matrices of many orders, their fast transform, and random matrices elsewhere.

Orders are `2^k * s`: Sylvester's doubling times a Paley matrix of the smallest order `s` that exists (Paley, 1933).
K is the rotated dimension. Everything offline is float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
import math

import torch
from torch import Tensor

MOST_DENSE = 1024
"""Largest order of the dense factor that is looked for: the transform takes that many steps for it."""
_BLOCK = 1 << 15
"""Elements that are rotated at once offline: they and their copies stay in cache."""


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix `Q` of order `size`: `apply` is `x Q`. It is seeded signs times a Hadamard matrix.

    dense_KK: `Q` itself, where no Hadamard matrix of this order is known here.
    """

    size: int
    signs_K: Tensor
    dense_KK: Tensor | None

    def apply(self, x: Tensor) -> Tensor:
        """`x Q` over the last dimension of a float64 tensor."""
        return x @ self.dense_KK if self.dense_KK is not None else hadamard_transform(x * self.signs_K, False)

    def matrix(self) -> Tensor:
        """`Q`, `[K, K]` float64."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))


def rotation(size: int, seed: int) -> Rotation:
    """The rotation of this order and seed, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    if split_order(size) is None:
        return Rotation(size, torch.ones(size, dtype=torch.float64), random_orthogonal(size, generator))
    signs_K = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return Rotation(size, signs_K, None)


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Haar-distributed orthogonal matrix `[K, K]`, float64: QR of a Gaussian matrix, signs fixed by R's diagonal."""
    q_KK: Tensor
    q_KK, r_KK = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q_KK * torch.where(r_KK.diagonal() < 0, -1.0, 1.0)


def in_blocks(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """`f` over the rows of `x`, a block of them at a time; `f` keeps the shape."""
    rows_TK = x.reshape(-1, x.shape[-1])
    blocks = rows_TK.split(max(1, _BLOCK // x.shape[-1]))
    return torch.cat([f(block) for block in blocks]).reshape(x.shape)


def split_order(size: int) -> tuple[int, int] | None:
    """`(2^k, s)` with the smallest Paley order `s` (or 1); None where there is no such product."""
    power = size & -size
    while power >= 1:
        rest = size // power
        if rest == 1 or (rest <= MOST_DENSE and _has_paley(rest)):
            return power, rest
        power //= 2
    return None


def hadamard_transform(x: Tensor, row_exact: bool = True) -> Tensor:
    """`x H / sqrt(K)` over the last dimension, in `x`'s dtype (float32 inside for shorter ones).

    Only additions in a fixed order: a row's result does not depend, to the bit, on the rows beside it. Without
    `row_exact` the dense factor is a matmul: several times faster, for weights.
    """
    size = x.shape[-1]
    split = split_order(size)
    assert split is not None, f"no Hadamard matrix of order {size}"
    power, rest = split
    y = x.reshape(-1, power, rest).to(torch.promote_types(x.dtype, torch.float32))
    if rest > 1:
        signs_SS = paley(rest).to(y.dtype)
        y = _times_signs(y, signs_SS) if row_exact else y @ signs_SS
    half = 1
    while half < power:
        pairs = y.reshape(-1, power // (2 * half), 2, half * rest)
        left, right = pairs.unbind(2)
        y = torch.stack((left + right, left - right), 2)
        half *= 2
    return (y.reshape(x.shape) / math.sqrt(size)).to(x.dtype)


def _times_signs(x: Tensor, signs_SS: Tensor) -> Tensor:
    """`x signs` for a matrix of ±1, summed in the order of its rows."""
    y = x[..., :1] * signs_SS[0]
    for i in range(1, signs_SS.shape[0]):
        y.addcmul_(x[..., i : i + 1], signs_SS[i])
    return y


@lru_cache(maxsize=16)
def paley(order: int) -> Tensor:
    """Paley's Hadamard matrix of ±1, float64: construction I (`q + 1`, q = 3 mod 4), else II (`2 (q + 1)`)."""
    if (order - 1) % 4 == 3 and _prime_power(order - 1):
        skew = _bordered(order - 1, -1.0)
        return skew + torch.eye(order, dtype=torch.float64)
    conference = _bordered(order // 2 - 1, 1.0)
    one, two = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]], dtype=torch.float64)
    return torch.kron(conference, one) + torch.kron(torch.eye(order // 2, dtype=torch.float64), two)


def _has_paley(order: int) -> bool:
    if order % 4:
        return False
    first = (order - 1) % 4 == 3 and _prime_power(order - 1) is not None
    return first or ((order // 2 - 1) % 4 == 1 and _prime_power(order // 2 - 1) is not None)


def _bordered(q: int, corner: float) -> Tensor:
    """`[[0, 1], [corner, X]]` with the quadratic character `X[a, b] = chi(a - b)` of the field of `q` elements."""
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0], matrix[1:, 1:] = 1.0, corner, _characters(q)
    return matrix


def _characters(q: int) -> Tensor:
    """chi(a - b) for all elements, `[q, q]`: 0 on the diagonal, 1 for squares, else -1."""
    prime_power = _prime_power(q)
    assert prime_power is not None
    p, degree = prime_power
    weights = torch.tensor([p**i for i in range(degree)])
    digits_QD = torch.arange(q)[:, None] // weights % p
    chi = -torch.ones(q, dtype=torch.float64)
    chi[(_squares(digits_QD, p, degree) % p * weights).sum(1)] = 1.0
    chi[0] = 0.0
    return chi[((digits_QD[:, None] - digits_QD[None]) % p * weights).sum(-1)]


def _squares(digits_QD: Tensor, p: int, degree: int) -> Tensor:
    """Squares of polynomials over GF(p), modulo an irreducible one, `[q, degree]`."""
    modulus = _irreducible(p, degree)
    terms = [torch.zeros(len(digits_QD), dtype=torch.int64) for _ in range(2 * degree - 1)]
    for i, j in product(range(degree), repeat=2):
        terms[i + j] = terms[i + j] + digits_QD[:, i] * digits_QD[:, j]
    for top in range(2 * degree - 2, degree - 1, -1):
        for i, coefficient in enumerate(modulus):
            terms[top - degree + i] = terms[top - degree + i] - terms[top] * coefficient
    return torch.stack(terms[:degree], 1)


def _irreducible(p: int, degree: int) -> tuple[int, ...]:
    """Lower coefficients of a monic polynomial without roots: irreducible, as its degree is at most 3."""

    def rooted(lower: tuple[int, ...]) -> bool:
        return any(sum(c * at**i for i, c in enumerate((*lower, 1))) % p == 0 for at in range(p))

    return next(lower for lower in product(range(p), repeat=degree) if degree == 1 or not rooted(lower))


def _prime_power(q: int) -> tuple[int, int] | None:
    """`(p, d)` with `q = p^d`, p an odd prime, d at most 3; None for other numbers."""
    for degree in (1, 2, 3):
        p = round(q ** (1 / degree))
        if p**degree == q and p > 2 and all(p % i for i in range(2, math.isqrt(p) + 1)):
            return p, degree
    return None
