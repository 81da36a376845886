"""Lookup first, a model as fall-back."""

import pytest
import torch

from qspec.spec.drafters import combined
from qspec.spec.drafters.combined import CombinedDrafter
from qspec.spec.drafters.model import ModelDrafter
from qspec.spec.drafters.ngram import NgramDrafter
from qspec.spec.types import Sampling
from tests.spec.toys import Scripted, TableLM, greedy, table

TABLE = table(4, 6)


class Clock:
    """Seconds that the test decides."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


@pytest.mark.parametrize(("slow", "wins"), [(1.0, "lookup"), (0.001, "model")])
def test_the_source_of_more_tokens_per_second_drafts(slow: float, wins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lookup that is always refused and still goes first, and one that gives way to a costly model.

    The lookup's steps take a second and bring one token, the model's bring four; `slow` scales what those take.
    """
    clock = Clock()
    monkeypatch.setattr(combined, "perf_counter", clock)
    lookup, model = Scripted([5, 5, 5]), Scripted([1, 2, 3])
    drafter = CombinedDrafter(lookup, model)
    drafter.reset()
    context, sources = [0], []
    for step in range(40):
        lookup.tokens = [] if step < 4 else [5, 5, 5]  # the model gets its record first
        tokens = propose(drafter, context)
        from_model = tokens == [1, 2, 3]
        context = context + (tokens if from_model else []) + [9]
        clock.now += 8.0 * slow if from_model else 1.0
        sources.append("model" if from_model else "lookup")
    assert (
        sources.count(wins) >= 30 if wins == "lookup" else sources.count("lookup") in (2, 3, 4)
    )  # first, then retries


def test_reset_reaches_both() -> None:
    """Catches a model's cache or an index that one request leaves to the next."""
    lm = TableLM(TABLE)
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(lm))
    drafter.reset()
    propose(drafter, [1, 2, 3])
    drafter.reset()
    assert lm.tokens == []
    assert propose(drafter, [1, 2]) == greedy(TABLE, [1, 2], 3)


def test_a_model_has_to_beat_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that drafts at a loss where the lookup is silent, and one that is never tried again."""
    clock = Clock()
    monkeypatch.setattr(combined, "perf_counter", clock)
    drafter = CombinedDrafter(Scripted(), Scripted([1, 2, 3]))
    drafter.reset()
    context, asked = [0], []
    for _ in range(200):
        tokens = propose(drafter, context)
        asked.append(len(tokens) > 0)
        context = [*context, *tokens[:1], 9]  # one of three stands
        clock.now += 4.0 if tokens else 1.0
    assert sum(asked) <= 10
    assert any(asked[20:])


def test_proposals_say_their_source() -> None:
    """Catches accepted tokens that are counted for the other drafter."""
    drafter = CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(TableLM(TABLE)))
    drafter.reset()
    sources = [
        drafter.propose(context, 3, Sampling(), torch.Generator()).source
        for context in ([1, 2, 4, 1, 2], [1, 2, 4, 1, 2, 4, 5])
    ]
    assert sources == ["lookup", "model"]
