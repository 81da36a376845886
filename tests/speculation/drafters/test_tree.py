"""Trees of a draft model: which nodes they hold, and what the draft's cache holds behind them."""

from collections.abc import Sequence
import math

import pytest
import torch

from qspec.numerics.speculation.trees import depths, path_to
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.types import Proposal, Sampling
from tests.speculation.toys import TableLM, greedy, paths, table

VOCAB = 6
TABLE = table(4, VOCAB)
GREEDY, HOT = Sampling(), Sampling(temperature=0.8, top_k=4, top_p=0.95)


def propose(drafter: TreeDrafter, context: Sequence[int], k: int = 9, sampling: Sampling = GREEDY) -> Proposal:
    return drafter.propose(list(context), k, sampling, torch.Generator())


def texts(proposal: Proposal) -> list[tuple[int, ...]]:
    """The path of every node."""
    tokens = proposal.tokens_K.tolist()
    return [tuple(tokens[i] for i in path_to(proposal.parents, node)) for node in range(len(tokens))]


def probability(sampling: Sampling, context: Sequence[int], path: Sequence[int]) -> float:
    probs_VVV = TABLE.softmax(-1) if sampling.greedy else sampling.probs(TABLE.flatten(0, 1)).view_as(TABLE)
    text = [*context, *path]
    return math.prod(float(probs_VVV[text[i - 2], text[i - 1], text[i]]) for i in range(len(context), len(text)))


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "filtered"])
@pytest.mark.parametrize(("depth", "nodes"), [(1, 4), (2, 9), (3, 1), (3, 30)])
def test_holds_the_likeliest_paths(sampling: Sampling, depth: int, nodes: int) -> None:
    """Catches children of the wrong node, probabilities that are not multiplied up, and filtered tokens drafted."""
    context = [2, 5]
    proposal = propose(TreeDrafter(TableLM(TABLE), width=VOCAB, depth=depth, nodes=nodes), context, sampling=sampling)
    every = [path for n in range(1, depth + 1) for path in paths(VOCAB, n)]
    possible = {path: p for path in every if (p := probability(sampling, context, path)) > 0}
    read_at_most = 1 + VOCAB * (depth - 1)
    if nodes <= read_at_most:  # every node that could be proposed has been read
        assert sorted(texts(proposal)) == sorted(sorted(possible, key=lambda path: -possible[path])[:nodes])
    assert all(path in possible for path in texts(proposal))
    assert len(proposal.tokens_K) == min(nodes, len(possible))
    assert proposal.probs_KV is None


def test_bounds_are_kept() -> None:
    """Catches trees deeper than asked for, wider than allowed, or with more nodes than the budget."""
    drafter = TreeDrafter(TableLM(TABLE), width=2, depth=4, nodes=11)
    for k in (1, 2, 3, 9):
        proposal = propose(drafter, [2, 5], k)
        assert max(depths(proposal.parents)) + 1 == min(k, 4)
        assert len(proposal.tokens_K) <= 11
        assert max(proposal.parents.count(parent) for parent in proposal.parents) <= 2
        assert len(set(texts(proposal))) == len(proposal.tokens_K)


def test_reads_each_node_once_and_keeps_what_was_accepted() -> None:
    """Catches accepted nodes that go through the draft again, and rejected ones that stay in its cache."""
    lm, context = TableLM(TABLE), [2, 5]
    drafter = TreeDrafter(lm, width=2, depth=3, nodes=8)
    for _ in range(6):
        before = len(lm.rows)
        proposal = propose(drafter, context)
        assert lm.tokens == context
        fresh = propose(TreeDrafter(TableLM(TABLE), width=2, depth=3, nodes=8), context)
        assert texts(proposal) == texts(fresh)
        assert lm.rows[before:][1:] == [2, 2]  # after the context, two passes of `width` nodes
        deepest = max(texts(proposal), key=len)
        context = [*context, *deepest, 1]
        assert before == 0 or lm.rows[before] == 2  # a leaf was not read before, nor was the target's own token


def test_any_context_is_followed() -> None:
    """Catches a tree of the last context kept for one that went another way, lost tokens, or is the same again."""
    drafter = TreeDrafter(TableLM(TABLE), width=2, depth=3, nodes=8)
    first = texts(propose(drafter, [2, 5, 1]))
    for context in ([2, 5, 1], [2, 5, 1, *first[0]], [2, 5, 1, 0, 0, 0], [2, 5], [4], [4, 3, 3, 2]):
        fresh = TreeDrafter(TableLM(TABLE), width=2, depth=3, nodes=8)
        assert texts(propose(drafter, context)) == texts(propose(fresh, context))


def test_an_interrupted_draft_leaves_no_wrong_cache() -> None:
    """Catches a cache believed to hold what an aborted tree had already rolled back."""
    lm = TableLM(TABLE)
    drafter = TreeDrafter(lm, width=2, depth=3, nodes=8)
    propose(drafter, [2, 5, 1])
    forward_tree = lm.forward_tree

    def stop(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    lm.forward_tree = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        propose(drafter, [2, 4, 4])
    lm.forward_tree = forward_tree  # type: ignore[method-assign]
    for context in ([2, 5, 1, 0], [2, 4, 4]):
        assert texts(propose(drafter, context)) == texts(propose(TreeDrafter(TableLM(TABLE), 2, 3, 8), context))


def test_drafts_only_what_its_cache_can_hold() -> None:
    """Catches an overflow of a draft whose context is shorter than the target's."""
    drafter = TreeDrafter(TableLM(TABLE, max_length=8), width=2, depth=4, nodes=9)
    found = [max(depths(propose(drafter, [1] * n).parents), default=-1) + 1 for n in range(2, 11)]
    assert all(depth > 1 for depth in found[:6])  # room for one node behind the context, at least
    assert found[6:] == [1, 0, 0]  # the root's children need no room


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    """Catches nodes that can never stand."""
    stop = greedy(TABLE, [2, 5], 1)[0]
    proposal = propose(TreeDrafter(TableLM(TABLE), width=6, depth=3, nodes=40, eos_ids=(stop,)), [2, 5])
    assert (stop,) in texts(proposal)
    assert not any(stop in path[:-1] for path in texts(proposal))


def test_ids_above_the_targets_vocabulary_are_not_drafted() -> None:
    """Catches padding of a wider draft, and a narrower draft that is asked for more candidates than it has."""
    for vocab in (4, 9):
        proposal = propose(TreeDrafter(TableLM(TABLE), width=9, depth=2, nodes=60, tokens=vocab), [2, 3])
        assert int(proposal.tokens_K.max()) < min(vocab, VOCAB)


def test_reset_empties_the_cache() -> None:
    """Catches a drafter that trusts a cache which somebody else has used since."""
    lm = TableLM(TABLE)
    drafter = TreeDrafter(lm, 2, 3, 8)
    propose(drafter, [2, 5])
    drafter.reset()
    assert lm.length == 0
    assert texts(propose(drafter, [2, 5])) == texts(propose(TreeDrafter(TableLM(TABLE), 2, 3, 8), [2, 5]))
