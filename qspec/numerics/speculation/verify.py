"""Which draft tokens are accepted: the greedy rule and the sampling rule of speculative decoding (arXiv 2211.17192).

They are two rules: the sampling rule at temperature 0 would accept ties that greedy decoding does not choose.
Shape letters: K draft tokens, V vocabulary; `[K1]` is K + 1 rows, one per draft token and one behind the last. In a
tree (`numerics.speculation.trees`) row 0 is behind the root and row i + 1 behind node i.
The verification of a chain reads its result on the host once, that of a tree once more for every node it tests.

**Several candidates for one position** (SpecInfer, arXiv 2305.09781, section 4.3). Siblings x1, x2, … are tested in
turn, the first against the target's distribution p1 = p. Sibling j was drawn from q_j, which may depend on the siblings
before it; it is accepted with probability min(1, p_j(x) / q_j(x)), and where it is not, the next is tested against
p_{j+1} = norm(max(0, p_j - q_j)); behind the last, the next token is drawn from what is left. By the identity min(p_j,
q_j) + max(0, p_j - q_j) = p_j, from the last sibling backwards, the token that comes out follows p_j given all that was
rejected before, hence p. For draws with replacement all q_j are one distribution; for draws without, q_j has no mass on
earlier siblings; for candidates that were chosen and not drawn, q_j is one-hot, whatever chose them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qspec.numerics.speculation.probs import sample
from qspec.numerics.speculation.trees import Parents, children


def verify_greedy(tokens_K: Tensor, logits_K1V: Tensor) -> tuple[int, int]:
    """Leading draft tokens that equal the target's arg-max, and the arg-max behind them: `(accepted, next_token)`."""
    return verify_best(tokens_K, logits_K1V.argmax(-1))


def verify_best(tokens_K: Tensor, best_K1: Tensor) -> tuple[int, int]:
    """`verify_greedy` where the arg-max of each row is known."""
    if not len(tokens_K):
        return 0, int(best_K1)
    accepted_1 = _leading(tokens_K == best_K1[:-1])
    return _read(accepted_1, best_K1.gather(0, accepted_1))


def verify_sampling(tokens_K: Tensor, q_KV: Tensor | None, p_K1V: Tensor, uniforms_K1: Tensor) -> tuple[int, int]:
    """Accept or replace draft tokens; the output follows the target's distribution exactly: `(accepted, next_token)`.

    `q`: the distributions that the tokens were drawn from, None for drafts that are certain (one-hot); `p`: the
    target's distributions. The first K uniform numbers in [0, 1) decide acceptance, the last one draws the next token.
    Source: arXiv 2211.17192, algorithm 1 and appendix A.1.
    """
    accepted_1 = _leading(uniforms_K1[:-1] < acceptance(tokens_K, q_KV, p_K1V[:-1]))
    probs_1V = next_probs(accepted_1, tokens_K, q_KV, p_K1V)
    return _read(accepted_1, sample(probs_1V, uniforms_K1[-1:]))


def verify_tree_best(tokens_K: Tensor, parents_K: Parents, best_K1: Tensor) -> tuple[list[int], int]:
    """The nodes that plain decoding would pass, and its token behind them: `(path, next_token)`. best: each row's."""
    best, tokens = best_K1.tolist(), tokens_K.tolist()
    children_K1 = children(parents_K)
    path, node = list[int](), -1
    while (node := _first(children_K1[node + 1], tokens, best[node + 1])) >= 0:
        path.append(node)
    return path, best[path[-1] + 1 if path else 0]


def verify_tree_sampling(
    tokens_K: Tensor, parents_K: Parents, q_KV: Tensor | None, p_K1V: Tensor, uniforms_K1: Tensor
) -> tuple[list[int], int]:
    """Accept a path of draft nodes so that the output follows the target's distribution exactly: `(path, next_token)`.

    `q`: the distribution of each node's draw given its earlier siblings, None for nodes that are certain (one-hot);
    nothing else may depend on what was drawn, such as which nodes stay in the tree. `p`: the target's distributions.
    Uniform number i decides node i, the last one draws the next token. Why it is exact: at the top of this file.
    """
    tokens, uniforms = tokens_K.tolist(), uniforms_K1.tolist()
    children_K1 = children(parents_K)
    path, node = list[int](), -1
    while True:
        probs_V, parent = p_K1V[node + 1].double(), node
        for child in children_K1[parent + 1]:
            chance, rest_V = candidate(probs_V, None if q_KV is None else q_KV[child], tokens[child])
            if uniforms[child] < chance:
                path.append(node := child)
                break
            probs_V = rest_V
        if node == parent:
            return path, int(sample(probs_V, uniforms_K1[-1]))


def candidate(p_V: Tensor, q_V: Tensor | None, token: int) -> tuple[float, Tensor]:
    """One draft token against a distribution: its chance of acceptance, and the distribution after rejection, float64.

    Where rounding leaves nothing of the difference, p = q up to rounding, and p itself is the distribution.
    """
    if q_V is None:
        chance, rest_V = float(p_V[token]), p_V.index_fill(0, torch.tensor(token, device=p_V.device), 0.0)
    else:
        chance, rest_V = float(p_V[token] / q_V[token]), (p_V - q_V).clamp(min=0.0)
    mass = float(rest_V.sum())
    return min(chance, 1.0), rest_V / mass if mass > 0 else p_V


def acceptance(tokens_K: Tensor, q_KV: Tensor | None, p_KV: Tensor) -> Tensor:
    """Probability `min(1, p / q)` that each draft token is accepted, float64 `[K]`."""
    p_K = p_KV.gather(-1, tokens_K.unsqueeze(-1)).squeeze(-1).double()
    if q_KV is None:
        return p_K
    q_K = q_KV.gather(-1, tokens_K.unsqueeze(-1)).squeeze(-1).double()
    return (p_K / q_K).clamp(max=1.0)


def next_probs(accepted_1: Tensor, tokens_K: Tensor, q_KV: Tensor | None, p_K1V: Tensor) -> Tensor:
    """Distribution `[1, V]` of the token behind `accepted` draft tokens, not normalised.

    `max(0, p - q)` behind a rejection, `p` behind a whole draft. Where rounding leaves nothing of the difference,
    p = q up to rounding, and p itself is the distribution.
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


def _first(nodes: Sequence[int], tokens: Sequence[int], token: int) -> int:
    """The first of some nodes that holds `token`; -1 without one."""
    return next((node for node in nodes if tokens[node] == token), -1)


def _read(accepted_1: Tensor, next_1: Tensor) -> tuple[int, int]:
    accepted, token = torch.cat([accepted_1, next_1]).tolist()
    return accepted, token
