"""Drafts of a speculator head: distributions that stay the target's, whatever the head says."""

from collections import Counter

import pytest
from scipy.stats import chisquare
import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize
from qspec.numerics.speculation.probs import exponentials
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.request import propose_together
from qspec.speculation.types import Ask, Repeatable, Sampling
from tests.speculation.toys import TableLM, greedy, sequence_probs, table

V = 6
TABLE = table(1, V)


class StatefulLM(TableLM):
    """A table whose hidden state behind a position is the one-hot pair of its last two tokens."""

    def hidden(self, count: int = 1) -> Tensor:
        before = [0, *self.tokens]
        pairs = torch.tensor([[before[i], before[i + 1]] for i in range(len(self.tokens) - count, len(self.tokens))])
        return torch.nn.functional.one_hot(pairs, V).flatten(1).float()


def a_head(draft_vocab: int = 0, seed: int = 3) -> MLPSpeculator:
    ids_D = torch.tensor([0, 2, 3, 5]) if draft_vocab else None
    head = MLPSpeculator(SpeculatorShape(2 * V, V, 3, 16, draft_vocab=draft_vocab), ids_D)
    initialize(head, torch.Generator().manual_seed(seed))
    return head.requires_grad_(False)


HEAD, SMALL = a_head(), a_head(4)


@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize("head", [HEAD, SMALL], ids=["whole", "reduced"])
def test_greedy_output_is_that_of_plain_decoding(head, candidates):
    """Would catch states of the wrong position, wrong ids of a reduced vocabulary, paths of a tree mixed up."""
    target, drafter = StatefulLM(TABLE), MlpDrafter(head, candidates=candidates, top_k=(3, 2, 2))
    accepted = 0
    for prompt in ([3, 1, 4], [5]):
        result = generate(target, drafter, Fixed(3), prompt, 40, Sampling(), (), torch.Generator())
        assert result.tokens == greedy(TABLE, prompt, 40)
        accepted += sum(step.accepted for step in result.steps)
    assert accepted > 0


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("head", [HEAD, SMALL], ids=["whole", "reduced"])
def test_sampled_distribution_is_the_targets(head, candidates):
    """Would catch a stated distribution that is not that of the draws: a reduced vocabulary that is not 0 elsewhere."""
    target, drafter = StatefulLM(table(9, V)), MlpDrafter(head, candidates=candidates, top_k=(2, 2, 2))
    generator, n = torch.Generator().manual_seed(0), 600
    probs = sequence_probs(table(9, V), Sampling(1.0), [1, 2], 3)
    drawn = Counter(
        tuple(generate(target, drafter, Fixed(3), [1, 2], 3, Sampling(1.0), (), generator).tokens) for _ in range(n)
    )
    likely = [path for path, p in probs.items() if p * n >= 5]
    expected, found = [probs[path] * n for path in likely], [drawn[path] for path in likely]
    rest = n - sum(expected)
    if rest > 5:
        expected, found = [*expected, rest], [*found, n - sum(found)]
    else:
        expected = [x * sum(found) / sum(expected) for x in expected]
    assert chisquare(found, expected).pvalue > 1e-4  # one false alarm in 10^4 seeds; the seed is fixed


def test_distributions_are_those_of_the_stages():
    """Would catch distributions under other settings, or of a head that was fed something else than what it drew."""
    target, drafter = StatefulLM(TABLE), MlpDrafter(SMALL)
    target.forward(torch.tensor([3, 1]))
    drafter.follow(target)
    sampling = Sampling(0.7)
    proposal = drafter.propose([3, 1, 4], 5, sampling, torch.Generator().manual_seed(0))
    assert len(proposal.tokens_K) == 3
    logits = SMALL(target.hidden(), torch.tensor([[4, *proposal.tokens_K.tolist()[:2]]]))
    for logits_1D, probs_V in zip(logits, proposal.probs_KV, strict=True):
        torch.testing.assert_close(probs_V[SMALL.ids_D], sampling.probs(logits_1D)[0])
        assert float(probs_V[[1, 4]].sum()) == 0


def test_a_seeds_drafts_race_by_the_numbers_of_their_ids():
    """Would catch a reduced vocabulary that races by the numbers of places: few of its drafts would stand."""
    target, drafter, sampling = StatefulLM(TABLE), MlpDrafter(SMALL), Sampling(0.7)
    target.forward(torch.tensor([3, 1]))
    drafter.follow(target)
    for seed in range(5):
        proposal = drafter.propose([3, 1, 4], 3, sampling, Repeatable(seed))
        tokens = proposal.tokens_K.tolist()
        assert proposal.probs_KV is None
        for i, logits_1D in enumerate(SMALL(target.hidden(), torch.tensor([[4, *tokens[:2]]]))):
            arrivals_D = exponentials(seed, 3 + i, V)[SMALL.ids_D]
            assert tokens[i] == int(SMALL.ids_D[(sampling.probs(logits_1D)[0] / arrivals_D).argmax()])


def test_drafting_ends():
    """Would catch drafts behind a stop token, beyond what was asked for, of padding, or after a `more` that said no."""
    target = StatefulLM(TABLE)
    target.forward(torch.tensor([3, 1]))

    def drafted(drafter: MlpDrafter, k: int, more=None) -> list[int]:
        drafter.follow(target)
        return drafter.propose([3, 1, 4], k, Sampling(), torch.Generator(), more).tokens_K.tolist()

    whole = drafted(MlpDrafter(HEAD), 3)
    assert drafted(MlpDrafter(HEAD), 2) == whole[:2]
    assert drafted(MlpDrafter(HEAD), 0) == []
    assert drafted(MlpDrafter(HEAD, eos_ids=[whole[0]]), 3) == whole[:1]
    asked: list[float] = []
    assert drafted(MlpDrafter(HEAD), 3, lambda p: asked.append(p) or len(asked) < 2) == whole[:1]
    assert drafted(MlpDrafter(HEAD), 3, lambda _: False) == []
    first = HEAD(target.hidden(), torch.tensor([[4]]))[0]
    assert asked[0] == pytest.approx(float(first.softmax(-1).max()))
    assert max(drafted(MlpDrafter(HEAD, tokens=2), 3)) < 2
    assert max(drafted(MlpDrafter(HEAD, tokens=2, candidates=4), 3)) < 2


def test_trees_hold_the_likeliest_paths():
    """Would catch paths ranked by their last token alone, or prefixes that are drafted twice."""
    target, drafter = StatefulLM(TABLE), MlpDrafter(HEAD, candidates=3, top_k=(2, 2))
    target.forward(torch.tensor([3, 1]))
    drafter.follow(target)
    proposal = drafter.propose([3, 1, 4], 2, Sampling(), torch.Generator())
    hidden, scores = target.hidden(), {}
    first_V = HEAD(hidden, torch.tensor([[4]]))[0][0].log_softmax(-1)
    for a in first_V.topk(2).indices.tolist():
        second_V = HEAD(hidden, torch.tensor([[4, a]]))[1][0].log_softmax(-1)
        scores |= {(a, b): float(first_V[a] + second_V[b]) for b in second_V.topk(2).indices.tolist()}
    best = sorted(scores, key=lambda path: -scores[path])[:3]
    tokens, parents = proposal.tokens_K.tolist(), proposal.parents
    leaves = [i for i in range(len(tokens)) if i not in parents]
    assert sorted((tokens[parents[i]], tokens[i]) for i in leaves) == sorted(best)
    assert len(tokens) == len({path[0] for path in best}) + 3


def test_batches_and_lookups():
    """Would catch one request's states read for another, or a head behind a lookup that never sees its target."""
    prompts = [[3, 1, 4], [5, 2, 0], [1]]
    asked = [
        GenerationRequest(prompt, 20, torch.Generator(), CombinedDrafter(NgramDrafter(), MlpDrafter(HEAD)), Fixed(3))
        for prompt in prompts
    ]
    found = generate_batch(StatefulLM(TABLE), asked, Sampling(), ())
    assert [one.tokens for one in found] == [greedy(TABLE, prompt, 20) for prompt in prompts]
    assert any(step.source == "model" and step.accepted for one in found for step in one.steps)


ASKED = [  # context, tokens, temperature, least confidence
    ([0, 3, 1, 4], 3, 0.0, 0.0),
    ([0, 5], 1, 0.8, 0.0),
    ([0, 2, 0, 2, 1], 3, 0.8, 0.35),
    ([0, 1, 1], 2, 1.5, 0.0),
    ([0, 4], 3, 0.0, 0.9),
]


def asks() -> list[tuple[MlpDrafter, Ask]]:
    """Requests that differ in everything, behind targets that have read their contexts."""
    found = []
    for i, (context, k, temperature, least) in enumerate(ASKED):
        target, drafter = StatefulLM(TABLE), MlpDrafter(HEAD, eos_ids=[2])
        target.forward(torch.tensor(context[:-1]))
        drafter.follow(target)
        generator = torch.Generator().manual_seed(i)
        found.append((drafter, Ask(context, k, Sampling(temperature), generator, Least(least))))
    return found


class Least:
    """Wants tokens of at least some confidence, and counts what it was asked."""

    def __init__(self, least: float) -> None:
        self.least, self.asked = least, 0

    def begins(self, name: str) -> int:
        return 9

    def __call__(self, confidence: float) -> bool:
        self.asked += 1
        return confidence >= self.least


def test_drafts_together_are_those_of_one_by_one():
    """Would catch a request that drafts by another's state, sampling, randomness or limits, or is stopped by its no."""
    alone = [drafter.propose(*ask) for drafter, ask in asks()]
    together = propose_together(asks())
    assert len({len(one.tokens_K) for one in alone}) > 2
    for one, other in zip(alone, together, strict=True):
        assert one.tokens_K.tolist() == other.tokens_K.tolist()
        assert (one.probs_KV is None) == (other.probs_KV is None)
        if one.probs_KV is not None:
            torch.testing.assert_close(one.probs_KV, other.probs_KV)


def test_a_batch_asks_the_head_once_per_depth(monkeypatch):
    """Would catch heads that are read for one request after the other, and stages that nobody waits for."""
    rows: list[tuple[int, int]] = []

    def advance(head, i, state, tokens):
        rows.append((i, len(tokens)))
        return real(head, i, state, tokens)

    real = MLPSpeculator.advance
    monkeypatch.setattr(MLPSpeculator, "advance", advance)
    asked = asks()
    made = propose_together(asked)
    stages = [ask.more.asked for _, ask in asked]
    assert rows == [(i, sum(n > i for n in stages)) for i in range(3)]
    assert all(proposal.seconds > 0 for proposal in made)


def test_requests_of_a_batch_draw_from_their_distributions_apart():
    """Would catch a draft drawn by another request's numbers or distribution: tokens would depend on each other."""
    texts, hot, n = [[1, 2], [4]], Sampling(1.0), 500
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    drawn = Counter[tuple[int, int]]()
    for _ in range(n):
        batch = [
            GenerationRequest(text, 2, g, MlpDrafter(HEAD), Fixed(1)) for text, g in zip(texts, generators, strict=True)
        ]
        first, second = generate_batch(StatefulLM(table(9, V)), batch, hot, ())
        drawn[first.tokens[1], second.tokens[1]] += 1
    counts = [Counter[int]() for _ in texts]
    for probs, text in zip(counts, texts, strict=True):
        for path, p in sequence_probs(table(9, V), hot, text, 2).items():
            probs[path[1]] += p
    expected = {(a, b): n * p * q for a, p in counts[0].items() for b, q in counts[1].items()}
    likely = [pair for pair, count in expected.items() if count >= 5]
    rest = n - sum(expected[pair] for pair in likely), n - sum(drawn[pair] for pair in likely)
    counts = [[expected[pair] for pair in likely] + [rest[0]], [drawn[pair] for pair in likely] + [rest[1]]]
    assert chisquare(counts[1], counts[0]).pvalue > 1e-4  # one false alarm in 10^4 seeds; the seeds are fixed


def test_targets_without_states_are_refused():
    """Would catch an attribute error in the middle of a request."""
    with pytest.raises(RecipeError, match="hidden states"):
        generate(TableLM(TABLE), MlpDrafter(HEAD), None, [1], 4, Sampling(), (), torch.Generator())
