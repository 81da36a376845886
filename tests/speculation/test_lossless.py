"""Every drafter under every policy: greedy output and sampled distribution stay the target's."""

from collections import Counter
from collections.abc import Callable

import pytest
from scipy.stats import chisquare
import torch

from qspec.numerics.speculation.verify import acceptance, next_probs
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.cost_aware import CostAware
from qspec.speculation.length.policies import BatchLimited, Confidence, Fixed, Heuristic
from qspec.speculation.types import Drafter, DraftLength, Sampling
from tests.speculation.toys import TableLM, blend, greedy, sequence_probs, table

VOCAB = 6
TABLE = table(1, VOCAB)
FAIR = blend(2, TABLE, 0.4)
PROMPTS = ([3, 1, 4], [5, 5, 2, 0], [3, 1, 4, 3, 1], [3, 1, 4])
SMALL = table(9, 3)
HOT = Sampling(0.9, top_k=2)

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(TableLM(FAIR)),
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(1, 8),
    "forgetful suffix": lambda: SuffixDrafter(2, 8, memory_mb=0.03),
    "suffix + model": lambda: CombinedDrafter(SuffixDrafter(2, 8), ModelDrafter(TableLM(FAIR))),
    "ngram + model": lambda: CombinedDrafter(NgramDrafter(2, 3), ModelDrafter(TableLM(FAIR))),
}
POLICIES: dict[str, Callable[[], DraftLength]] = {
    "fixed": lambda: Fixed(3),
    "heuristic": lambda: Heuristic(2, 8),
    "confidence": lambda: Confidence(3, 8, 0.4),
    "optimal": lambda: CostAware(8),
    "limited": lambda: BatchLimited(CostAware(8), ((1, 8, 2), (9, 9, 0))),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding(drafter: str, policy: str) -> None:
    """Catches a cache, an index or a memory that carries a wrong token from step to step or request to request."""
    target, source, length = TableLM(TABLE), DRAFTERS[drafter](), POLICIES[policy]()
    accepted = 0
    for prompt in PROMPTS:
        args = (prompt, 40, Sampling(), (), torch.Generator())
        result = generate(target, source, length, *args, domain=str(len(prompt)))
        assert result.tokens == greedy(TABLE, prompt, 40)
        assert target.tokens == prompt + result.tokens[:-1]
        accepted += sum(s.accepted for s in result.steps)
    assert accepted > 0


@pytest.mark.parametrize("sampling", [Sampling(1.0), HOT], ids=["temperature", "filtered"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_distribution_of_certain_drafts_is_the_targets_exactly(drafter: str, sampling: Sampling) -> None:
    """Catches lookups whose tokens pass for drawn ones: all texts of three tokens are enumerated."""
    earlier, prompt, depth = [0, 2, 1, 0, 1, 1, 2, 0], [2, 0, 1, 2, 0], 3
    probs_VVV = sampling.probs(SMALL)

    def walk(text: list[int], probability: float) -> None:
        room = len(prompt) + depth - len(text)
        if room == 0:
            found[tuple(text[len(prompt) :])] += probability
            return
        source = DRAFTERS[drafter]()
        source.propose(earlier, 2, sampling, torch.Generator())
        source.reset()
        tokens_K = source.propose(text, room - 1, sampling, torch.Generator(), lambda _: True).tokens_K
        rows = [*text, *tokens_K.tolist()]
        p_K1V = torch.stack([probs_VVV[rows[i - 1], rows[i]] for i in range(len(text) - 1, len(rows))])
        stands_K = acceptance(tokens_K, None, p_K1V[:-1]).tolist()
        for n in range(len(stands_K) + 1):
            reached = probability * torch.tensor(stands_K[:n], dtype=torch.float64).prod().item()
            reached *= 1 - stands_K[n] if n < len(stands_K) else 1
            probs_V = next_probs(torch.tensor([n]), tokens_K, None, p_K1V)[0]
            for token, share in enumerate((probs_V / probs_V.sum()).tolist()):
                walk([*text, *tokens_K[:n].tolist(), token], reached * share)

    found: Counter[tuple[int, ...]] = Counter()
    walk(prompt, 1.0)
    for text, probability in sequence_probs(SMALL, sampling, prompt, depth).items():
        assert found[text] == pytest.approx(probability, abs=1e-14)  # a dozen float64 products and sums


@pytest.mark.parametrize("drafter", ["model", "suffix + model"])
def test_stopping_early_leaves_the_distribution_alone(drafter: str) -> None:
    """Catches a token dropped for its own improbability: unlikely tokens would come out too seldom."""
    n, depth, prompt, sampling = 1500, 3, [2, 0, 1], Sampling(1.0)
    models = {
        "model": lambda: ModelDrafter(TableLM(blend(2, SMALL, 0.8))),
        "suffix + model": lambda: CombinedDrafter(SuffixDrafter(1, 4), ModelDrafter(TableLM(blend(2, SMALL, 0.8)))),
    }
    source, policy, target = models[drafter](), Confidence(2, 3, 0.5), TableLM(SMALL)
    generator = torch.Generator().manual_seed(5)
    counts = Counter(
        tuple(generate(target, source, policy, prompt, depth, sampling, (), generator).tokens) for _ in range(n)
    )
    probs = sequence_probs(SMALL, sampling, prompt, depth)
    cells = [text for text in probs if n * probs[text] >= 5]  # the usual validity rule of the chi-square test
    observed, expected = [counts[text] for text in cells], [n * probs[text] for text in cells]
    observed.append(n - sum(observed))
    expected.append(n - sum(expected))
    # Fixed seed, so this cannot flake; 1e-3 over 2 cases leaves 0.2 % that a right engine had failed it.
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_at_length_0_nothing_is_drafted() -> None:
    """Catches a draft pass, or an index kept up to date, while the policy says that nothing pays."""
    draft, lookup = TableLM(FAIR), SuffixDrafter()
    for source in (ModelDrafter(draft), lookup):
        result = generate(TableLM(TABLE), source, Fixed(0), [3, 1, 4], 30, Sampling(), (), torch.Generator())
        assert result.tokens == greedy(TABLE, [3, 1, 4], 30)
    assert draft.rows == []
    assert lookup.remembered == 0


def test_a_request_is_continued_from_the_memory_of_the_one_before() -> None:
    """Catches a memory that is there and never helps."""
    lookup = SuffixDrafter()
    steps = []
    for _ in range(2):
        result = generate(TableLM(TABLE), lookup, Fixed(4), [3, 1, 4], 30, Sampling(), (), torch.Generator())
        steps.append(len(result.steps))
    assert steps[1] < steps[0]
