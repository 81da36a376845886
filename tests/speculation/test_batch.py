"""Several requests in one pass: each as if it were alone."""

from collections.abc import Callable
from dataclasses import replace
import itertools
import math
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError
from qspec.nn.eager.decoder import Decoder
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation.batch import Batch, GenerationRequest, generate_batch
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import POLICIES, Fixed, Heuristic, build
from qspec.speculation.types import Drafter, Generation, Repeatable, Sampling
from tests.speculation.toys import DrawnTree, TableLM, blend, greedy, table
from tests.tiny import VOCAB_SIZE, tiny_model

T = TypeVar("T")
VOCAB = 6
TABLE = table(1, VOCAB)
FAIR = blend(2, TABLE, 0.4)
TEXTS = [[3, 1, 4], [5], [2, 0, 1, 1, 4], [4, 4], [0, 3]]
LENGTHS = [20, 1, 12, 0, 33]
GREEDY, WARM = Sampling(), Sampling(0.9, top_k=4)


class Counted(TableLM):
    """Counts the sequences of every shared pass."""

    passes: ClassVar[list[int]] = []

    @classmethod
    def forward_many(cls, sequences, tokens, parents):  # type: ignore[no-untyped-def]
        cls.passes.append(len(sequences))
        return super().forward_many(sequences, tokens, parents)


def drafters() -> list[Drafter | None]:
    fair = blend(2, TABLE, 0.4)
    return [
        ModelDrafter(TableLM(fair)),
        NgramDrafter(1, 3),
        TreeDrafter(TableLM(fair), width=2, depth=3, nodes=6),
        None,
        DrawnTree(fair, (-1, -1, 0, 0, 1), replacement=True),
    ]


SOURCES: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(TableLM(blend(2, TABLE, 0.4))),
    "ngram": lambda: NgramDrafter(1, 3),
    "ngram tree": lambda: NgramDrafter(1, 3, branches=3),
    "suffix": lambda: SuffixDrafter(1),
    "suffix tree": lambda: SuffixDrafter(1, branches=3),
    "combined": lambda: CombinedDrafter(SuffixDrafter(1), ModelDrafter(TableLM(blend(2, TABLE, 0.4)))),
    "combined tree": lambda: CombinedDrafter(NgramDrafter(), TreeDrafter(TableLM(blend(2, TABLE, 0.4)), 2, 3, 6)),
    "tree": lambda: TreeDrafter(TableLM(blend(2, TABLE, 0.4)), width=2, depth=3, nodes=6),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_drafter_under_every_policy_says_what_plain_decoding_says(source: str, policy: str, batch: int) -> None:
    """Catches a pairing of drafter, policy and batch size that changes a greedy answer."""
    asked = [
        GenerationRequest(
            text, 20, torch.Generator().manual_seed(i), SOURCES[source](), build(policy, 3, 6, by_batch=((1, 2, 6),))
        )
        for i, text in enumerate(TEXTS[:batch])
    ]
    results = generate_batch(TableLM(TABLE), asked, GREEDY, ())
    assert [result.tokens for result in results] == [greedy(TABLE, text, 20) for text in TEXTS[:batch]]


def prompts() -> list[GenerationRequest]:
    policies = [Fixed(3), Heuristic(2, 8), Fixed(3), Fixed(0), None]
    return [
        GenerationRequest(text, n, torch.Generator().manual_seed(i), drafter, policy)
        for i, (text, n, drafter, policy) in enumerate(zip(TEXTS, LENGTHS, drafters(), policies, strict=True))
    ]


def alone(
    target: TableLM | Decoder, prompt: GenerationRequest, sampling: Sampling, eos: tuple[int, ...] = ()
) -> Generation:
    return generate(
        target, prompt.drafter, prompt.policy, prompt.tokens, prompt.max_new_tokens, sampling, eos, prompt.generator
    )


@pytest.mark.parametrize("eos", [(), (4,)])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_k=4)], ids=["greedy", "sampled"])
def test_each_request_is_what_it_would_be_alone(sampling: Sampling, eos: tuple[int, ...]) -> None:
    """Catches tokens, randomness, policies or stop rules of one request in another, and lost finished requests."""
    want = [alone(TableLM(TABLE), prompt, sampling, eos) for prompt in prompts()]
    got = generate_batch(TableLM(TABLE), prompts(), sampling, eos)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert [g.stopped for g in got] == [w.stopped for w in want]
    counts = [[[(s.nodes, s.drafted, s.accepted) for s in g.steps] for g in side] for side in (got, want)]
    assert counts[0] == counts[1]


def test_requests_join_and_leave_between_steps() -> None:
    """Catches a request that disturbs those that it joins, in their cache, their draws or their rule."""
    samplings = [GREEDY, Sampling(0.9, top_k=4), GREEDY, Sampling(1.3)]
    asked = [prompt for prompt in prompts() if prompt.max_new_tokens > 1]
    batch, told = Batch(), dict[int, list[int]]()

    def tell(number: int, tokens: list[int]) -> None:
        told.setdefault(number, []).extend(tokens)

    for i, (prompt, sampling) in enumerate(zip(asked, samplings, strict=False)):
        batch.join(i, TableLM(TABLE), prompt, sampling, ())
        tell(i, batch.read(i))
        batch.step(tell)  # none ends within so few steps: the shortest has 12 tokens to come, drafts of 8 at most
    assert len(batch) == len(asked) == 3
    batch.leave(0)  # whoever asked has gone
    while len(batch):
        for i in batch.finished():
            assert batch.leave(i).result().tokens == told[i]
        if len(batch):
            batch.step(tell)
    want = [prompt for prompt in prompts() if prompt.max_new_tokens > 1]
    for i, (prompt, sampling) in enumerate(zip(want, samplings, strict=False)):
        whole = alone(TableLM(TABLE), prompt, sampling).tokens
        assert told[i] == whole[: len(told[i])]
        assert i == 0 or len(told[i]) == len(whole)


def test_a_full_cache_ends_one_request_only() -> None:
    """Catches a batch that stops, or overflows, where one of its sequences has no room left."""
    target = TableLM(TABLE, max_length=12)
    got = generate_batch(target, prompts(), GREEDY, ())
    want = [alone(TableLM(TABLE, max_length=12), prompt, GREEDY) for prompt in prompts()]
    assert [(g.tokens, g.stopped) for g in got] == [(w.tokens, w.stopped) for w in want]
    assert {g.stopped for g in got} == {"context", "length"}


def test_finished_requests_leave_the_batch() -> None:
    """Catches rows computed for requests that are done, and a pass for each request instead of one for all."""
    Counted.passes = []
    results = generate_batch(
        Counted(TABLE), [GenerationRequest([3], n, torch.Generator()) for n in (4, 2, 0, 6)], GREEDY, ()
    )
    assert [len(result.tokens) for result in results] == [4, 2, 0, 6]
    assert Counted.passes == [3, 2, 2, 1, 1]


def test_a_schedule_counts_the_requests_that_go_on() -> None:
    """Catches drafts as long in a full batch as in an empty one, or a size that never shrinks."""
    batch = [GenerationRequest([3, 1], n, torch.Generator(), ModelDrafter(TableLM(TABLE)), Fixed(5)) for n in (3, 9)]
    first, second = generate_batch(TableLM(TABLE), batch, GREEDY, (), schedule=((1, 1, 3), (2, 8, 0)))
    assert [s.drafted for s in first.steps] == [0, 0]
    assert [s.drafted for s in second.steps] == [0, 0, 3, 1]


def test_tokens_are_streamed_with_their_number() -> None:
    """Catches tokens of one request under the number of another, also once some have left."""
    seen: dict[int, list[int]] = {}
    results = generate_batch(
        TableLM(TABLE), prompts(), GREEDY, (), on_tokens=lambda i, tokens: seen.setdefault(i, []).extend(tokens)
    )
    assert seen == {i: result.tokens for i, result in enumerate(results) if result.tokens}


def test_seconds_are_shared_out() -> None:
    """Catches a pass charged in full to every request: batches would seem slower than they are."""
    results = generate_batch(TableLM(TABLE), prompts(), GREEDY, ())
    parts = [t for g in results for s in g.steps for t in (s.t_draft, s.t_verify, s.t_other)]
    assert min(parts) >= 0
    assert 0 < sum(parts) <= max(g.ttft + g.seconds for g in results)


def test_prompts_are_checked_before_any_is_read() -> None:
    """Catches a batch that fails half-way for a prompt that could have been refused at once."""
    target = Counted(TABLE, max_length=4)
    with pytest.raises(RecipeError, match="prompt of 5 tokens"):
        generate_batch(target, prompts(), GREEDY, ())
    assert generate_batch(target, [], GREEDY, ()) == []


@pytest.mark.parametrize("kv", [None, KVSpec(format="int8", granularity="token_head")], ids=["float", "int8"])
def test_a_quantized_batch_says_bit_for_bit_the_same(kv: KVSpec | None, tmp_path: Path) -> None:
    """Catches rows that depend on how many others share their pass: trees, chains and plain rows together."""
    model = load_folder(tiny_model("llama", tmp_path, vocab_size=2048))
    text = torch.randint(5, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    plan = build_plan(QuantSpec(scheme="W8A8", kv=kv))
    target = Decoder.from_quantized(quantize(model, calibrate(model, [text]), plan), max_length=96)

    def batch() -> list[GenerationRequest]:
        sources = [ModelDrafter(target.fork()), TreeDrafter(target.fork(), 3, 3, 12), None, NgramDrafter()]
        return [
            GenerationRequest(text[i : 3 * i + 1], 24, torch.Generator().manual_seed(i), source, Fixed(4))
            for i, source in zip((4, 9, 17, 2), sources, strict=True)
        ]

    for sampling in (GREEDY, Sampling(0.8)):
        plain = [alone(target, prompt, sampling).tokens for prompt in batch()]
        assert [result.tokens for result in generate_batch(target, batch(), sampling, ())] == plain
    greedy = [generate(target, None, None, p.tokens, 24, GREEDY, (), torch.Generator()).tokens for p in batch()]
    results = generate_batch(target, batch(), GREEDY, ())
    assert [result.tokens for result in results] == greedy
    assert [sum(s.accepted for s in result.steps) > 0 for result in results[:2]] == [True, True]


class Fault(Exception):
    """One that a test injects."""


def breaks(thing: T, name: str, after: int, until: float = math.inf) -> T:
    """The same object, one method of which fails at calls `after` to `until`."""
    method, calls = getattr(thing, name), itertools.count()

    def failing(*args: Any, **more: Any) -> Any:
        if after <= next(calls) < until:
            raise Fault(name)
        return method(*args, **more)

    object.__setattr__(thing, name, failing)
    return thing


class Parts:
    """A request of a batch, of parts that can be broken."""

    def __init__(self, tokens: list[int], sampling: Sampling, tree: bool = False) -> None:
        self.tokens, self.sampling, self.policy = tokens, replace(sampling), Fixed(3)
        self.target, self.draft = TableLM(TABLE), TableLM(FAIR)
        self.drafter: Drafter = TreeDrafter(self.draft, 2, 3, 6) if tree else ModelDrafter(self.draft)
        self.told: list[int] = []

    def join(self, batch: Batch, number: int) -> None:
        prompt = GenerationRequest(self.tokens, 24, Repeatable(number), self.drafter, self.policy)
        batch.join(number, self.target, prompt, self.sampling, ())
        self.told += batch.read(number)


PLACES: dict[str, Callable[[Parts], Any]] = {
    "the length of a draft": lambda parts: breaks(parts.policy, "next", 2),
    "what a draft asks": lambda parts: breaks(parts.policy, "judge", 2),
    "a draft": lambda parts: breaks(parts.drafter, "_chain", 2),
    "a pass of the draft": lambda parts: breaks(parts.draft, "forward", 5),
    "a pass of the target": lambda parts: breaks(parts.target, "forward", 3),
    "the distribution": lambda parts: breaks(parts.sampling, "probs", 2),
    "roll-back": lambda parts: breaks(parts.target, "truncate", 4),
    "what a policy learns": lambda parts: breaks(parts.policy, "update", 2),
    "reading the text": lambda parts: setattr(parts, "told", breaks(Told(), "extend", 3)),
}


class Told(list[int]):
    """Tokens, of which taking more can be broken."""


@pytest.mark.parametrize(
    ("place", "sampling"),
    [
        (place, sampling)
        for place in PLACES
        for sampling in (GREEDY, WARM)
        if place != "the distribution" or not sampling.greedy
    ],
)
def test_a_fault_ends_its_own_request(place: str, sampling: Sampling) -> None:
    """Catches one request that ends all, and others whose caches a pass that failed half-way has changed."""
    whole = run([Parts(text, sampling) for text in TEXTS[:3]], {})
    requests = [Parts(text, sampling) for text in TEXTS[:3]]
    PLACES[place](requests[1])
    faults: dict[int, Exception] = {}
    told = run(requests, faults)
    assert {i: type(error) for i, error in faults.items()} == {1: Fault}
    assert (told[0], told[2]) == (whole[0], whole[2])
    assert told[1] == whole[1][: len(told[1])] != whole[1]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_fault_of_a_shared_pass_alone_ends_nobody(name: str) -> None:
    """Catches requests that are given up, or told other tokens, for a pass that succeeds for each by itself."""
    whole = run([Parts(text, GREEDY) for text in TEXTS[:3]], {})
    requests = [Parts(text, GREEDY) for text in TEXTS[:3]]
    breaks(getattr(requests[2], name), "forward", 3, 4)
    faults: dict[int, Exception] = {}
    with pytest.warns(RuntimeWarning, match="3 requests shared"):
        assert run(requests, faults) == whole
    assert faults == {}


def test_a_fault_of_a_tree_leaves_no_nodes_behind() -> None:
    """Catches nodes of a pass that failed half-way, which the next pass would take for its own."""
    whole = run([Parts(text, GREEDY, tree=True) for text in TEXTS[:3]], {})
    requests = [Parts(text, GREEDY, tree=True) for text in TEXTS[:3]]
    breaks(requests[1].target, "forward_tree", 2)
    faults: dict[int, Exception] = {}
    told = run(requests, faults)
    assert (list(faults), told[0], told[2]) == ([1], whole[0], whole[2])


def test_a_batch_that_is_asked_for_at_once_fails_with_its_request() -> None:
    """Catches a fault that is swallowed where nobody takes it: an answer that just ends."""
    policy = breaks(Fixed(3), "next", 2)
    asked = [GenerationRequest(text, 24, torch.Generator(), NgramDrafter(), policy) for text in TEXTS[:1]]
    with pytest.raises(Fault):
        generate_batch(TableLM(TABLE), asked, GREEDY, ())


def run(requests: list[Parts], faults: dict[int, Exception]) -> list[list[int]]:
    """Tokens of each, all together up to their ends or faults."""
    batch = Batch()
    for i, request in enumerate(requests):
        request.join(batch, i)
    while len(batch):
        new = batch.step(lambda i, tokens: requests[i].told.extend(tokens))
        faults |= new
        for i in {*new, *batch.finished()}:
            batch.leave(i)
    return [list(request.told) for request in requests]
