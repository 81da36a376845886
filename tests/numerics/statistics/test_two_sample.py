"""The test that two samplers follow one law."""

import torch
from torch import Tensor

from qspec.numerics.statistics.two_sample import homogeneity_p


def _texts(probs: Tensor, n: int, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, n * 3, replacement=True, generator=generator).view(n, 3)


def test_equal_laws_are_rejected_as_often_as_said() -> None:
    """Would catch a statistic whose p-value is not one: of 200 equal laws about 10 may fall below 0.05."""
    generator, law = torch.Generator().manual_seed(1), torch.tensor([0.5, 0.3, 0.15, 0.05])
    p = [
        homogeneity_p([(_texts(law, 12, generator), _texts(law, 12, generator)) for _ in range(2)], 99, seed)
        for seed in range(200)
    ]
    assert 2 <= sum(value <= 0.05 for value in p) <= 20  # 99.8 % of binomial(200, 0.05)
    assert 0.4 < sum(p) / len(p) < 0.6


def test_a_law_that_differs_is_found() -> None:
    """Would catch a test without power: a drafter whose rejected tokens are drawn from p instead of the residual."""
    generator = torch.Generator().manual_seed(2)
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.3, 0.5, 0.15, 0.05])
    assert homogeneity_p([(_texts(p, 40, generator), _texts(q, 40, generator)) for _ in range(3)]) < 0.01


def test_a_difference_at_one_position_is_not_drowned_by_the_order_of_prompts() -> None:
    """Would catch arms that are compared across prompts, whose laws differ by nature."""
    generator = torch.Generator().manual_seed(3)
    one, other = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])
    same = [(_texts(law, 20, generator), _texts(law, 20, generator)) for law in (one, other)]
    assert homogeneity_p(same) > 0.05
