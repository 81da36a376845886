"""Gated MLPs and their mixtures: which experts a token goes to, and how what they say is weighted.

T tokens, K hidden size, E experts, A experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.ops.select import Linear


@dataclass(frozen=True)
class Mlp:
    """The layers of one gated MLP, `model.layers.0.mlp` or `model.layers.0.mlp.experts.3`."""

    name: str
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Experts:
    """A router, which is never quantized, and the MLPs that it chooses from."""

    router: str
    router_EK: Tensor
    members: tuple[Mlp, ...]
    per_token: int
    normed: bool

    def mix(self, x_TK: Tensor, run: Callable[[Mlp, Tensor], Tensor]) -> Tensor:
        """Weighted sum `[T, K]` of `run(expert, rows)` over each token's experts.

        Tokens of one expert are run together: how many there are may show in the last bits of a row.
        """
        weight_TA, expert_TA = self._route(x_TK)
        out_TK = torch.zeros_like(x_TK)
        for expert in expert_TA.unique().tolist():
            token, choice = torch.where(expert_TA == expert)
            y_RK = run(self.members[expert], x_TK[token]) * weight_TA[token, choice, None]
            out_TK.index_add_(0, token, y_RK.to(x_TK.dtype))
        return out_TK

    def _route(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, `[T, A]`: the most probable of all."""
        probs_TE = F.linear(x_TK, self.router_EK).float().softmax(-1)
        weight_TA, expert_TA = probs_TE.topk(self.per_token)
        if self.normed:
            weight_TA = weight_TA / weight_TA.sum(-1, keepdim=True)
        return weight_TA.to(x_TK.dtype), expert_TA
