"""The greedy and the sampling rule: exact distributions by enumeration, not by chance."""

from collections.abc import Iterator, Sequence
import math

from hypothesis import given, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.numerics.speculation.trees import children, path_to
from qspec.numerics.speculation.verify import (
    acceptance,
    candidate,
    next_probs,
    verify_greedy,
    verify_sampling,
    verify_tree_best,
    verify_tree_sampling,
)
from qspec.speculation.types import Sampling
from tests.speculation.toys import paths, sequence_probs, table, without

PROMPT = (1, 2)
EDGE = 1e-9  # how close to a decision's boundary it is probed; far above float64 rounding, far below any probability


def rows(probs_VVV: Tensor, draft: tuple[int, ...]) -> Tensor:
    """Distributions at the prompt's end and behind every draft token, `[K + 1, V]`."""
    text = (*PROMPT, *draft)
    return torch.stack([probs_VVV[text[i], text[i + 1]] for i in range(len(draft) + 1)])


def outcomes(draft: tuple[int, ...], q_KV: Tensor | None, p_K1V: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of verifying one draft with its probability, integrated over the uniform numbers."""
    tokens_K = torch.tensor(draft)
    stands_K = acceptance(tokens_K, q_KV, p_K1V[:-1])
    for accepted in range(len(draft) + 1):
        here = float(stands_K[:accepted].prod()) * (1 - float(stands_K[accepted]) if accepted < len(draft) else 1.0)
        if here == 0:
            continue  # the distribution behind a rejection that cannot happen means nothing
        probs_V = next_probs(torch.tensor([accepted]), tokens_K, q_KV, p_K1V)[0]
        probs_V = probs_V / probs_V.sum()
        for token, probability in enumerate(probs_V.tolist()):
            yield (*draft[:accepted], token), here * probability


def output_probs(
    p_VVV: Tensor, q_VVV: Tensor | None, vocab: int, drafts: list[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """Probabilities of the first two output tokens; after a step of one token the target draws."""
    probs = dict.fromkeys(paths(vocab, 2), 0.0)
    for draft in drafts:
        q_KV = None if q_VVV is None else rows(q_VVV, draft)[:-1]
        drawn = 1.0 if q_KV is None else float(q_KV.gather(-1, torch.tensor(draft).unsqueeze(-1)).prod())
        if drawn == 0:
            continue  # this draft is never proposed
        for text, probability in outcomes(draft, q_KV, rows(p_VVV, draft)):
            if len(text) >= 2:
                probs[text[:2]] += drawn * probability
                continue
            for token, following in enumerate(p_VVV[PROMPT[-1], text[0]].tolist()):
                probs[(text[0], token)] += drawn * probability * following
    return probs


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("vocab", [3, 4])
def test_chain_drafts_leave_the_targets_distribution(vocab: int, sampling: Sampling) -> None:
    """Catches any flaw of the sampling rule: swapped p and q, a residual not clamped, a bonus from the wrong row."""
    p_table, q_table = table(10 + vocab, vocab), table(20 + vocab, vocab)
    probs = output_probs(sampling.probs(p_table), sampling.probs(q_table), vocab, list(paths(vocab, 2)))
    expected = sequence_probs(p_table, sampling, PROMPT, 2)
    assert probs == pytest.approx(expected, abs=1e-12)  # float64: a few dozen roundings of numbers below 1


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("vocab", [3, 4])
def test_one_hot_drafts_leave_the_targets_distribution(vocab: int, sampling: Sampling) -> None:
    """Catches a certain draft treated as if it had been drawn: each draft must leave the distribution unchanged."""
    p_table = table(10 + vocab, vocab)
    expected = sequence_probs(p_table, sampling, PROMPT, 2)
    for draft in paths(vocab, 2):
        probs = output_probs(sampling.probs(p_table), None, vocab, [draft])
        assert probs == pytest.approx(expected, abs=1e-12)  # as above


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("vocab", [3, 4])
def test_decisions_change_exactly_where_the_distribution_says(vocab: int, certain: bool) -> None:
    """Catches `verify_sampling` using its pieces wrongly: a uniform number read twice, a decision at another place."""
    p_VVV, q_VVV = Sampling(1.0).probs(table(10 + vocab, vocab)), Sampling(1.0).probs(table(20 + vocab, vocab))
    for draft in paths(vocab, 2):
        q_KV, p_K1V = None if certain else rows(q_VVV, draft)[:-1], rows(p_VVV, draft)
        tokens_K = torch.tensor(draft)
        for accepted in range(3):
            probs_V = next_probs(torch.tensor([accepted]), tokens_K, q_KV, p_K1V)[0]
            cdf = (probs_V / probs_V.sum()).cumsum(0).tolist()
            stands = acceptance(tokens_K, q_KV, p_K1V[:-1]).tolist()
            if accepted < 2 and stands[accepted] == 1:
                continue  # cannot be rejected
            uniforms = [stand - EDGE for stand in stands[:accepted]] + [stand + EDGE for stand in stands[accepted:]]
            for token in range(vocab):
                if probs_V[token] == 0:
                    continue
                for last in ((cdf[token - 1] if token else 0.0) + EDGE, cdf[token] - EDGE):
                    numbers = torch.tensor([*uniforms, last], dtype=torch.float64)
                    assert verify_sampling(tokens_K, q_KV, p_K1V, numbers) == (accepted, token)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=6))
def test_one_position_is_exact_for_any_two_distributions(weights: list[tuple[int, int]]) -> None:
    """Catches zeros, disjoint support or equal entries that break the identity min(p, q) + max(0, p - q)."""
    p_V, q_V = torch.tensor(weights, dtype=torch.float64).T
    if p_V.sum() == 0 or q_V.sum() == 0:
        return
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    probs_V = torch.zeros_like(p_V)
    for x in q_V.nonzero().flatten().tolist():
        tokens_K, p_2V = torch.tensor([x]), torch.stack([p_V, p_V])
        stands = float(acceptance(tokens_K, q_V.unsqueeze(0), p_V.unsqueeze(0)))
        probs_V[x] += q_V[x] * stands
        if stands < 1:
            rest_V = next_probs(torch.tensor([0]), tokens_K, q_V.unsqueeze(0), p_2V)[0]
            probs_V += q_V[x] * (1 - stands) * rest_V / rest_V.sum()
    # 1e-9: where p and q differ by rounding only, their difference has few correct digits.
    assert torch.allclose(probs_V, p_V, rtol=0, atol=1e-9)


def test_equal_distributions_up_to_rounding_draw_from_the_target() -> None:
    """Catches an empty difference p - q, from which any draw is an id past the vocabulary."""
    p_V = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q_V = p_V + torch.tensor([2**-52, 0.0])
    almost_one = torch.tensor([1 - 2**-53, 0.75], dtype=torch.float64)
    assert verify_sampling(torch.tensor([0]), q_V.unsqueeze(0), torch.stack([p_V, p_V]), almost_one) == (0, 1)


@pytest.mark.parametrize(
    ("draft", "expected"), [([1, 2, 0], (3, 3)), ([1, 0, 0], (1, 2)), ([0, 2, 0], (0, 1)), ([], (0, 1))]
)
def test_greedy_rule(draft: list[int], expected: tuple[int, int]) -> None:
    """Catches acceptance behind a mismatch, a next token from the wrong row, and a plain step without drafts."""
    logits_K1V = torch.eye(4)[[1, 2, 0, 3]][: len(draft) + 1]
    assert verify_greedy(torch.tensor(draft, dtype=torch.long), logits_K1V) == expected


def test_sampling_rule_without_drafts_is_a_plain_draw() -> None:
    """Catches an index into an empty draft."""
    p_1V = torch.tensor([[0.25, 0.75]])
    for q_KV in (None, torch.empty(0, 2)):
        assert verify_sampling(torch.empty(0, dtype=torch.long), q_KV, p_1V, torch.tensor([0.5])) == (0, 1)


def test_the_two_rules_differ_on_ties() -> None:
    """Catches the sampling rule used for greedy decoding: it accepts the second of two equally likely tokens."""
    tie_2V = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    draft = torch.tensor([1])
    assert verify_greedy(draft, tie_2V) == (0, 0)
    assert verify_sampling(draft, torch.tensor([[0.0, 1.0]]), tie_2V.softmax(-1), torch.tensor([0.1, 0.1]))[0] == 1


TREES = {
    "chain": (-1, 0),
    "siblings": (-1, -1, -1),
    "two levels": (-1, -1, 0, 0, 1),
    "one long branch": (-1, 0, -1, 1, 0),
}
Decision = tuple[int, float, bool]
"""A node that was tested, the probability that it stood, and whether it did."""
Outcome = tuple[list[int], list[Decision], Tensor, float]
"""A path that stands, its decisions, the distribution of the next token, and the path's probability."""


def behind(probs_VVV: Tensor, parents: Sequence[int], tokens: Sequence[int], node: int) -> Tensor:
    """The distribution behind a node (-1: behind the prompt)."""
    text = [*PROMPT, *(tokens[i] for i in path_to(parents, node))]
    return probs_VVV[text[-2], text[-1]]


def tree_rows(probs_VVV: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
    return torch.stack([behind(probs_VVV, parents, tokens, node) for node in range(-1, len(parents))])


def drawn_probs(q_VVV: Tensor, parents: Sequence[int], tokens: Sequence[int], replacement: bool) -> Tensor:
    """The distribution of every node's draw given its earlier siblings."""
    probs = []
    for node, parent in enumerate(parents):
        probs_V = behind(q_VVV, parents, tokens, parent)
        siblings = [tokens[i] for i in range(node) if parents[i] == parent]
        probs.append(probs_V if replacement else without(probs_V, siblings))
    return torch.stack(probs)


def tree_outcomes(
    parents: Sequence[int], tokens: Sequence[int], q_KV: Tensor | None, p_K1V: Tensor
) -> Iterator[Outcome]:
    """Every path that may stand."""

    def at(path: list[int], decisions: list[Decision], here: float) -> Iterator[Outcome]:
        node = path[-1] if path else -1
        probs_V = p_K1V[node + 1].double()
        for child in children(parents)[node + 1]:
            stands, rest_V = candidate(probs_V, None if q_KV is None else q_KV[child], tokens[child])
            if stands > 0:
                yield from at([*path, child], [*decisions, (child, stands, True)], here * stands)
            if stands == 1:
                return
            decisions, here, probs_V = [*decisions, (child, stands, False)], here * (1 - stands), rest_V
        yield path, decisions, probs_V, here

    return at([], [], 1.0)


def tree_output_probs(
    p_VVV: Tensor, q_VVV: Tensor | None, parents: Sequence[int], drafts: list[tuple[int, ...]], replacement: bool
) -> dict[tuple[int, ...], float]:
    """Distribution of the first three output tokens; what a step leaves open is drawn from the target."""
    vocab = p_VVV.shape[-1]
    probs = dict.fromkeys(paths(vocab, 3), 0.0)
    for tokens in drafts:
        q_KV, drawn = None, 1.0
        if q_VVV is not None:
            q_KV = drawn_probs(q_VVV, parents, tokens, replacement)
            drawn = float(q_KV.gather(-1, torch.tensor(tokens).unsqueeze(-1)).prod())
        if not drawn > 0:
            continue  # this draft is never proposed
        for path, _, probs_V, here in tree_outcomes(parents, tokens, q_KV, tree_rows(p_VVV, parents, tokens)):
            for token, probability in enumerate(probs_V.tolist()):
                text = (*(tokens[node] for node in path), token)[:3]
                for rest in paths(vocab, 3 - len(text)):
                    full = (*PROMPT, *text, *rest)
                    after = range(len(PROMPT) + len(text), len(full))
                    open_part = math.prod(float(p_VVV[full[i - 2], full[i - 1], full[i]]) for i in after)
                    probs[(*text, *rest)] += drawn * here * probability * open_part
    return probs


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without replacement"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=2), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("tree", ["chain", "siblings", "two levels"])
def test_drawn_trees_leave_the_targets_distribution(tree: str, sampling: Sampling, replacement: bool) -> None:
    """Catches a residual that forgets a rejected sibling, is not normalised, or subtracts another draw."""
    vocab, parents = 4 if tree == "siblings" else 3, TREES[tree]
    p_table, q_table = table(10 + vocab, vocab), table(20 + vocab, vocab)
    if tree == "siblings" and not replacement and sampling.top_k:
        sampling = Sampling(0.6, top_k=3)  # three different siblings need three tokens
    if tree == "siblings" and not replacement and sampling.top_p < 1:
        sampling = Sampling(1.3, top_p=0.999)
    drafts = list(paths(vocab, len(parents)))
    probs = tree_output_probs(sampling.probs(p_table), sampling.probs(q_table), parents, drafts, replacement)
    assert probs == pytest.approx(sequence_probs(p_table, sampling, PROMPT, 3), abs=1e-12)  # float64, as for chains


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_one_hot_trees_leave_the_targets_distribution(tree: str, sampling: Sampling) -> None:
    """Catches certain candidates treated as draws, and duplicates among siblings: each tree alone must be exact."""
    vocab, parents = 4, TREES[tree]
    p_table = table(10 + vocab, vocab)
    expected = sequence_probs(p_table, sampling, PROMPT, 3)
    for draft in list(paths(vocab, len(parents)))[:: 1 if len(parents) < 4 else 97]:
        probs = tree_output_probs(sampling.probs(p_table), None, parents, [draft], True)
        assert probs == pytest.approx(expected, abs=1e-12)  # as above


@pytest.mark.parametrize("scheme", ["with", "without", "one-hot"])
@pytest.mark.parametrize("tree", TREES)
def test_tree_decisions_change_exactly_where_the_distribution_says(tree: str, scheme: str) -> None:
    """Catches a node decided by another's uniform number or by the wrong row, and a path that skips its parent."""
    vocab, parents = 4, TREES[tree]
    p_VVV, q_VVV = Sampling(1.0).probs(table(14, vocab)), Sampling(1.0).probs(table(24, vocab))
    for tokens in list(paths(vocab, len(parents)))[:: 4 ** len(parents) // 16 + 1]:
        q_KV = None if scheme == "one-hot" else drawn_probs(q_VVV, parents, tokens, scheme == "with")
        if q_KV is not None and (q_KV.gather(-1, torch.tensor(tokens).unsqueeze(-1)) == 0).any():
            continue  # this draft is never proposed
        p_K1V = tree_rows(p_VVV, parents, tokens)
        for path, decisions, probs_V, _ in tree_outcomes(parents, tokens, q_KV, p_K1V):
            uniforms = torch.full((len(parents) + 1,), 0.5, dtype=torch.float64)
            for node, stands, stood in decisions:
                uniforms[node] = stands - EDGE if stood else stands + EDGE
            cdf = [0.0, *probs_V.cumsum(0).tolist()]
            for token in probs_V.nonzero().flatten().tolist():
                for last in (cdf[token] + EDGE, cdf[token + 1] - EDGE):
                    uniforms[-1] = last
                    assert verify_tree_sampling(torch.tensor(tokens), parents, q_KV, p_K1V, uniforms) == (path, token)


def test_a_chain_is_a_tree_of_one_branch() -> None:
    """Catches two sampling rules that disagree on what both can verify."""
    p_VVV, q_VVV = Sampling(1.0).probs(table(14, 4)), Sampling(1.0).probs(table(24, 4))
    generator = torch.Generator().manual_seed(2)
    for draft in paths(4, 3):
        q_KV, p_K1V = rows(q_VVV, draft)[:-1], rows(p_VVV, draft)
        uniforms_K1 = torch.rand(4, dtype=torch.float64, generator=generator)
        accepted, token = verify_sampling(torch.tensor(draft), q_KV, p_K1V, uniforms_K1)
        got = verify_tree_sampling(torch.tensor(draft), (-1, 0, 1), q_KV, p_K1V, uniforms_K1)
        assert got == (list(range(accepted)), token)


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ([5, 0, 0, 0, 0], ([], 5)),
        ([2, 0, 6, 0, 0], ([1], 6)),
        ([2, 0, 4, 0, 7], ([1, 3], 7)),
        ([1, 3, 0, 8, 0], ([0, 2], 8)),
    ],
)
def test_greedy_rule_on_a_tree(best: list[int], expected: tuple[list[int], int]) -> None:
    """Catches a path through a node whose parent did not stand, and a next token from the wrong row."""
    assert verify_tree_best(torch.tensor([1, 2, 3, 4]), (-1, -1, 0, 1), torch.tensor(best)) == expected


def test_a_tree_without_nodes_is_a_plain_draw() -> None:
    """Catches an index into an empty draft."""
    nothing, p_1V = torch.empty(0, dtype=torch.long), torch.tensor([[0.25, 0.75]])
    assert verify_tree_sampling(nothing, (), None, p_1V, torch.tensor([0.5])) == ([], 1)
    assert verify_tree_best(nothing, (), p_1V.argmax(-1)) == ([], 1)


@pytest.mark.parametrize("certain", [True, False])
def test_a_draft_that_is_impossible_never_stands(certain: bool) -> None:
    """Catches the uniform number 0 taken for one below a probability of 0, once in 2 ** 53 tokens."""
    p_K1V = torch.tensor([[0.6, 0.0, 0.4], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q_KV = None if certain else torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64)
    uniforms_K1 = torch.tensor([0.0, 0.9], dtype=torch.float64)
    assert verify_sampling(torch.tensor([1]), q_KV, p_K1V, uniforms_K1) == (0, 2)
    assert verify_tree_sampling(torch.tensor([1]), [-1], q_KV, p_K1V, uniforms_K1) == ([], 2)
