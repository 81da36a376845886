"""Lookup first, a model as fall-back."""

import pytest
import torch

from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.types import Sampling
from tests.speculation.toys import Scripted, TableLM, greedy, table

TABLE = table(4, 6)


class Asked:
    """Says which drafters may draft, and keeps what it was asked."""

    def __init__(self, *may: str, least: float = 0.0, most: int = 9) -> None:
        self.may, self.least, self.most, self.heard = may, least, most, list[str | float]()

    def begins(self, name: str) -> int:
        self.heard.append(name)
        return self.most if name in self.may else 0

    def __call__(self, confidence: float) -> bool:
        self.heard.append(confidence)
        return confidence >= self.least


def propose(drafter: CombinedDrafter, context: list[int], k: int = 3) -> list[int]:
    return drafter.propose(context, k, Sampling(), torch.Generator()).tokens_K.tolist()


def test_the_model_drafts_where_lookup_finds_nothing() -> None:
    """Catches a model that runs though the lookup had something, and a lookup's silence taken for an answer."""
    lm = TableLM(TABLE)
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(lm))
    drafter.reset()
    assert propose(drafter, [1, 2, 4, 1, 2]) == [4, 1, 2]
    assert lm.tokens == []
    context = [1, 2, 4, 1, 2, 4, 5]
    assert propose(drafter, context) == greedy(TABLE, context, 3)
    assert lm.tokens[: len(context)] == context


@pytest.mark.parametrize(
    ("may", "least", "source", "heard"),
    [
        (("lookup", "model"), 0.0, "lookup", ["lookup", 0.5]),
        (("lookup", "model"), 0.9, "model", ["lookup", 0.5, "model"]),
        (("model",), 0.0, "model", ["lookup", "model"]),
        (("lookup",), 0.9, "lookup", ["lookup", 0.5, "model"]),
        ((), 0.0, "lookup", ["lookup", "model"]),
    ],
)
def test_each_drafts_only_where_it_may(
    may: tuple[str, ...], least: float, source: str, heard: list[str | float]
) -> None:
    """Catches a model left out where nothing of the lookup was wanted, and one that drafts though it is passed over."""
    drafter, more = CombinedDrafter(SuffixDrafter(), Scripted([3])), Asked(*may, least=least)
    drafter.reset()
    proposal = drafter.propose([1, 2, 4, 1, 2], 1, Sampling(), torch.Generator(), more)
    drafted = {"lookup": [4] if least <= 0.5 else [], "model": [3]}[source] if source in may else []
    assert (proposal.tokens_K.tolist(), proposal.source, more.heard) == (drafted, source, heard)


def test_each_drafts_as_much_as_it_may() -> None:
    """Catches a lookup that drafts the longest length that any drafter may, whatever its own drafts are worth."""
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(TableLM(TABLE)))
    drafter.reset()
    for context in ([1, 2, 4, 1, 2], [1, 2, 4, 1, 2, 4, 5]):  # the lookup finds something, and nothing
        more = Asked("lookup", "model", most=2)
        assert len(drafter.propose(context, 5, Sampling(), torch.Generator(), more).tokens_K) == 2


def test_reset_reaches_both() -> None:
    """Catches a model's cache or an index that one request leaves to the next."""
    lm = TableLM(TABLE)
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(lm))
    drafter.reset()
    propose(drafter, [1, 2, 3])
    drafter.reset()
    assert lm.tokens == []
    assert propose(drafter, [1, 2]) == greedy(TABLE, [1, 2], 3)


def test_proposals_say_their_source() -> None:
    """Catches accepted tokens that are counted for the other drafter."""
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(TableLM(TABLE)))
    drafter.reset()
    sources = [
        drafter.propose(context, 3, Sampling(), torch.Generator()).source
        for context in ([1, 2, 4, 1, 2], [1, 2, 4, 1, 2, 4, 5])
    ]
    assert sources == ["lookup", "model"]
