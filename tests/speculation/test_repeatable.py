"""A seed gives the same text again, whatever is drafted, and the distribution of its texts is the target's."""

from collections import Counter
from collections.abc import Callable

import pytest
from scipy.stats import chisquare
import torch

from qspec.errors import RecipeError
from qspec.numerics.speculation.probs import exponentials, race
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed, build
from qspec.speculation.types import Drafter, DraftLength, Repeatable, Sampling, randomness
from tests.speculation.toys import DrawnTree, TableLM, blend, sequence_probs, table

VOCAB = 6
TABLE = table(1, VOCAB)
FAIR = blend(2, TABLE, 0.4)
TEXTS = [[3, 1, 4], [5, 5, 2, 0], [3, 1, 4, 3, 1], [2]]
WARM, FILTERED = Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.9)

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(TableLM(FAIR)),
    "model of fewer tokens": lambda: ModelDrafter(TableLM(FAIR), tokens=4),
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(1, 8),
    "suffix + model": lambda: CombinedDrafter(SuffixDrafter(2, 8), ModelDrafter(TableLM(FAIR))),
    "tree": lambda: TreeDrafter(TableLM(FAIR), width=2, depth=3, nodes=6),
}


def continued(drafter: Drafter | None, policy: DraftLength | None, prompt: list[int], sampling: Sampling) -> list[int]:
    return generate(TableLM(TABLE), drafter, policy, prompt, 40, sampling, (), Repeatable(7)).tokens


@pytest.mark.parametrize("sampling", [WARM, FILTERED], ids=["temperature", "filtered"])
@pytest.mark.parametrize("policy", ["fixed", "heuristic", "confidence", "optimal"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_change_the_text_of_a_seed(name: str, policy: str, sampling: Sampling) -> None:
    """Catches a text that depends on lengths of drafts, on what a lookup remembers, or on what a policy has learned."""
    drafter, length, accepted = DRAFTERS[name](), build(policy, 3, 6), 0
    for prompt in TEXTS * 2:
        target = TableLM(TABLE)
        found = generate(target, drafter, length, prompt, 40, sampling, (), Repeatable(7))
        assert found.tokens == continued(None, None, prompt, sampling)
        accepted += sum(step.accepted for step in found.steps)
    assert accepted > 0 or policy == "optimal"  # which follows the clock


def test_those_beside_it_do_not_change_the_text_of_a_seed() -> None:
    """Catches numbers shared by requests of a batch, and a batch size that decides what is drawn."""
    for size in (1, 2, 4):
        asked = [
            GenerationRequest(text, 40, Repeatable(7), made(), build("heuristic", 3, 6))
            for text, made in zip(TEXTS[:size], DRAFTERS.values(), strict=False)
        ]
        found = generate_batch(TableLM(TABLE), asked, WARM, (), schedule=((1, 1, 5), (2, 3, 2), (4, 4, 0)))
        assert [one.tokens for one in found] == [continued(None, None, text, WARM) for text in TEXTS[:size]]


@pytest.mark.parametrize("tokens", [VOCAB, 4])
def test_a_draft_races_by_the_numbers_of_its_position(tokens: int) -> None:
    """Catches drafts that race by another position's numbers, or by those of other ids: few of them would stand."""
    target = TABLE.clone()
    target[..., tokens:] = -torch.inf
    drafter = ModelDrafter(TableLM(TABLE), tokens=tokens)
    steps = generate(TableLM(target), drafter, Fixed(4), [3, 1, 4], 60, WARM, (), Repeatable(3)).steps
    assert sum(step.drafted for step in steps) > 40
    assert all(step.accepted == step.drafted for step in steps)


def test_a_drafters_own_draws_do_not_matter() -> None:
    """Catches a rule that trusts the distributions which a proposal states, where they are not asked for."""

    class Drawing(DrawnTree):
        def propose(self, context, k, sampling, generator, more=None):  # type: ignore[no-untyped-def]
            return super().propose(context, k, sampling, own, more)

    own = torch.Generator().manual_seed(5)
    found = continued(Drawing(FAIR, (-1, -1, 0, 0, 1), replacement=True), Fixed(3), TEXTS[0], WARM)
    assert found == continued(None, None, TEXTS[0], WARM)


def test_texts_of_many_seeds_follow_the_targets_distribution() -> None:
    """Catches numbers that are not exponential, or neighbouring positions whose numbers depend on each other."""
    small, n, depth, prompt = table(9, 3), 900, 3, [2, 0, 1]
    counts = Counter(
        tuple(generate(TableLM(small), None, None, prompt, depth, WARM, (), Repeatable(seed)).tokens)
        for seed in range(n)
    )
    probs = sequence_probs(small, WARM, prompt, depth)
    cells = [text for text in probs if n * probs[text] >= 5]  # the usual validity rule of the chi-square test
    observed, expected = [counts[text] for text in cells], [n * probs[text] for text in cells]
    observed.append(n - sum(observed))
    expected.append(n - sum(expected))
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3  # seeds are fixed: this cannot flake


def test_numbers_depend_on_seed_and_position_alone() -> None:
    """Catches numbers that torch's own seed, or those asked for before, have moved, and a token that always arrives."""
    first = exponentials(5, 9, 1000)
    torch.manual_seed(99)
    assert torch.equal(exponentials(5, 9, 1000), first)
    assert not torch.equal(exponentials(5, 10, 1000), first)
    assert not torch.equal(exponentials(6, 9, 1000), first)
    assert not torch.equal(exponentials(5 + 2**32, 9, 1000), first)
    assert bool((first > 0).all())
    assert 0.9 < float(first.mean()) < 1.1  # standard error .03
    assert race(torch.tensor([[0.0, 1e-30, 0.0]]), first[:3]).tolist() == [1]


def test_without_a_seed_every_text_is_another() -> None:
    """Catches a fixed seed where none was asked for."""
    found = {tuple(generate(TableLM(TABLE), None, None, [3], 30, WARM, (), randomness(None)).tokens) for _ in range(3)}
    assert len(found) == 3


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [1e-46, 1e-39, float("nan"), float("-inf"), float("inf"), -1e-46])
def test_numbers_that_float32_does_not_hold_are_refused(name: str, value: float) -> None:
    """Catches a share of mass that rounds to 0 and keeps no token, which ended in an index outside the vocabulary."""
    with pytest.raises(RecipeError, match=f"{name} .*lost in float32"):
        Sampling(**({"temperature": 1.0} | {name: value}))
