"""Were two sets of sampled texts drawn from one law? A permutation test of their tokens, position by position."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def homogeneity_p(prompts: Sequence[tuple[Tensor, Tensor]], permutations: int = 9999, seed: int = 0) -> float:
    """Chance that samples of one law differ at least as much as these do; small: the laws differ.

    prompts: for each, tokens `[n, L]` of both arms, drawn independently (-1 behind an end). The statistic is the sum
    over prompts, positions and tokens of `(a - b)^2 / (a + b)`, a and b the counts of both arms. Whole texts change
    arms within their prompt, so dependence between positions does not matter; exact up to the number of permutations.
    """
    generator = torch.Generator().manual_seed(seed)
    total_R = torch.zeros(permutations + 1, dtype=torch.float64)
    for a_nL, b_nL in prompts:
        n, both_NL = len(a_nL), torch.cat([a_nL, b_nL])
        order_RN = torch.rand(permutations, len(both_NL), generator=generator).argsort(1)
        arm_RN = torch.cat([torch.arange(len(both_NL))[None], order_RN]).lt(n).double()
        for tokens_N in both_NL.T:
            counts_NU = one_hot(tokens_N.unique(return_inverse=True)[1]).double()
            a_RU, all_U = arm_RN @ counts_NU, counts_NU.sum(0)
            share = n / len(both_NL)
            total_R += ((a_RU - share * all_U).square() / all_U).sum(-1)
    at_least = int((total_R[1:] >= total_R[0] - 1e-9).sum())
    return (1 + at_least) / (1 + permutations)
