"""Error feedback (GPTQ, arXiv 2210.17323): round a weight column by column, later columns make up for earlier errors.

Inputs X `[T, K]` with second moments `H = X^T X` turn a rounding error D `[N, K]` into the output error
`trace(D H D^T)`. Once column j is off by `d_j`, it is least when the columns after it move by
`-(d_j / U[j, j]) U[j, j+1:]`, where `H^-1 = U^T U` with U upper triangular (the paper's Cholesky form).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import from_blocks, to_blocks
from qspec.numerics.quantization.codes import dequantize_blocks, quantize_blocks
from qspec.numerics.quantization.formats import NumFormat

DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal, as in the paper."""
RAISES = 4
"""How often damping is raised tenfold before a matrix counts as hopeless."""
BLOCK = 128
"""Columns after which the rest of the matrix is updated: a matmul in place of that many rank-one updates."""
ROWS = 2048
"""Rows of a weight worked on at once: temporaries stay small, and a block of columns in cache."""


@dataclass(frozen=True)
class Factor:
    """`(H + damping * mean diagonal)^-1 = U^T U`, rows and columns of H in `order_K` (falling diagonal)."""

    order_K: Tensor
    upper_KK: Tensor
    damping: float


def factor(hessian_KK: Tensor, damping: float = DAMPING) -> Factor | None:
    """Factor the second moments of a layer's inputs; damping is raised tenfold while they are not positive definite.

    None when that does not help (`RAISES` times) or an entry is not finite. Inputs that were always zero get a one on
    the diagonal: they take and give no feedback.
    """
    diagonal_K = hessian_KK.diagonal().double()
    order_K = diagonal_K.argsort(descending=True, stable=True)
    sorted_KK = hessian_KK[order_K][:, order_K].double()
    sorted_KK.diagonal().add_((diagonal_K[order_K] == 0).double())
    for _ in range(RAISES + 1):
        upper_KK = _inverse_factor(sorted_KK, damping * float(diagonal_K.mean()))
        if upper_KK is not None:
            return Factor(order_K, upper_KK.float(), damping)
        damping *= 10
    return None


def feed_back(w_NK: Tensor, rounded: QTensor, factor: Factor) -> QTensor:
    """`rounded` with codes that make up for each other's errors. Its scales stay, so groups stay contiguous."""
    scale_NK = _per_element(rounded.scale, rounded)
    zero_NK = scale_NK if rounded.zero_point is None else _per_element(rounded.zero_point, rounded)
    parts = zip(w_NK.split(ROWS), scale_NK.split(ROWS), zero_NK.split(ROWS), strict=True)
    codes = [
        _feed_back_rows(w, scale, None if rounded.zero_point is None else zero, rounded.fmt, factor)
        for w, scale, zero in parts
    ]
    return replace(rounded, codes=torch.cat(codes).view(rounded.fmt.storage))


def _feed_back_rows(w_NK: Tensor, scale_NK: Tensor, zero_NK: Tensor | None, fmt: NumFormat, factor: Factor) -> Tensor:
    """Codes of rows (each is a problem of its own) as bytes: not every build can permute float8."""
    order_K, upper_KK = factor.order_K, factor.upper_KK
    w_KN, scale_KN = w_NK.T[order_K].float(), scale_NK.T[order_K]
    zero_KN = None if zero_NK is None else zero_NK.T[order_K]
    codes_KN = torch.empty_like(w_KN, dtype=fmt.storage)
    for start in range(0, w_KN.shape[0], BLOCK):
        block, rest = slice(start, start + BLOCK), slice(start + BLOCK, None)
        zero_BN = None if zero_KN is None else zero_KN[block]
        codes_KN[block], errors_BN = _round_block(w_KN[block], scale_KN[block], zero_BN, fmt, upper_KK[block, block])
        w_KN[rest].addmm_(upper_KK[block, rest].T, errors_BN, alpha=-1)
    return codes_KN.view(torch.uint8)[order_K.argsort()].T.contiguous()


def _round_block(
    w_BN: Tensor, scale_BN: Tensor, zero_BN: Tensor | None, fmt: NumFormat, upper_BB: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes of a block's columns in turn, and their errors over U's diagonal; `w` is updated in place."""
    codes_BN, errors_BN = torch.empty_like(w_BN, dtype=fmt.storage), torch.empty_like(w_BN)
    for j in range(w_BN.shape[0]):
        zero_N = None if zero_BN is None else zero_BN[j]
        codes_BN[j] = quantize_blocks(w_BN[j], scale_BN[j], zero_N, fmt)
        errors_BN[j] = (w_BN[j] - dequantize_blocks(codes_BN[j], scale_BN[j], zero_N)) / upper_BB[j, j]
        w_BN[j + 1 :].addr_(upper_BB[j, j + 1 :], errors_BN[j], alpha=-1)
    return codes_BN, errors_BN


def _inverse_factor(h_KK: Tensor, added: float) -> Tensor | None:
    """Upper triangular U with `(H + added)^-1 = U^T U`; None when that matrix is not positive definite.

    Reversed rows and columns turn a lower Cholesky factor into an upper one: `H = R R^T`, so that `U = R^-1`.
    """
    damped_KK = h_KK.flip(0, 1)
    damped_KK.diagonal().add_(added)
    lower_KK, info = torch.linalg.cholesky_ex(damped_KK)
    if int(info) or not bool(torch.isfinite(lower_KK).all()):
        return None
    identity_KK = torch.eye(h_KK.shape[0], dtype=h_KK.dtype, device=h_KK.device)
    upper_KK: Tensor = torch.linalg.solve_triangular(lower_KK.flip(0, 1), identity_KK, upper=True)
    return upper_KK


def _per_element(scale: Tensor, like: QTensor) -> Tensor:
    """The scale (or zero point) of every element, `[N, K]`."""
    blocks = to_blocks(like.codes.view(torch.uint8), like.granularity)
    return from_blocks(scale.float().reshape(-1, 1).expand(-1, blocks.shape[1]), like.shape, like.granularity)
