"""Suffix lookup within and across requests."""

import tracemalloc

import pytest
import torch

from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.types import Sampling


def propose(drafter: SuffixDrafter, context: list[int], k: int, least: float = 0.0) -> tuple[list[int], list[float]]:
    """Drafted tokens, and their confidences; drafting stops in front of one below `least`."""
    told: list[float] = []

    def more(confidence: float) -> bool:
        told.append(confidence)
        return confidence >= least

    proposal = drafter.propose(context, k, Sampling(), torch.Generator(), more)
    assert proposal.probs_KV is None
    assert proposal.tokens_K.dtype == torch.long
    assert len(told) - len(proposal.tokens_K) in (0, 1)
    return proposal.tokens_K.tolist(), told


@pytest.mark.parametrize(
    ("context", "draft"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),  # as it went on
        ([1, 2, 3, 7, 5, 2, 3, 8, 6, 1, 2, 3], [7, 5, 2]),  # the longer match, though the shorter is more recent
        ([1, 2, 7, 0, 1, 2, 8, 9, 1, 2], [8, 9, 1]),  # the newer of equal votes
        ([1, 2, 7, 0, 1, 2, 7, 4, 1, 2, 8, 9, 1, 2], [7, 4, 1]),  # two votes against a newer one
        ([1, 2, 3, 2], []),  # one token is no match
        ([4], []),
        ([0, 6, 7, 6, 7], [6, 7, 6]),  # a period of two goes on beyond the end of the text
    ],
)
def test_continuation(context: list[int], draft: list[int]) -> None:
    """Catches a suffix that matches itself, a short match that wins, votes miscounted, a draft cut at the end."""
    assert propose(SuffixDrafter(), context, 3)[0] == draft


def test_confidence_is_the_share_of_votes() -> None:
    """Catches certainty from a single occurrence, and votes of those that had left the draft's path."""
    text = [1, 2, 7, 5, 0, 1, 2, 7, 6, 3, 1, 2, 8, 4, 1, 2]
    assert propose(SuffixDrafter(), text, 3) == ([7, 6, 3], [2 / 4, 1 / 3, 1 / 2])


def test_drafting_stops_in_front_of_the_token_that_is_too_unsure() -> None:
    """Catches a token drafted that was not wanted, and drafting that goes on against the answer."""
    text = [1, 2, 7, 5, 0, 1, 2, 7, 6, 3, 1, 2, 8, 4, 1, 2]
    assert propose(SuffixDrafter(), text, 3, least=0.4)[0] == [7]


def test_growing_context_gives_what_a_fresh_index_gives() -> None:
    """Catches positions that the incremental index skips or keeps."""
    text = torch.randint(3, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    growing = SuffixDrafter()
    for n in [1, 2, 3, 7, 8, 20, 21, 40, 80]:
        assert propose(growing, text[:n], 6) == propose(SuffixDrafter(), text[:n], 6)


@pytest.mark.parametrize(("across", "draft"), [(True, [4, 5]), (False, [])])
def test_earlier_requests_are_remembered_where_asked_for(across: bool, draft: list[int]) -> None:
    """Catches a memory that is dropped between requests, and one that leaks where it must not; texts do not join."""
    drafter = SuffixDrafter(across_requests=across)
    propose(drafter, [9, 2, 3, 4, 5], 3)
    drafter.reset()
    assert propose(drafter, [1, 2, 3], 3)[0] == draft


def test_memory_forgets_whole_requests_that_have_not_helped() -> None:
    """Catches a memory that grows, forgets what is useful, or leaves places of a forgotten text behind."""
    drafter = SuffixDrafter(memory_mb=100 * 640 / 1e6)  # 100 tokens
    for first in (10, 20, 30):
        propose(drafter, list(range(first, first + 9)) * 3, 2)
        drafter.reset()
    assert propose(drafter, [10, 11], 2)[0] == [12, 13]  # the oldest is used again
    drafter.reset()
    propose(drafter, list(range(40, 49)) * 3, 2)
    assert drafter.remembered <= 100
    assert propose(drafter, [*range(40, 49)] * 3 + [20, 21], 2)[0] == []
    assert propose(drafter, [*range(40, 49)] * 3 + [20, 21, 10, 11], 2)[0] == [12, 13]


def test_memory_bound_holds_in_bytes() -> None:
    """Catches a bound that counts tokens too cheaply. Random tokens share no match: the costliest text there is."""
    drafter, generator = SuffixDrafter(memory_mb=2), torch.Generator().manual_seed(0)
    tracemalloc.start()
    for _ in range(20):
        drafter.reset()
        propose(drafter, (torch.randint(50_000, (300,), generator=generator) + 300).tolist(), 4)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2000 < drafter.remembered <= 2e6 / 640
    assert held < 2e6


def test_a_text_beyond_the_bound_is_known_up_to_it() -> None:
    """Catches an endless loop, or growth, where the running text alone fills the memory."""
    drafter = SuffixDrafter(memory_mb=20 * 640 / 1e6)
    text = [*range(30), 3, 4]
    assert propose(drafter, text, 2)[0] == [5, 6]
    assert propose(drafter, [*text, 25, 26], 2)[0] == []
    drafter.reset()
    assert drafter.remembered == 20
    assert propose(drafter, [50, 8, 9], 2)[0] == []  # there is room for one text only
    assert drafter.remembered == 3


def test_drafts_are_a_function_of_the_requests() -> None:
    """Catches an order that depends on hashing or on the clock."""
    texts = torch.randint(4, (6, 60), generator=torch.Generator().manual_seed(1)).tolist()
    both = []
    for _ in range(2):
        drafter, drafts = SuffixDrafter(memory_mb=200 * 640 / 1e6), []
        for text in texts:
            drafter.reset()
            drafts += [propose(drafter, text[:n], 4) for n in range(10, 60, 10)]
        both.append(drafts)
    assert both[0] == both[1]


def test_branches_start_with_the_tokens_of_most_votes() -> None:
    """Catches a second branch that repeats the first, or that goes on with the first one's votes."""
    text = [1, 2, 7, 5, 0, 1, 2, 7, 6, 3, 1, 2, 8, 4, 1, 2]
    proposal = SuffixDrafter(branches=2).propose(text, 2, Sampling(), torch.Generator())
    assert (proposal.tokens_K.tolist(), proposal.parents) == ([7, 6, 8, 4], (-1, 0, -1, 2))
    assert len(SuffixDrafter(branches=2).propose([1, 2, 3], 2, Sampling(), torch.Generator()).tokens_K) == 0
