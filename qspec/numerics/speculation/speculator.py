"""Losses and acceptance of draft heads against a target's distribution, of which the likeliest ids are known.

Letters: T positions, D ids that the draft knows, K ids that are kept of the target's distribution; an id that the draft
does not know is -1.
"""

import math

import torch
from torch import Tensor
import torch.nn.functional as F


def loss_of(kind: str, logits_TD: Tensor, tokens_T: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """One of the losses below, by its name in a recipe."""
    match kind:
        case "cross_entropy":
            return token_loss(logits_TD, tokens_T)
        case "kl":
            return probs_loss(logits_TD, ids_TK, probs_TK)
        case "hybrid":
            return hybrid_loss(logits_TD, ids_TK, probs_TK)
        case _:
            return overlap_loss(logits_TD, ids_TK, probs_TK)


def token_loss(logits_TD: Tensor, tokens_T: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that the draft knows; 0 where it knows none."""
    return F.cross_entropy(logits_TD, tokens_T, ignore_index=-1, reduction="sum") / max(1, len(tokens_T))


def probs_loss(logits_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """Mean cross-entropy under the target's distribution: KL divergence up to a constant. Unknown ids are left out."""
    return -(known(ids_TK, probs_TK) * looked_up(logits_TD.log_softmax(-1), ids_TK)).sum(-1).mean()


def overlap_loss(logits_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """Mean of 1 - the sum of minima of both distributions: how often a sampled draft is rejected, at most."""
    return 1 - overlap(logits_TD.softmax(-1), ids_TK, probs_TK).mean()


def hybrid_loss(logits_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """Mean of l * `probs_loss` + (1 - l) * `overlap_loss`, where l = exp(-3 overlap) of each position by itself.

    A draft that is far off learns by the first, whose gradient does not vanish there, one that is near by the second,
    which is what sampling rejects. Source: LK losses, as in SpecForge's `lk_loss`.
    """
    log_q_TK, known_TK = looked_up(logits_TD.log_softmax(-1), ids_TK), known(ids_TK, probs_TK)
    overlap_T = torch.minimum(log_q_TK.exp(), known_TK).sum(-1)
    share_T = (-3 * overlap_T.detach()).exp()
    return (share_T * -(known_TK * log_q_TK).sum(-1) + (1 - share_T) * (1 - overlap_T)).mean()


def overlap(q_TD: Tensor, ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """Sum of minima of both distributions `[T]`, over the kept ids: least acceptance of a sampled draft (Leviathan)."""
    return torch.minimum(looked_up(q_TD, ids_TK), known(ids_TK, probs_TK)).sum(-1)


def agreement(logits_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """Whether the likeliest ids are the same `[T]`; the target's stands first."""
    return logits_TD.argmax(-1) == ids_TK[:, 0]


def known(ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """The target's probabilities, 0 where the draft does not know the id."""
    return probs_TK * (ids_TK >= 0)


def looked_up(values_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """Values at ids `[T, K]`; whatever stands at -1 is of no meaning."""
    return values_TD.gather(-1, ids_TK.clamp_min(0).long())


def expected_tokens(alphas: list[float]) -> float:
    """Tokens per step of a chain whose draft i is accepted with probability `alphas[i]` if those before are."""
    reach, total = 1.0, 1.0
    for alpha in alphas:
        reach *= alpha
        total += reach
    return total


def rate_at(step: int, first: int, total: int, second_rate: float) -> float:
    """Factor of the learning rate: cosine from 1 to 0.1 over `first` steps, then the same below `second_rate`.

    Both begin with a parabolic warm-up over 5 % of the first stage, at most 2000 steps.
    Source: fms-fsdp, speculator/train_speculator.py (there over 21,000 steps, with a second stage at 0.1).
    """
    warm = max(1, min(2000, first // 20 or total // 20))
    if step < first:
        return min(_parabola(step, warm), 0.1 + 0.45 * (1 + math.cos(math.pi * step / first)))
    step, length = step - first, max(1, total - first)
    return second_rate * min(_parabola(step, warm), 0.1 + 0.45 * (1 + math.cos(math.pi * step / length)))


def _parabola(step: int, warm: int) -> float:
    return 1 - (1 - min(step + 1, warm) / warm) ** 2
