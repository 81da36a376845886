"""Which draft tokens stand: the greedy rule and the sampling rule of speculative decoding (arXiv 2211.17192).

They are two rules: the sampling rule at temperature 0 would accept ties that greedy decoding does not choose.
Shape letters: K draft tokens, V vocabulary; `[K1]` is K + 1 rows, one per draft token and one behind the last.
Each verification reads its result on the host once.
"""

import torch
from torch import Tensor

from qspec.numerics.probs import sample


def verify_greedy(tokens_K: Tensor, logits_K1V: Tensor) -> tuple[int, int]:
    """Leading draft tokens that equal the target's arg-max, and the arg-max behind them: `(accepted, next_token)`."""
    best_K1 = logits_K1V.argmax(-1)
    accepted_1 = _leading(tokens_K == best_K1[:-1])
    return _read(accepted_1, best_K1.gather(0, accepted_1))


def verify_sampling(tokens_K: Tensor, q_KV: Tensor | None, p_K1V: Tensor, uniforms_K1: Tensor) -> tuple[int, int]:
    """Accept or replace draft tokens so that the output follows the target's law exactly: `(accepted, next_token)`.

    `q`: the laws that the tokens were drawn from, None for drafts that are certain (one-hot); `p`: the target's laws.
    The first K uniform numbers in [0, 1) decide acceptance, the last one draws the next token.
    Source: arXiv 2211.17192, algorithm 1 and appendix A.1.
    """
    accepted_1 = _leading(uniforms_K1[:-1] < acceptance(tokens_K, q_KV, p_K1V[:-1]))
    law_1V = next_law(accepted_1, tokens_K, q_KV, p_K1V)
    return _read(accepted_1, sample(law_1V, uniforms_K1[-1:]))


def acceptance(tokens_K: Tensor, q_KV: Tensor | None, p_KV: Tensor) -> Tensor:
    """Probability `min(1, p / q)` that each draft token stands, float64 `[K]`."""
    p_K = p_KV.gather(-1, tokens_K.unsqueeze(-1)).squeeze(-1).double()
    if q_KV is None:
        return p_K
    q_K = q_KV.gather(-1, tokens_K.unsqueeze(-1)).squeeze(-1).double()
    return (p_K / q_K).clamp(max=1.0)


def next_law(accepted_1: Tensor, tokens_K: Tensor, q_KV: Tensor | None, p_K1V: Tensor) -> Tensor:
    """Law `[1, V]` of the token behind `accepted` draft tokens, not normalised.

    `max(0, p - q)` behind a rejection, `p` behind a whole draft. Where rounding leaves nothing of the difference,
    p = q up to rounding, and p itself is the law.
    """
    p_1V = p_K1V.index_select(0, accepted_1)
    if tokens_K.numel() == 0:
        return p_1V
    row_1 = accepted_1.clamp(max=tokens_K.numel() - 1)
    if q_KV is None:
        rest_1V = p_1V.scatter(-1, tokens_K.gather(0, row_1).unsqueeze(-1), 0.0)
    else:
        rest_1V = (p_1V - q_KV.index_select(0, row_1)).clamp(min=0.0)
    rejected_11 = (accepted_1 < tokens_K.numel()).unsqueeze(-1)
    return torch.where(rejected_11 & (rest_1V.sum(-1, keepdim=True) > 0), rest_1V, p_1V)


def _leading(stands_K: Tensor) -> Tensor:
    """How many leading entries are true, int64 `[1]`."""
    return stands_K.long().cumprod(0).sum(0, keepdim=True)


def _read(accepted_1: Tensor, next_1: Tensor) -> tuple[int, int]:
    accepted, token = torch.cat([accepted_1, next_1]).tolist()
    return accepted, token
