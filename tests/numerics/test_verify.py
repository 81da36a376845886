"""The greedy and the sampling rule: exact laws by enumeration, not by chance."""

from collections.abc import Iterator

from hypothesis import given, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.numerics.verify import acceptance, next_law, verify_greedy, verify_sampling
from qspec.spec.types import Sampling
from tests.spec.toys import paths, sequence_law, table

PROMPT = (1, 2)
EDGE = 1e-9  # how close to a decision's boundary it is probed; far above float64 rounding, far below any probability


def rows(laws_VVV: Tensor, draft: tuple[int, ...]) -> Tensor:
    """Laws at the prompt's end and behind every draft token, `[K + 1, V]`."""
    text = (*PROMPT, *draft)
    return torch.stack([laws_VVV[text[i], text[i + 1]] for i in range(len(draft) + 1)])


def outcomes(draft: tuple[int, ...], q_KV: Tensor | None, p_K1V: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of verifying one draft with its probability, integrated over the uniform numbers."""
    tokens_K = torch.tensor(draft)
    stands_K = acceptance(tokens_K, q_KV, p_K1V[:-1])
    for accepted in range(len(draft) + 1):
        here = float(stands_K[:accepted].prod()) * (1 - float(stands_K[accepted]) if accepted < len(draft) else 1.0)
        if here == 0:
            continue  # the law behind a rejection that cannot happen means nothing
        law_V = next_law(torch.tensor([accepted]), tokens_K, q_KV, p_K1V)[0]
        law_V = law_V / law_V.sum()
        for token, probability in enumerate(law_V.tolist()):
            yield (*draft[:accepted], token), here * probability


def output_law(
    p_VVV: Tensor, q_VVV: Tensor | None, vocab: int, drafts: list[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """Law of the first two output tokens; a step that gives one token is followed by a draw from the target."""
    law = dict.fromkeys(paths(vocab, 2), 0.0)
    for draft in drafts:
        q_KV = None if q_VVV is None else rows(q_VVV, draft)[:-1]
        drawn = 1.0 if q_KV is None else float(q_KV.gather(-1, torch.tensor(draft).unsqueeze(-1)).prod())
        if drawn == 0:
            continue  # this draft is never proposed
        for text, probability in outcomes(draft, q_KV, rows(p_VVV, draft)):
            if len(text) >= 2:
                law[text[:2]] += drawn * probability
                continue
            for token, following in enumerate(p_VVV[PROMPT[-1], text[0]].tolist()):
                law[(text[0], token)] += drawn * probability * following
    return law


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("vocab", [3, 4])
def test_chain_drafts_leave_the_targets_law(vocab: int, sampling: Sampling) -> None:
    """Catches any flaw of the sampling rule: swapped p and q, a residual not clamped, a bonus from the wrong row."""
    p_table, q_table = table(10 + vocab, vocab), table(20 + vocab, vocab)
    law = output_law(sampling.law(p_table), sampling.law(q_table), vocab, list(paths(vocab, 2)))
    expected = sequence_law(p_table, sampling, PROMPT, 2)
    assert law == pytest.approx(expected, abs=1e-12)  # float64: a few dozen roundings of numbers below 1


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=3), Sampling(1.3, top_p=0.8)], ids=str)
@pytest.mark.parametrize("vocab", [3, 4])
def test_one_hot_drafts_leave_the_targets_law(vocab: int, sampling: Sampling) -> None:
    """Catches a certain draft treated as if it had been drawn: each single draft must leave the law unchanged."""
    p_table = table(10 + vocab, vocab)
    expected = sequence_law(p_table, sampling, PROMPT, 2)
    for draft in paths(vocab, 2):
        law = output_law(sampling.law(p_table), None, vocab, [draft])
        assert law == pytest.approx(expected, abs=1e-12)  # as above


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("vocab", [3, 4])
def test_decisions_change_exactly_where_the_law_says(vocab: int, certain: bool) -> None:
    """Catches `verify_sampling` using its pieces wrongly: a uniform number read twice, a decision at another place."""
    p_VVV, q_VVV = Sampling(1.0).law(table(10 + vocab, vocab)), Sampling(1.0).law(table(20 + vocab, vocab))
    for draft in paths(vocab, 2):
        q_KV, p_K1V = None if certain else rows(q_VVV, draft)[:-1], rows(p_VVV, draft)
        tokens_K = torch.tensor(draft)
        for accepted in range(3):
            law_V = next_law(torch.tensor([accepted]), tokens_K, q_KV, p_K1V)[0]
            cdf = (law_V / law_V.sum()).cumsum(0).tolist()
            stands = acceptance(tokens_K, q_KV, p_K1V[:-1]).tolist()
            if accepted < 2 and stands[accepted] == 1:
                continue  # cannot be rejected
            uniforms = [stand - EDGE for stand in stands[:accepted]] + [stand + EDGE for stand in stands[accepted:]]
            for token in range(vocab):
                if law_V[token] == 0:
                    continue
                for last in ((cdf[token - 1] if token else 0.0) + EDGE, cdf[token] - EDGE):
                    numbers = torch.tensor([*uniforms, last], dtype=torch.float64)
                    assert verify_sampling(tokens_K, q_KV, p_K1V, numbers) == (accepted, token)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=6))
def test_one_position_is_exact_for_any_two_laws(weights: list[tuple[int, int]]) -> None:
    """Catches laws with zeros, disjoint support or equal entries that break the identity min(p, q) + max(0, p - q)."""
    p_V, q_V = torch.tensor(weights, dtype=torch.float64).T
    if p_V.sum() == 0 or q_V.sum() == 0:
        return
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    law_V = torch.zeros_like(p_V)
    for x in q_V.nonzero().flatten().tolist():
        tokens_K, p_2V = torch.tensor([x]), torch.stack([p_V, p_V])
        stands = float(acceptance(tokens_K, q_V.unsqueeze(0), p_V.unsqueeze(0)))
        law_V[x] += q_V[x] * stands
        if stands < 1:
            rest_V = next_law(torch.tensor([0]), tokens_K, q_V.unsqueeze(0), p_2V)[0]
            law_V += q_V[x] * (1 - stands) * rest_V / rest_V.sum()
    # 1e-9: where p and q differ by rounding only, their difference has few correct digits.
    assert torch.allclose(law_V, p_V, rtol=0, atol=1e-9)


def test_equal_laws_up_to_rounding_draw_from_the_target() -> None:
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
