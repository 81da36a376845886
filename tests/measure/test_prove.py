"""The proof that travels with a pair: seeded text against plain text, other sampled text against its distribution."""

from collections.abc import Callable, Sequence
from functools import partial
import os

import pytest
import torch
from torch import Tensor

from qspec.measure import prove
from qspec.measure.arm import Arm, TokenizedPrompt
from qspec.numerics.speculation.probs import exponentials, sample
from qspec.progress import Progress
from qspec.report.verdict import _sampled, lossless
from qspec.schema.results import Marginals
from qspec.speculation import request
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed, Heuristic
from qspec.speculation.types import Drafter, Repeatable, Sampling
from tests.speculation.toys import DrawnTree, ScriptedTree, TableLM, blend, table

TABLE = table(1, 6, scale=1.0)
OTHER = blend(2, TABLE, 0.7)
REQUESTS = [TokenizedPrompt("qa", [1, i, 2]) for i in range(6)]
TREE = (-1, -1, 0, 0, 1)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(TableLM(OTHER)),
    "suffix": SuffixDrafter,
    "tree of chosen nodes": lambda: ScriptedTree([1, 2, 3, 4, 5], TREE),
    "tree of drawn nodes": lambda: DrawnTree(OTHER, TREE, replacement=False),
}
SEEDS = range(40 if os.environ.get("QSPEC_LONG") else 1)
Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[int, int]]


def judged(kind: str = "model", seed: int = 0) -> Marginals:
    arm = Arm(TableLM(TABLE), DRAFTERS[kind](), Heuristic())
    return prove.marginals(arm, REQUESTS, seed, Progress(quiet=True))


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_exact_speculation_is_not_accused(kind: str) -> None:
    """Would catch sets that depend on what was drawn, places that are off by one, and siblings that are forgotten."""
    found = [judged(kind, 100 * seed) for seed in SEEDS]
    assert min(law.p_value for law in found) > prove.CERTAIN
    assert all(law.drafted for law in found)


def test_p_values_are_uniform() -> None:
    """Would catch a variance that is not that of the counts: half of them would gather at 1, or below 0.1."""
    p = [judged(seed=1000 + 100 * seed).p_value for seed in range(200 if os.environ.get("QSPEC_LONG") else 4)]
    assert sum(value < 0.1 for value in p) / len(p) < 0.3
    assert 0.3 < sum(p) / len(p) < 0.95  # the smaller of two, doubled: they lie high


def test_enough_is_drafted_to_claim_what_is_claimed() -> None:
    """Would catch a proof that cannot see a total variation of a tenth and says that it holds."""
    found = judged()
    assert found.drafted is not None
    assert found.drafted >= prove.DRAFTED
    assert found.detectable is not None
    assert found.detectable <= prove.SHIFT
    assert _sampled(found).tone == "good"
    assert "of the probability towards the drafts would have been found in 4 of 5 cases" in _sampled(found).text


def test_too_few_drafts_claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a tick behind a comparison that could hardly have found anything."""
    monkeypatch.setattr(prove, "TEXTS", 1)
    found = judged()
    assert found.detectable is not None
    assert found.detectable > prove.SHIFT
    assert _sampled(found).tone == "open"
    none = found.model_copy(update={"drafted": 0, "detectable": 1.0})
    assert "no draft was judged" in _sampled(none).text
    old = found.model_copy(update={"drafted": None, "detectable": None})
    assert (_sampled(old).tone, _sampled(old.model_copy(update={"p_value": 1e-4})).tone) == ("open", "bad")


def _always(tokens_K: Tensor, q_KV: Tensor | None, p_K1V: Tensor, uniforms_K1: Tensor) -> tuple[int, int]:
    return len(tokens_K), int(torch.multinomial(p_K1V[-1], 1, generator=torch.Generator().manual_seed(0)))


def _leniently(exact: Verify, by: float, *told: Tensor) -> tuple[int, int]:
    """Every draft token stands more often than it should."""
    tokens_K, q_KV, p_K1V, uniforms_K1 = told
    return exact(tokens_K, q_KV, p_K1V, torch.cat([(uniforms_K1[:-1] - by).clamp_min(0), uniforms_K1[-1:]]))


def _from_the_whole_law(exact: Verify, *told: Tensor) -> tuple[int, int]:
    """Behind a rejection a token is drawn from the target's law, not from what the draft left of it."""
    accepted, token = exact(*told)
    rejected = accepted < len(told[0])
    return accepted, int(sample(told[2][accepted], told[3][-1])) if rejected else token


def _colder(exact: Verify, *told: Tensor) -> tuple[int, int]:
    """The target's law at another temperature."""
    tokens_K, q_KV, p_K1V, uniforms_K1 = told
    cold_K1V = p_K1V.pow(1.5) / p_K1V.pow(1.5).sum(-1, keepdim=True)
    return exact(tokens_K, q_KV, cold_K1V, uniforms_K1)


FAULTS: dict[str, Callable[[Verify], Verify]] = {
    "every draft stands": lambda exact: _always,
    "more drafts stand than should": lambda exact: partial(_leniently, exact, 0.25),
    "no residual law": lambda exact: partial(_from_the_whole_law, exact),
    "another temperature": lambda exact: partial(_colder, exact),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_lossy_engines_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a proof that a lossy engine passes."""
    monkeypatch.setattr(request, "verify_sampling", FAULTS[fault](request.verify_sampling))
    assert judged().p_value < prove.CERTAIN


def test_a_prompt_is_read_once_for_each_text() -> None:
    """Would catch prompts that are read anew for the law of every token, or for every text of a step."""
    target = TableLM(TABLE)
    long = [TokenizedPrompt("qa", [1 + i % 5 for i in range(400)])]
    prove.marginals(Arm(target, ModelDrafter(TableLM(OTHER)), Fixed(4)), long, 0, Progress(quiet=True))
    texts = sum(rows == 400 for rows in target.rows)
    assert 0 < texts == sum(rows == prove.POSITIONS for rows in target.rows)
    assert sum(target.rows) < texts * (400 + prove.POSITIONS * 7)


@pytest.mark.parametrize("kind", ["model", "suffix", "tree of chosen nodes"])
def test_seeded_texts_are_those_without_drafts(kind: str) -> None:
    """Would catch a seed whose text depends on whether, how far and by whom drafts were made."""
    arm = Arm(TableLM(TABLE), DRAFTERS[kind](), Heuristic())
    found = prove.seeded(arm, "plain", "pair", REQUESTS, 5)
    assert (found.arm, found.baseline, found.n, found.equal) == ("pair", "plain", prove.SEEDED, prove.SEEDED)


def test_a_seed_that_drafts_change_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch near ties that are claimed of the greedy choice, where the race had another winner by far."""
    choose = Repeatable.choose

    def shifted(self: Repeatable, probs_TV: Tensor, positions: Sequence[int], size: int, ids: Tensor | slice) -> Tensor:
        later = [position + (len(positions) > 1) for position in positions]
        return choose(self, probs_TV, later, size, ids)

    monkeypatch.setattr(Repeatable, "choose", shifted)
    found = prove.seeded(Arm(TableLM(TABLE), DRAFTERS["model"](), Fixed(3)), "plain", "pair", REQUESTS, 5)
    assert found.equal < found.n
    assert not found.lossless
    assert lossless(found, "seeded texts").tone == "bad"


def test_a_seeded_difference_by_rounding_is_a_near_tie() -> None:
    """Would catch a margin of the logits alone: the seed's numbers decide, and may lift an unlikely token."""
    text = generate(TableLM(TABLE), None, None, [1, 2], 1, Sampling(1.0), (), Repeatable(9)).tokens
    scores_V = TABLE[1, 2].double().log_softmax(-1) - exponentials(9, 2, 6).log()
    assert text == [int(scores_V.argmax())]
    second = int(scores_V.topk(2).indices[1])
    gap = float(scores_V[text[0]] - scores_V[second])
    request = TokenizedPrompt("qa", [1, 2])
    told = prove.parting(TableLM(TABLE), request, 0, text, [second], prove._race_score(9))
    assert told.margin == pytest.approx(gap)
    assert told.near_tie is (gap <= prove.NEAR_TIE * float(TABLE[1, 2].double().std()))
