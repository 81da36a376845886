"""The speculative loop against distributions and sequences that are known in closed form."""

from collections import Counter
from collections.abc import Callable
import itertools
from typing import ClassVar

import pytest
from scipy.stats import chisquare
import torch

from qspec.errors import RecipeError
from qspec.nn.reuse import PrefixReuse
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed, Heuristic
from qspec.speculation.types import Drafter, DraftLength, Generation, Sampling
from tests.speculation.toys import DrawnTree, Scripted, ScriptedTree, TableLM, blend, greedy, sequence_probs, table

GREEDY = Sampling()
VOCAB = 6
TABLE = table(1, VOCAB)
PROMPT = [3, 1, 4]
SHAPE = (-1, -1, -1, 0, 0, 1, 3, 5)

DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "perfect": lambda: ModelDrafter(TableLM(TABLE)),
    "fair": lambda: ModelDrafter(TableLM(blend(2, TABLE, 0.4))),
    "poor": lambda: ModelDrafter(TableLM(table(3, VOCAB))),
    "padded": lambda: ModelDrafter(TableLM(blend(2, TABLE, 0.4)), tokens=4),  # the target uses its padding
    "short": lambda: ModelDrafter(TableLM(TABLE, max_length=len(PROMPT) + 9)),
    "ngram": lambda: NgramDrafter(1, 3),
    "silent": Scripted,
    "wrong": lambda: Scripted([0, 5, 5, 0, 0, 0]),
    "tree": lambda: TreeDrafter(TableLM(blend(2, TABLE, 0.4)), width=2, depth=4, nodes=9),
    "perfect tree": lambda: TreeDrafter(TableLM(TABLE), width=3, depth=5, nodes=20),
    "drawn tree": lambda: DrawnTree(blend(2, TABLE, 0.4), SHAPE, replacement=True),
}
POLICIES: dict[str, Callable[[], DraftLength | None]] = {
    "default": lambda: None,
    "plain": lambda: Fixed(0),
    "one": lambda: Fixed(1),
    "five": lambda: Fixed(5),
    "heuristic": lambda: Heuristic(2, 8),
}


def run(
    target: TableLM,
    drafter: Drafter | None,
    policy: DraftLength | None = None,
    n: int = 24,
    sampling: Sampling = GREEDY,
    eos: tuple[int, ...] = (),
    seed: int = 0,
) -> Generation:
    return generate(target, drafter, policy, PROMPT, n, sampling, eos, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding(drafter: str, policy: str) -> None:
    """Catches any step that commits, drops or repeats a token, or leaves rejected drafts in the target's cache."""
    target = TableLM(TABLE)
    result = run(target, DRAFTERS[drafter](), POLICIES[policy]())
    assert result.tokens == greedy(TABLE, PROMPT, 24)
    assert target.tokens == PROMPT + result.tokens[:-1]
    assert result.stopped == "length"
    assert len(result.tokens) == 1 + sum(s.accepted + 1 for s in result.steps)


class BestLM(TableLM):
    """Tells the likeliest tokens of a step, and logits of prompts only."""

    def forward(self, tokens_T: torch.Tensor, last: int | None = None) -> torch.Tensor:
        assert last == 1, "logits of a greedy step were asked for"
        return super().forward(tokens_T, last)

    def greedy(self, tokens_T: torch.Tensor, last: int | None = None) -> torch.Tensor:
        return super().forward(tokens_T, last).argmax(-1)

    def forward_tree(self, tokens_T, parents_K):  # type: ignore[no-untyped-def]
        raise AssertionError("logits of a tree were asked for")

    @classmethod
    def greedy_many(cls, sequences, tokens, parents):  # type: ignore[no-untyped-def]
        asked = zip(sequences, tokens, parents, strict=True)
        return [TableLM.forward_tree(lm, *rows).argmax(-1) for lm, *rows in asked]


@pytest.mark.parametrize("drafter", ["none", "perfect", "fair", "ngram", "silent", "wrong", "tree"])
def test_a_target_that_tells_the_likeliest_tokens_is_asked_for_nothing_else(drafter: str) -> None:
    """Catches logits of the whole vocabulary where one token per row is needed, and other answers without them."""
    target = BestLM(TABLE)
    result = run(target, DRAFTERS[drafter](), Fixed(3))
    want = run(TableLM(TABLE), DRAFTERS[drafter](), Fixed(3))
    assert (result.tokens, target.tokens) == (want.tokens, PROMPT + want.tokens[:-1])
    assert [(s.drafted, s.accepted) for s in result.steps] == [(s.drafted, s.accepted) for s in want.steps]


@pytest.mark.parametrize("n", range(9))
@pytest.mark.parametrize("drafter", ["none", "perfect", "ngram", "perfect tree"])
def test_max_new_tokens_is_exact(drafter: str, n: int) -> None:
    """Catches an accepted run or a bonus token that overshoots the limit."""
    result = run(TableLM(TABLE), DRAFTERS[drafter](), Fixed(4), n)
    assert result.tokens == greedy(TABLE, PROMPT, n)
    assert result.stopped == "length"


@pytest.mark.parametrize("room", range(8))
@pytest.mark.parametrize("drafter", ["none", "perfect", "fair", "ngram", "wrong", "tree", "drawn tree"])
def test_full_context_ends_generation(drafter: str, room: int) -> None:
    """Catches verification rows that overflow the target's cache, and tokens lost in front of the limit."""
    target = TableLM(TABLE, max_length=len(PROMPT) + room)
    result = run(target, DRAFTERS[drafter](), Fixed(5))
    assert result.tokens == greedy(TABLE, PROMPT, room + 1)  # the last token needs no place of its own
    assert result.stopped == "context"


def test_a_policy_is_told_no_more_than_the_cache_takes() -> None:
    """Catches a draft's prefill paid for tokens that never fit, and a request so long that no float holds it."""

    class Told(Fixed):
        ahead: int | None = None

        def reset(self, domain: str = "", prompt: int = 0, ahead: int | None = None) -> None:
            self.ahead = ahead

    for asked, told in ((5, 5), (10**400, 8)):
        policy = Told(2)
        found = run(TableLM(TABLE, max_length=len(PROMPT) + 7), NgramDrafter(), policy, n=asked)
        assert (policy.ahead, len(found.tokens)) == (told, told)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_token_ends_generation_where_plain_decoding_would(drafter: str, at: int) -> None:
    """Catches tokens committed behind a stop token that stood inside an accepted run."""
    text = greedy(TABLE, PROMPT, 24)
    eos = text[at]
    target = TableLM(TABLE)
    result = run(target, DRAFTERS[drafter](), Fixed(5), eos=(eos,))
    assert result.tokens == text[: text.index(eos) + 1]
    assert result.stopped == "eos"
    assert target.tokens == PROMPT + result.tokens[:-1]
    assert len(result.tokens) == 1 + sum(s.accepted + 1 for s in result.steps)


def test_stop_token_in_a_draft_is_no_rejection() -> None:
    """Catches drafts behind an accepted stop token counted as rejected, which would bias alpha downwards."""
    counting = torch.zeros(8, 8, 8)
    counting[:, range(7), range(1, 8)] = 1.0  # 0, 1, 2, …
    result = generate(
        TableLM(counting), Scripted([2, 3, 4, 5]), Fixed(4), [0], 20, GREEDY, (3,), torch.Generator().manual_seed(0)
    )
    assert result.tokens == [1, 2, 3]
    assert [(s.drafted, s.accepted) for s in result.steps] == [(1, 1)]


def test_each_step_is_one_target_pass_over_drafts_and_newest() -> None:
    """Catches a second target pass per step, or passes that feed committed tokens again."""
    target = TableLM(TABLE)
    result = run(target, DRAFTERS["fair"](), Fixed(3))
    assert target.rows == [len(PROMPT)] + [s.drafted + 1 for s in result.steps]


@pytest.mark.parametrize("drafter", ["tree", "drawn tree"])
def test_a_tree_is_one_target_pass_too(drafter: str) -> None:
    """Catches a tree read branch by branch, and nodes that are not accounted for."""
    target = TableLM(TABLE)
    result = run(target, DRAFTERS[drafter](), Fixed(3))
    assert target.rows == [len(PROMPT)] + [s.nodes + 1 for s in result.steps]
    assert all(s.accepted <= s.drafted <= min(3, s.nodes) for s in result.steps)


def test_depth_is_what_counts_of_a_tree() -> None:
    """Catches siblings counted as rejected drafts, which would bias alpha downwards and shorten the next drafts."""
    counting = torch.zeros(8, 8, 8)
    counting[:, range(7), range(1, 8)] = 1.0  # 0, 1, 2, …
    tree = ScriptedTree([5, 2, 6, 3, 0, 4], (-1, -1, 1, 1, 0, 3))
    result = generate(TableLM(counting), tree, Fixed(4), [0], 7, GREEDY, (), torch.Generator())
    assert result.tokens == [1, 2, 3, 4, 5, 6, 7]
    # 2, 3, 4 stand up to a leaf; of 5 and 2, all there is room for, neither does; there is no room for drafts
    assert [(s.nodes, s.drafted, s.accepted) for s in result.steps] == [(6, 3, 3), (2, 1, 0), (0, 0, 0)]


def test_an_lm_that_reads_no_trees_says_so() -> None:
    """Catches an attribute error in the middle of a request, and chains refused along with trees."""
    target = PrefixReuse(TableLM(TABLE))
    line = TreeDrafter(TableLM(TABLE), width=1, depth=3, nodes=3)  # one branch: a chain
    for drafter in (DRAFTERS["fair"](), line):
        result = generate(target, drafter, Fixed(3), PROMPT, 9, GREEDY, (), torch.Generator())
        assert result.tokens == greedy(TABLE, PROMPT, 9)
    with pytest.raises(RecipeError, match="PrefixReuse reads one continuation at a time"):
        generate(target, DRAFTERS["tree"](), Fixed(3), PROMPT, 9, GREEDY, (), torch.Generator())


def test_perfect_draft_is_accepted_whole() -> None:
    """Catches a draft cache that is off by one behind a whole acceptance (its last draft was never fed)."""
    result = run(TableLM(TABLE), DRAFTERS["perfect"](), Fixed(3), n=25)
    assert [(s.drafted, s.accepted) for s in result.steps] == [(3, 3)] * 6


def test_requests_do_not_see_each_other() -> None:
    """Catches state of an earlier request in the target's cache, the drafter or the policy."""
    target, drafter, policy = TableLM(TABLE), DRAFTERS["fair"](), Heuristic(2, 8)
    first = run(target, drafter, policy)
    generate(target, drafter, policy, [5, 5, 2, 0], 7, GREEDY, (), torch.Generator().manual_seed(0))
    again = run(target, drafter, policy)
    assert again.tokens == first.tokens
    assert target.tokens == PROMPT + again.tokens[:-1]
    assert [(s.drafted, s.accepted) for s in again.steps] == [(s.drafted, s.accepted) for s in first.steps]


def test_tokens_are_streamed_once_and_in_order() -> None:
    """Catches a stream that misses the first token, repeats a run, or shows tokens before they are committed."""
    seen: list[list[int]] = []
    result = generate(
        TableLM(TABLE), DRAFTERS["fair"](), Fixed(4), PROMPT, 24, GREEDY, (), torch.Generator(), seen.append
    )
    assert list(itertools.chain(*seen)) == result.tokens
    assert [len(tokens) for tokens in seen] == [1] + [s.accepted + 1 for s in result.steps]


def test_times_of_steps_add_up() -> None:
    """Catches a part of a step that is charged twice or to nobody."""
    result = run(TableLM(TABLE), DRAFTERS["fair"](), Fixed(4))
    parts = [t for s in result.steps for t in (s.t_draft, s.t_verify, s.t_other)]
    assert min(parts) >= 0
    assert 0 < sum(parts) <= result.seconds
    assert result.ttft > 0


@pytest.mark.parametrize(("prompt", "message"), [([], "empty prompt"), ([1] * 9, "prompt of 9 tokens")])
def test_prompts_that_cannot_be_continued_are_refused(prompt: list[int], message: str) -> None:
    """Catches an index error deep inside the model instead of one line that says what to do."""
    with pytest.raises(RecipeError, match=message):
        generate(TableLM(TABLE, max_length=8), None, None, prompt, 4, GREEDY, (), torch.Generator())


def test_sampling_is_reproducible_from_its_generator() -> None:
    """Catches randomness from anywhere but the generator that was passed."""
    hot = Sampling(temperature=1.0)
    texts = [run(TableLM(TABLE), DRAFTERS["fair"](), sampling=hot, seed=s).tokens for s in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


SAMPLED: dict[str, Callable[[torch.Tensor], Drafter | None]] = {
    "none": lambda _: None,
    "fair": lambda small: ModelDrafter(TableLM(blend(2, small, 0.4))),
    "poor": lambda small: ModelDrafter(TableLM(table(3, 3))),
    "padded": lambda small: ModelDrafter(TableLM(blend(2, small, 0.4)), tokens=2),  # the target uses its padding
    "ngram": lambda _: NgramDrafter(1, 2),
    "wrong": lambda _: Scripted([1, 1]),
    "tree": lambda small: TreeDrafter(TableLM(blend(2, small, 0.4)), width=2, depth=2, nodes=5),
    "drawn tree": lambda small: DrawnTree(blend(2, small, 0.4), (-1, -1, 0, 0, 1), replacement=True),
    "distinct tree": lambda small: DrawnTree(blend(2, small, 0.4), (-1, -1, 0, 0, 1), replacement=False),
}


@pytest.mark.parametrize("drafter", SAMPLED)
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=2, top_p=0.9)], ids=["temperature", "filtered"]
)
def test_sampled_sequences_follow_the_targets_distribution(drafter: str, sampling: Sampling) -> None:
    """Catches a biased draw anywhere between uniforms and committed tokens: reused uniforms, wrong or stale rows."""
    n, depth, prompt = 800, 3, [2, 0, 1]
    small = table(9, 3)  # few texts, so that each is seen often
    source = SAMPLED[drafter](small)
    target, generator = TableLM(small), torch.Generator().manual_seed(5)
    counts = Counter(
        tuple(generate(target, source, Fixed(2), prompt, depth, sampling, (), generator).tokens) for _ in range(n)
    )
    probs = sequence_probs(small, sampling, prompt, depth)
    assert all(probs[text] > 0 for text in counts), "a text that the target cannot produce"
    # Cells with fewer than 5 expected counts are pooled, the usual validity rule of the chi-square test.
    cells = [text for text in probs if n * probs[text] >= 5]
    observed = [counts[text] for text in cells]
    expected = [n * probs[text] for text in cells]
    if n - sum(expected) > 1e-6:
        observed.append(n - sum(observed))
        expected.append(n - sum(expected))
    # Fixed seed, so this cannot flake; 1e-3 over 18 cases leaves a 2 % chance that a right engine had failed it.
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab", [4, 9])
def test_draft_of_another_padded_vocabulary(vocab: int, sampling: Sampling) -> None:
    """Catches ids that the target does not have, and distributions of another width than the target's."""
    draft = ModelDrafter(TableLM(_resized(vocab)), vocab_size=VOCAB)
    result = run(TableLM(TABLE), draft, Fixed(3), sampling=sampling)
    assert len(result.tokens) == 24
    assert max(result.tokens) < VOCAB
    assert sampling != GREEDY or result.tokens == greedy(TABLE, PROMPT, 24)
    assert sum(s.accepted for s in result.steps) > 0


def _resized(vocab: int) -> torch.Tensor:
    """TABLE as seen by a draft whose output layer has another width; its padding is likelier than any real token."""
    wide = torch.full((VOCAB, VOCAB, 9), 20.0, dtype=torch.float64)
    wide[..., :VOCAB] = TABLE
    return wide[..., :vocab]


class ThreadedLM(TableLM):
    """Computes on threads of its own, and keeps how many torch had meanwhile."""

    threads = 2
    torchs: ClassVar[set[int]] = set()

    def forward(self, tokens_T: torch.Tensor, last: int | None = None) -> torch.Tensor:
        self.torchs.add(torch.get_num_threads())
        if len(self.tokens) > self.max_length - 2:
            raise MemoryError
        return super().forward(tokens_T, last)


def test_torch_has_one_thread_beside_a_target_with_its_own() -> None:
    """Catches threads of torch that wait at full speed on the target's cores, and a count that is not put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(ThreadedLM(TABLE), DRAFTERS["fair"](), Fixed(3))
        run(PrefixReuse(ThreadedLM(TABLE)), None, None)
        generate_batch(ThreadedLM(TABLE), [GenerationRequest([3], 4, torch.Generator())], GREEDY, ())
        assert ThreadedLM.torchs == {1}
        with pytest.raises(MemoryError):
            run(ThreadedLM(TABLE, 12), DRAFTERS["none"](), Fixed(3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
