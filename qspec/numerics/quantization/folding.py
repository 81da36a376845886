"""Exact rewrites of neighbouring weights: per-channel factors move through norms and linear layers, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fold_norm(gain_K: Tensor, offset: float, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Move a norm's gain into the linear layers that read it: `(x * g) W^T = x (W * g)^T`.

    `offset` is what the model adds to the stored gain (1 for Gemma). Returns the gain that is then the identity
    (`gain + offset == 1`) and the weights `[N, K]`; dtypes are kept.
    """
    factor_K = gain_K.double() + offset
    return torch.full_like(gain_K, 1.0 - offset), [scale_columns(w, factor_K) for w in weights]


def divide_gain(gain_K: Tensor, offset: float, s_K: Tensor) -> Tensor:
    """Stored gain of a norm whose output is divided by `s`: `(gain + offset) / s - offset`."""
    return ((gain_K.double() + offset) / s_K.double() - offset).to(gain_K.dtype)


def scale_columns(w_NK: Tensor, s_K: Tensor) -> Tensor:
    """`W * s`: the weight that reads an input divided by `s`."""
    return (w_NK.double() * s_K.double()).to(w_NK.dtype)


def divide_rows(w_NK: Tensor, bias_N: Tensor | None, s_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer whose output is divided by `s`."""
    w = (w_NK.double() / s_N.double().unsqueeze(1)).to(w_NK.dtype)
    return w, None if bias_N is None else (bias_N.double() / s_N.double()).to(bias_N.dtype)
