"""Drafts of an EAGLE-3 head: text and distributions stay the target's, and nothing is left of drafts rolled back."""

from collections import Counter
from collections.abc import Sequence
from typing import Self

import pytest
from scipy.stats import chisquare
import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.models.load import load
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eager.decoder import Decoder
from qspec.nn.eagle3 import Eagle3, Eagle3Shape, HeadCache
from qspec.nn.mlp_speculator import swap_linears
from qspec.numerics.speculation.probs import exponentials
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.eagle3 import Eagle3Drafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.request import propose_together
from qspec.speculation.types import Ask, Randomness, Repeatable, Sampling
from tests.speculation.drafters.test_mlp import Least
from tests.speculation.toys import TableLM, greedy, sequence_probs, table
from tests.tiny import tiny_model

V = 6
TABLE = table(1, V)
STREAMS = torch.randn(2, V, V, generator=torch.Generator().manual_seed(8))
NATIVE = pytest.mark.skipif(NativeDecoder.missing() is not None, reason=str(NativeDecoder.missing()))


class LayeredLM(TableLM):
    """A table with two layers to tap, whose residuals are a function of the position's token and the one before."""

    layers: Sequence[int] = ()

    def tap(self, layers: Sequence[int]) -> None:
        self.layers = layers

    def tapped(self, start: int) -> Tensor:
        before = [0, *self.tokens]
        rows = [STREAMS[:, before[i]] + 0.5 * STREAMS[:, before[i + 1]].flip(0) for i in range(start, len(self.tokens))]
        return torch.stack(rows)[:, list(self.layers)].flatten(1)

    def fork(self) -> Self:
        return type(self)(self.table_VVV, self.max_length)


def a_head(draft_vocab: int = 0, seed: int = 3, layers: int = 1) -> Eagle3:
    generator = torch.Generator().manual_seed(seed)
    shape = Eagle3Shape(V, V, (0, 1), 12, 2, 1, 4, V, draft_vocab, layers, norm_before_residual=True)
    ids_D = torch.tensor([0, 2, 3, 5]) if draft_vocab else None
    head = Eagle3(shape, ids_D, torch.randn(V, V, generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


HEAD, SMALL = a_head(layers=2), a_head(4)


def chain_logits(head: Eagle3, context: list[int], drafts: list[int]) -> Tensor:
    """Logits of every draft, from nothing but the text: a new cache, all true rows at once, then rows of drafts."""
    target, cache = LayeredLM(TABLE), HeadCache(head.shape)
    target.tap((0, 1))
    target.forward(torch.tensor(context[:-1]))
    y_TH = head.run(head.fuse(target.tapped(0)), torch.tensor(context[1:]), torch.arange(len(context) - 1), cache)
    logits = [head.logits(y_TH[-1:])]
    for token in drafts[:-1]:
        y_TH = head.run(head.feed(y_TH[-1:]), torch.tensor([token]), torch.tensor([cache.length]), cache)
        logits.append(head.logits(y_TH))
    return torch.cat(logits)


def ready(drafter: Eagle3Drafter, context: list[int]) -> Eagle3Drafter:
    """Behind a target that has read the context but for its newest token."""
    target = LayeredLM(TABLE)
    drafter.reset()
    drafter.follow(target)
    target.forward(torch.tensor(context[:-1]))
    return drafter


@pytest.mark.parametrize("head", [HEAD, SMALL], ids=["whole", "reduced"])
def test_greedy_output_is_that_of_plain_decoding(head):
    """Would catch ids of a reduced vocabulary that are places, and states of the wrong position."""
    target, drafter = LayeredLM(TABLE), Eagle3Drafter(head)
    accepted = 0
    for prompt in ([3, 1, 4], [5, 2]):
        result = generate(target, drafter, Fixed(3), prompt, 40, Sampling(), (), torch.Generator())
        assert result.tokens == greedy(TABLE, prompt, 40)
        accepted += sum(step.accepted for step in result.steps)
    assert accepted > 0


@pytest.mark.parametrize("head", [HEAD, SMALL], ids=["whole", "reduced"])
def test_sampled_distribution_is_the_targets(head):
    """Would catch a distribution that is not that of the draws: a reduced vocabulary that is not 0 elsewhere."""
    target, drafter, hot = LayeredLM(table(9, V)), Eagle3Drafter(head), Sampling(1.0)
    generator, n = torch.Generator().manual_seed(0), 600
    probs = sequence_probs(table(9, V), hot, [1, 2], 3)
    drawn = Counter(tuple(generate(target, drafter, Fixed(3), [1, 2], 3, hot, (), generator).tokens) for _ in range(n))
    likely = [path for path, p in probs.items() if p * n >= 5]
    expected, counts = [probs[path] * n for path in likely], [drawn[path] for path in likely]
    expected, counts = [*expected, n - sum(expected)], [*counts, n - sum(counts)]
    assert chisquare(counts, expected).pvalue > 1e-4  # one false alarm in 10^4 seeds; the seed is fixed


@pytest.mark.parametrize("head", [HEAD, SMALL], ids=["whole", "reduced"])
def test_rolled_back_drafts_leave_no_trace(head):
    """Would catch slots of rejected drafts that are read on, and accepted ones that keep the head's own outputs.

    After any number of steps a proposal is that of a head which has seen nothing but the committed text.
    """
    target, drafter = LayeredLM(TABLE), Eagle3Drafter(head)
    proposals: list[tuple[list[int], Tensor]] = []

    class Watched(Eagle3Drafter):
        @classmethod
        def propose_many(cls, drafters, asks):
            made = super().propose_many(drafters, asks)
            proposals.extend((list(ask.context), one.tokens_K) for ask, one in zip(asks, made, strict=True))
            return made

    watched = Watched(head)
    generate(target, watched, Fixed(4), [3, 1, 4], 30, Sampling(), (), torch.Generator())
    assert len({len(context) for context, _ in proposals}) > 5
    for context, tokens_K in proposals:
        fresh = ready(drafter, context).propose(context, 4, Sampling(), torch.Generator())
        assert tokens_K.tolist() == fresh.tokens_K[: len(tokens_K)].tolist()
    context, tokens_K = proposals[-1]
    rows = [cache._kv_2NLK[-1][:, :, : len(context) - 1] for cache in (watched._cache, drafter._cache)]
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)  # rows of one pass, or of several


def test_distributions_are_those_of_the_rows():
    """Would catch distributions under other settings, of other ids, or of a head that was fed what it did not draw."""
    context, sampling = [3, 1, 4], Sampling(0.7)
    proposal = ready(Eagle3Drafter(SMALL), context).propose(context, 5, sampling, torch.Generator().manual_seed(0))
    tokens = proposal.tokens_K.tolist()
    assert len(tokens) == 5
    probs_KD = sampling.probs(chain_logits(SMALL, context, tokens))
    torch.testing.assert_close(proposal.probs_KV[:, SMALL.ids_D], probs_KD)
    assert float(proposal.probs_KV[:, [1, 4]].sum()) == 0


def test_a_seeds_drafts_race_by_the_numbers_of_their_ids():
    """Would catch a reduced vocabulary that races by the numbers of places: few of its drafts would be accepted."""
    context, sampling = [3, 1, 4], Sampling(0.7)
    for seed in range(4):
        proposal = ready(Eagle3Drafter(SMALL), context).propose(context, 3, sampling, Repeatable(seed))
        tokens = proposal.tokens_K.tolist()
        assert proposal.probs_KV is None
        for i, probs_D in enumerate(sampling.probs(chain_logits(SMALL, context, tokens))):
            arrivals_D = exponentials(seed, 3 + i, V)[SMALL.ids_D]
            assert tokens[i] == int(SMALL.ids_D[(probs_D / arrivals_D).argmax()])


def test_drafting_ends():
    """Would catch drafts behind a stop token, beyond what was asked for, of padding, or after a `more` that said no."""
    context = [3, 1, 4]

    def drafted(drafter: Eagle3Drafter, k: int, more=None) -> list[int]:
        return ready(drafter, context).propose(context, k, Sampling(), torch.Generator(), more).tokens_K.tolist()

    whole = drafted(Eagle3Drafter(HEAD), 4)
    assert len(whole) == 4
    assert drafted(Eagle3Drafter(HEAD), 2) == whole[:2]
    assert drafted(Eagle3Drafter(HEAD), 0) == []
    assert drafted(Eagle3Drafter(HEAD, eos_ids=[whole[1]]), 4) == whole[: whole.index(whole[1]) + 1]
    asked: list[float] = []
    assert drafted(Eagle3Drafter(HEAD), 3, lambda p: asked.append(p) or len(asked) < 2) == whole[:1]
    assert drafted(Eagle3Drafter(HEAD), 3, lambda _: False) == []
    assert asked[0] == pytest.approx(float(chain_logits(HEAD, context, whole)[0].softmax(-1).max()))
    assert max(drafted(Eagle3Drafter(HEAD, tokens=2), 3)) < 2


def test_long_texts_are_read_in_parts(monkeypatch):
    """Would catch a part that stands at the wrong positions, or whose keys the next one does not see."""
    context = torch.randint(V, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    proposals = []
    for read in (256, 7):
        monkeypatch.setattr("qspec.nn.draft_heads.READ", read)
        drafter = ready(Eagle3Drafter(SMALL), context)
        proposals.append(drafter.propose(context, 4, Sampling(0.9), torch.Generator().manual_seed(0)))
    assert proposals[0].tokens_K.tolist() == proposals[1].tokens_K.tolist()
    torch.testing.assert_close(proposals[0].probs_KV, proposals[1].probs_KV, atol=1e-5, rtol=1e-5)


ASKED = [  # context, tokens, temperature, least confidence
    ([0, 3, 1, 4], 3, 0.0, 0.0),
    ([0, 5], 1, 0.8, 0.0),
    ([0, 2, 0, 2, 1], 3, 0.8, 0.35),
    ([0, 4], 4, 0.0, 0.9),
]


def asks() -> list[tuple[Eagle3Drafter, Ask]]:
    """Requests that differ in everything, behind targets that have read their contexts."""
    return [
        (
            ready(Eagle3Drafter(HEAD, eos_ids=[2]), context),
            Ask(context, k, Sampling(temperature), torch.Generator().manual_seed(i), Least(least)),
        )
        for i, (context, k, temperature, least) in enumerate(ASKED)
    ]


def test_drafts_together_are_those_of_one_by_one():
    """Would catch a request that drafts by another's cache, sampling, randomness or limits, or is stopped by its no."""
    alone = [drafter.propose(*ask) for drafter, ask in asks()]
    together = propose_together(asks())
    assert len({len(one.tokens_K) for one in alone}) > 1
    for one, other in zip(alone, together, strict=True):
        assert one.tokens_K.tolist() == other.tokens_K.tolist()
        assert (one.probs_KV is None) == (other.probs_KV is None)
        if one.probs_KV is not None:
            torch.testing.assert_close(one.probs_KV, other.probs_KV)


def test_batches_and_lookups():
    """Would catch one request's states read for another, a head behind a lookup that never sees its target."""
    prompts = [[3, 1, 4], [5, 2, 0], [1]]
    requests = [
        GenerationRequest(prompt, 20, torch.Generator(), CombinedDrafter(NgramDrafter(), Eagle3Drafter(HEAD)), Fixed(3))
        for prompt in prompts
    ]
    generations = generate_batch(LayeredLM(TABLE), requests, Sampling(), ())
    assert [one.tokens for one in generations] == [greedy(TABLE, prompt, 20) for prompt in prompts]
    assert any(step.source == "model" and step.accepted for one in generations for step in one.steps)


def test_targets_that_tell_no_layers_are_refused():
    """Would catch an attribute error in the middle of a request; states that are kept for a drafter that has left."""
    with pytest.raises(RecipeError, match="does not tell the states of its layers"):
        generate(TableLM(TABLE), Eagle3Drafter(HEAD), None, [1], 4, Sampling(), (), torch.Generator())
    target = LayeredLM(TABLE)
    generate(target, Eagle3Drafter(HEAD), None, [1], 4, Sampling(), (), torch.Generator())
    assert target.layers == (0, 1)
    generate(target, None, None, [1], 4, Sampling(), (), torch.Generator())
    assert target.layers == ()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(ModelSpec(model=str(tiny_model("llama", tmp_path_factory.mktemp("llama") / "tiny"))))


ENGINES = ["torch", pytest.param("core", marks=NATIVE), pytest.param("core, INT8", marks=NATIVE)]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_text_of_real_engines_is_that_of_plain_decoding(target, engine, rounded):
    """Would catch states of an engine that are not those of its positions, a head that touches the target's cache."""
    shape = Eagle3Shape(64, 64, (0, 1, 2), 96, 4, 2, 16, 300, 0, norm_output=True)
    head = Eagle3(shape, None, target.tensors["model.embed_tokens.weight"])
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=torch.Generator().manual_seed(0))
        head.lm_head.weight.copy_(target.tensors["lm_head.weight"])
    head.requires_grad_(False)
    if rounded:
        swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    if engine == "torch":
        lm = Decoder.from_float(target)
    elif engine == "core":
        lm = NativeDecoder.from_float(target)
    else:
        plan = build_plan(QuantSpec(scheme="W8A8"))
        lm = NativeDecoder.from_quantized(quantize(target, calibrate(target, [list(range(5, 60))]), plan))
    drafter, prompt = Eagle3Drafter(head, (2,)), [1, 50, 60, 70, 80]
    for sampling, seeded in ((Sampling(), False), (Sampling(1.0), True)):

        def source(seeded: bool = seeded) -> Randomness:
            return Repeatable(5) if seeded else torch.Generator()

        plain = generate(lm, None, None, prompt, 40, sampling, (2,), source())
        drafted = generate(lm, drafter, Fixed(3), prompt, 40, sampling, (2,), source())
        assert drafted.tokens == plain.tokens
    requests = [GenerationRequest(prompt[:n], 12, torch.Generator(), Eagle3Drafter(head), Fixed(2)) for n in (5, 3)]
    texts = [one.tokens for one in generate_batch(lm.fork(), requests, Sampling(), (2,))]
    alone = [generate(lm, None, None, prompt[:n], 12, Sampling(), (2,), torch.Generator()).tokens for n in (5, 3)]
    assert texts == alone
