"""A cache that survives between requests changes the work, never the logits."""

import torch

from qspec.nn.reuse import PrefixReuse
from tests.speculation.toys import TableLM, table


def _fresh(table_VVV: torch.Tensor, tokens: list[int], last: int | None = None) -> torch.Tensor:
    return TableLM(table_VVV).forward(torch.tensor(tokens), last=last)


def test_logits_are_those_of_an_empty_cache():
    """Would catch stale positions left behind when the next prompt branches off, ends earlier or is the same again."""
    table_VVV = table(0, 7)
    lm = PrefixReuse(TableLM(table_VVV))
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2], [1, 2], [5], [1, 2, 3, 6, 1, 1]):
        lm.truncate(0)
        assert torch.equal(lm.forward(torch.tensor(prompt), last=1), _fresh(table_VVV, prompt, 1))
        assert lm.length == len(prompt)


def test_a_shared_beginning_is_computed_once():
    """Would catch a wrapper that forgets its cache and so saves nothing."""
    inner = TableLM(table(0, 7))
    lm = PrefixReuse(inner)
    lm.forward(torch.tensor([1, 2, 3, 4]), last=1)
    lm.truncate(0)
    lm.forward(torch.tensor([1, 2, 3, 5, 6]), last=1)
    assert inner.rows == [4, 2]


def test_all_asked_logits_are_returned():
    """Would catch skipped rows whose logits a scorer needs (`last` larger than the new part)."""
    table_VVV = table(1, 7)
    lm = PrefixReuse(TableLM(table_VVV))
    lm.forward(torch.tensor([1, 2, 3, 4]))
    lm.truncate(0)
    assert torch.equal(lm.forward(torch.tensor([1, 2, 3, 4]), last=3), _fresh(table_VVV, [1, 2, 3, 4], 3))
    lm.truncate(2)
    assert torch.equal(lm.forward(torch.tensor([3, 4])), _fresh(table_VVV, [1, 2, 3, 4], 2))


def test_roll_back_and_continue():
    """Would catch a roll-back that lets rejected tokens count as held."""
    table_VVV = table(2, 7)
    lm = PrefixReuse(TableLM(table_VVV))
    lm.forward(torch.tensor([1, 2, 3]), last=1)
    lm.forward(torch.tensor([4, 5]))
    lm.truncate(4)
    assert torch.equal(lm.forward(torch.tensor([6])), _fresh(table_VVV, [1, 2, 3, 4, 6], 1))
    lm.truncate(0)
    assert torch.equal(lm.forward(torch.tensor([1, 2, 3, 4, 5, 1]), last=1), _fresh(table_VVV, [1, 2, 3, 4, 5, 1], 1))
