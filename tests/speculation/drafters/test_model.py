"""Draft models: what they propose and what their cache holds."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from qspec.speculation.drafters.model import FEW, ModelDrafter
from qspec.speculation.request import propose_together
from qspec.speculation.types import Ask, Drafter, More, Proposal, Sampling
from tests.speculation.toys import TableLM, greedy, table

TABLE = table(4, 6)
GREEDY, HOT = Sampling(), Sampling(temperature=0.8, top_k=4, top_p=0.95)


class Interrupted(TableLM):
    """Stopped by the user in the fifth call."""

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        if len(self.rows) == 4:
            self.rows.append(0)
            raise KeyboardInterrupt
        return super().forward(tokens_T, last)


def propose(drafter: ModelDrafter, context: list[int], k: int, sampling: Sampling = GREEDY) -> Proposal:
    return drafter.propose(context, k, sampling, torch.Generator().manual_seed(3))


def test_drafts_its_own_greedy_continuation() -> None:
    """Catches a chain that feeds the wrong token back."""
    proposal = propose(ModelDrafter(TableLM(TABLE)), [2, 5], 6)
    assert proposal.tokens_K.tolist() == greedy(TABLE, [2, 5], 6)
    assert proposal.probs_KV is None


def test_cache_after_rejection_equals_one_that_never_drafted() -> None:
    """Catches rejected drafts that stay in the cache, and tokens that are fed twice."""
    lm = TableLM(TABLE)
    drafter = ModelDrafter(lm)
    first = propose(drafter, [2, 5], 4).tokens_K.tolist()
    context = [2, 5, first[0], (first[1] + 1) % 6]  # one draft stood, the second was replaced
    again = propose(drafter, context, 3)
    fresh = ModelDrafter(TableLM(TABLE))
    assert again.tokens_K.tolist() == propose(fresh, context, 3).tokens_K.tolist()
    assert lm.tokens == context + again.tokens_K.tolist()[:-1]
    assert lm.rows == [2, 1, 1, 1, 1, 1, 1]


def test_whole_acceptance_feeds_last_draft_and_bonus() -> None:
    """Catches the classic hole: the last draft token never went through the draft model."""
    lm = TableLM(TABLE)
    drafter = ModelDrafter(lm)
    context = [2, 5, *propose(drafter, [2, 5], 3).tokens_K.tolist(), 1]
    second = propose(drafter, context, 2)
    assert lm.rows[3:] == [2, 1]
    assert second.tokens_K.tolist() == greedy(TABLE, context, 2)


def test_a_context_that_lost_tokens_is_followed() -> None:
    """Catches a cache longer than the context it is asked about."""
    drafter = ModelDrafter(TableLM(TABLE))
    propose(drafter, [2, 5, 1, 3], 4)
    assert propose(drafter, [2, 5], 3).tokens_K.tolist() == greedy(TABLE, [2, 5], 3)


def test_distributions_are_those_the_tokens_were_drawn_from() -> None:
    """Catches unfiltered distributions handed to verification: the output's would no longer be the target's."""
    proposal = propose(ModelDrafter(TableLM(TABLE)), [2, 5], 5, HOT)
    text = [2, 5, *proposal.tokens_K.tolist()]
    assert proposal.probs_KV is not None
    for i in range(5):
        expected = HOT.probs(TABLE[text[i], text[i + 1]].unsqueeze(0))[0]
        assert torch.equal(proposal.probs_KV[i], expected)
        assert expected[text[i + 2]] > 0


def test_every_draft_token_has_its_own_uniform_number() -> None:
    """Catches a number used twice: draft tokens would depend on each other, and the output's distribution be lost."""
    tokens = propose(ModelDrafter(TableLM(torch.zeros(6, 6, 6))), [2, 5], 8, Sampling(temperature=1.0)).tokens_K
    uniforms_K = torch.rand(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert tokens.tolist() == (6 * uniforms_K).floor().tolist()


class Counted(TableLM):
    """Notes the rows of every shared pass."""

    passes: ClassVar[list[list[int]]] = []

    @classmethod
    def forward_many(cls, sequences, tokens, parents):  # type: ignore[no-untyped-def]
        cls.passes.append([len(tokens_T) for tokens_T in tokens])
        return super().forward_many(sequences, tokens, parents)


CONTEXTS = [[2, 5], [1] * (FEW + 1), [3], [4, 4, 0]]


def asked(drafters: list[ModelDrafter], seed: int = 0) -> list[tuple[Drafter, Ask]]:
    """Requests of their own lengths, sampling and randomness; the last wants two tokens of three."""
    answers = iter([True, True, False])
    more: list[More | None] = [None, None, None, Script(answers)]
    terms = zip(CONTEXTS, (3, 2, 1, 3), (GREEDY, HOT, HOT, Sampling(0.3)), more, strict=True)
    return [
        (drafter, Ask(context, k, sampling, torch.Generator().manual_seed(seed + i), judge))
        for i, (drafter, (context, k, sampling, judge)) in enumerate(zip(drafters, terms, strict=True))
    ]


class Script:
    """Wants what it is told to."""

    def __init__(self, answers: Iterator[bool]) -> None:
        self._answers = answers

    def begins(self, name: str) -> int:
        return 9

    def __call__(self, confidence: float) -> bool:
        return next(self._answers)


def test_drafts_of_a_batch_share_passes_and_are_those_of_one_by_one() -> None:
    """Catches a pass for each request, one kept waiting by another, and prompts whose every row gets logits."""
    drafters = [ModelDrafter(Counted(TABLE)) for _ in CONTEXTS]
    Counted.passes = []
    first = propose_together(asked(drafters))
    assert Counted.passes == [[2, 1, 3], [1, 1, 1], [1, 1]]  # the long prompt alone; three, two and one tokens
    again = propose_together(asked(drafters, 9))  # from caches that hold drafts
    lms = [ModelDrafter(TableLM(TABLE)) for _ in CONTEXTS]
    for made, seed in ((first, 0), (again, 9)):
        alone = [drafter.propose(*ask) for drafter, ask in asked(lms, seed)]
        assert [one.tokens_K.tolist() for one in made] == [one.tokens_K.tolist() for one in alone]
        assert [len(one.tokens_K) for one in made] == [3, 2, 1, 2]
        for one, other in zip(made, alone, strict=True):
            assert (one.probs_KV is None) == (other.probs_KV is None)
            assert one.probs_KV is None or torch.equal(one.probs_KV, other.probs_KV)
    assert [d.lm.tokens for d in drafters] == [d.lm.tokens for d in lms]


def test_models_of_different_weights_draft_apart() -> None:
    """Catches one draft model asked for the tokens of another."""
    other = table(5, 6)
    drafters = [ModelDrafter(Counted(TABLE)), ModelDrafter(Counted(other))]
    Counted.passes = []
    made = propose_together([(d, Ask([2, 5], 3, GREEDY, torch.Generator())) for d in drafters])
    assert [one.tokens_K.tolist() for one in made] == [greedy(t, [2, 5], 3) for t in (TABLE, other)]
    assert Counted.passes == []


def test_drafts_only_what_its_cache_can_hold() -> None:
    """Catches an overflow of a draft whose context is shorter than the target's; the last draft takes no place."""
    drafter = ModelDrafter(TableLM(TABLE, max_length=6))
    lengths = [len(propose(drafter, [1] * n, 4).tokens_K) for n in (2, 4, 5, 6, 7, 9)]
    assert lengths == [4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_padding_is_never_drafted(sampling: Sampling) -> None:
    """Catches rows of zeros, which predict 0 and so beat every real token where all of those are below."""
    padded = torch.zeros(8, 8, 8, dtype=torch.float64)
    padded[:6, :6, :6] = TABLE - 20
    proposal = propose(ModelDrafter(TableLM(padded), tokens=6), [2, 5], 6, sampling)
    real = propose(ModelDrafter(TableLM(TABLE)), [2, 5], 6, sampling)
    assert proposal.tokens_K.tolist() == real.tokens_K.tolist()
    if real.probs_KV is not None:
        assert proposal.probs_KV is not None
        assert proposal.probs_KV.shape == (6, 8)  # the target's width
        assert not proposal.probs_KV[:, 6:].any()
        # softmax of logits 20 lower: float64 rounds them at 4e-15
        assert torch.allclose(proposal.probs_KV[:, :6], real.probs_KV, rtol=0, atol=1e-12)


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    """Catches draft passes whose tokens can never stand."""
    lm = TableLM(TABLE)
    text = greedy(TABLE, [2, 5], 6)
    proposal = propose(ModelDrafter(lm, eos_ids=(text[1],)), [2, 5], 6)
    assert proposal.tokens_K.tolist() == text[: text.index(text[1]) + 1]
    assert len(lm.rows) == len(proposal.tokens_K)


def test_reset_empties_the_cache() -> None:
    """Catches a drafter that trusts a cache which somebody else has used since."""
    lm = TableLM(TABLE)
    drafter = ModelDrafter(lm)
    propose(drafter, [2, 5], 3)
    drafter.reset()
    assert lm.length == 0
    assert propose(drafter, [2, 5], 3).tokens_K.tolist() == greedy(TABLE, [2, 5], 3)


def test_an_interrupted_draft_leaves_no_wrong_cache() -> None:
    """Catches a cache believed to hold what an aborted chain had already rolled back."""
    lm = Interrupted(TABLE)
    drafter = ModelDrafter(lm)
    propose(drafter, [2, 5, 1], 3)
    with pytest.raises(KeyboardInterrupt):
        propose(drafter, [2, 4, 4], 3)
    context = [2, 5, 1, 0]
    assert propose(drafter, context, 3).tokens_K.tolist() == greedy(TABLE, context, 3)
    assert lm.tokens[:4] == context
