"""The mixture alone, against the sum that it stands for."""

import torch
from torch import Tensor

from qspec.nn.eager.experts import Experts, Mlp


def _scaled(factor: float) -> Mlp:
    return Mlp(str(factor), lambda x: x, lambda x: factor * x)


def _run(mlp: Mlp, x_TK: Tensor) -> Tensor:
    return mlp.down(x_TK)


def test_tokens_go_to_their_most_probable_experts() -> None:
    """Would catch weights of the wrong expert or token, and weights that are (or are not) made to sum to 1."""
    router_EK = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    members = tuple(map(_scaled, (1.0, 10.0, 100.0)))
    x_TK = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # logits 2 0 1, and 0 2 1
    probs = torch.tensor([2.0, 0.0, 1.0]).softmax(0)
    plain = Experts("gate", router_EK, members, 2, normed=False).mix(x_TK, _run)
    normed = Experts("gate", router_EK, members, 2, normed=True).mix(x_TK, _run)
    first, second = probs[0] * 1 + probs[2] * 100, probs[0] * 10 + probs[2] * 100
    torch.testing.assert_close(plain, torch.diag(torch.stack((first, second))))
    torch.testing.assert_close(normed, plain / (probs[0] + probs[2]))


def test_an_expert_runs_once_for_all_of_its_tokens() -> None:
    """Would catch a run per token, which reads an expert's weights again for each."""
    rows: dict[str, int] = {}

    def count(mlp: Mlp, x_TK: Tensor) -> Tensor:
        assert mlp.name not in rows
        rows[mlp.name] = x_TK.shape[0]
        return x_TK

    experts = Experts("gate", torch.eye(3), tuple(map(_scaled, (1.0, 2.0, 3.0))), 1, normed=True)
    x_TK = torch.eye(3)[[0, 1, 0, 0, 1]]
    assert torch.equal(experts.mix(x_TK, count), x_TK)
    assert rows == {"1.0": 3, "2.0": 2}
