"""SmoothQuant (arXiv 2211.10438): move activation outliers into weights, `x W^T = (x / s) (W * s)^T`.

Factors move through norms and linear layers exactly, in float64.
"""

from collections.abc import Callable, Iterable, Sequence
import math

import torch
from torch import Tensor

FakeQuant = Callable[[Tensor, Tensor], Tensor]
"""`(x_TK, w_NK) -> out_TN`: a linear layer as it will run, with both sides quantized."""

AMAX_FLOOR = 1e-5
"""Magnitudes below are taken as this: their channels cannot demand an extreme factor."""


def weights_amax(weights: Sequence[Tensor]) -> Tensor:
    """Largest |w| of every input channel over all layers that read the same input, float32 `[K]`."""
    return torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)


def smoothing_scale(x_amax_K: Tensor, w_amax_K: Tensor, strength: float) -> Tensor:
    """Factors `s = x_amax^strength / w_amax^(1 - strength)` (eq. 4), float32 `[K]`; 1 for channels that are all zero.

    `strength` 0 leaves the difficulty to the activations, 1 moves all of it into the weights.
    """
    x, w = x_amax_K.double(), w_amax_K.double()
    s = x.clamp_min(AMAX_FLOOR) ** strength / w.clamp_min(AMAX_FLOOR) ** (1 - strength)
    return torch.where((x > 0) & (w > 0), s, 1.0).float()


def output_error(x_TK: Tensor, weights: Sequence[Tensor], s_K: Tensor, fake_quant: FakeQuant) -> float:
    """Mean squared error of `fake_quant` under factors `s` against float, summed over `weights`; NaN counts as inf."""
    return _error(x_TK, weights, _outputs(x_TK, weights), s_K, fake_quant)


def search_strength(
    inputs_TK: Tensor, weights: Sequence[Tensor], x_amax_K: Tensor, fake_quant: FakeQuant, grid: Iterable[float]
) -> tuple[float | None, float]:
    """The strength of `grid` with the least `output_error`, and that error; the smaller strength of equals.

    None: leaving the layer alone (which no strength is) loses no more than the best of them.
    """
    w_amax_K, wanted = weights_amax(weights), _outputs(inputs_TK, weights)

    def error(s_K: Tensor) -> float:
        return _error(inputs_TK, weights, wanted, s_K, fake_quant)

    scored = [(error(smoothing_scale(x_amax_K, w_amax_K, strength)), strength) for strength in grid]
    least, strength = min(scored)
    alone = error(torch.ones_like(x_amax_K))
    return (None, alone) if least >= alone else (strength, least)


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


def _outputs(x_TK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x_TK.float() @ w_NK.float().T for w_NK in weights]


def _error(
    x_TK: Tensor, weights: Sequence[Tensor], wanted: Sequence[Tensor], s_K: Tensor, fake_quant: FakeQuant
) -> float:
    smooth_TK = x_TK.float() / s_K
    pairs = zip(weights, wanted, strict=True)
    errors = [(fake_quant(smooth_TK, w_NK.float() * s_K).float() - want_TN).square().mean() for w_NK, want_TN in pairs]
    error = torch.stack(errors).sum(dtype=torch.float64).item()
    return error if not math.isnan(error) else math.inf
