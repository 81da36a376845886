"""Prompt lookup."""

import pytest
import torch

from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.types import Sampling


def propose(drafter: NgramDrafter, context: list[int], k: int) -> list[int]:
    proposal = drafter.propose(context, k, Sampling(), torch.Generator())
    assert proposal.probs_KV is None
    assert proposal.tokens_K.dtype == torch.long
    return proposal.tokens_K.tolist()


@pytest.mark.parametrize(
    ("context", "draft"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),  # as it went on
        ([1, 2, 7, 5, 2, 8, 6, 1, 2], [7, 5, 2]),  # the longer match, though the shorter is more recent
        ([1, 2, 7, 0, 1, 2, 8, 0, 1, 2], [8, 0, 1]),  # the more recent of equals
        ([1, 2, 3], []),  # no match
        ([4], []),  # nothing to match with
        ([5, 5], [5, 5, 5]),  # a period of one
        ([0, 6, 7, 6, 7], [6, 7, 6]),  # a period of two goes on beyond the end of the text
    ],
)
def test_continuation(context: list[int], draft: list[int]) -> None:
    """Catches a suffix that matches itself, a stale or short match, and a draft cut at the end of the text."""
    assert propose(NgramDrafter(1, 3), context, 3) == draft


def test_min_ngram_is_respected() -> None:
    """Catches one-token matches where only longer ones were asked for."""
    assert propose(NgramDrafter(2, 3), [1, 2, 3, 2], 4) == []
    assert propose(NgramDrafter(1, 3), [1, 2, 3, 2], 4) == [3, 2, 3, 2]


def test_growing_context_gives_what_a_fresh_index_gives() -> None:
    """Catches positions that the incremental index skips or keeps."""
    text = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    growing = NgramDrafter(1, 3)
    for n in [1, 2, 3, 7, 8, 20, 21, 40, 60]:
        assert propose(growing, text[:n], 5) == propose(NgramDrafter(1, 3), text[:n], 5)


def test_reset_forgets_the_text() -> None:
    """Catches continuations that leak from one request into the next."""
    drafter = NgramDrafter(1, 3)
    propose(drafter, [1, 2, 3, 1, 2], 3)
    drafter.reset()
    assert propose(drafter, [1, 2], 3) == []


def test_branches_are_the_most_recent_continuations() -> None:
    """Catches trees that repeat what begins alike, continue an older match, or leave the chain of one branch."""
    context = [1, 2, 7, 5, 1, 2, 8, 6, 1, 2, 7, 4, 1, 2]
    proposal = NgramDrafter(1, 3, branches=3).propose(context, 2, Sampling(), torch.Generator())
    assert (proposal.tokens_K.tolist(), proposal.parents) == ([7, 4, 8, 6, 5], (-1, 0, -1, 2, 0))
    assert propose(NgramDrafter(1, 3, branches=1), context, 2) == [7, 4]
    silent = NgramDrafter(1, 3, branches=2).propose([1, 2, 3], 2, Sampling(), torch.Generator())
    assert len(silent.tokens_K) == 0
