"""The EAGLE-3 head of the C++ core beside its twin in torch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qspec.errors import IntegrityError
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.eagle3 import NativeChains
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.cpp.interface import instruction_sets
from qspec.nn.draft_heads import EagerEagle3, eagle3_chains
from qspec.nn.eagle3 import Eagle3, Eagle3Shape
from qspec.nn.mlp_speculator import swap_linears
from tests.nn.test_eagle3 import FLAGS, IDS_D, SHAPE, a_head
from tests.speculation.toys import TableLM, table

LENGTH, K = 90, 3
KNOWN = 11


@pytest.fixture(autouse=True)
def _library() -> None:
    reason = NativeDecoder.missing()
    if reason is not None:
        pytest.skip(f"needs the C++ core: {reason}")


class Asked:
    """Takes the likeliest id, and ends chain `j` after `ends[j]` drafts; keeps the logits of every question."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends, self.logits, self.tokens = ends, [list[Tensor]() for _ in ends], [list[int]() for _ in ends]

    def __call__(self, chain: int, best: int, probability: float, logits_1D: Tensor) -> int | None:
        assert probability == pytest.approx(float(logits_1D.softmax(-1).max()), abs=1e-5)
        assert best == int(logits_1D.argmax())
        self.logits[chain].append(logits_1D[0].clone())
        if len(self.logits[chain]) > self.ends[chain]:
            return None
        self.tokens[chain].append(best)
        return best


def rows(shape: Eagle3Shape, counts: Sequence[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(n, shape.states, generator=generator) for n in counts]
    return states, [torch.randint(shape.vocab_size, (n,), generator=generator) for n in counts]


def compared(head: Eagle3, tolerance: float, isa: str | None = None) -> None:
    """Prompts of several sizes, then a second call behind roll-backs: every logit that either half is asked about."""
    ids_D = torch.arange(head.shape.vocab_size) if head.ids_D is None else head.ids_D
    native, eager = NativeChains(head, KNOWN, LENGTH, torch.get_num_threads(), isa), EagerEagle3(head, ids_D, KNOWN)
    theirs, own = [native.cache() for _ in range(3)], [eager.cache() for _ in range(3)]
    for turn, counts in enumerate([(1, 70, 5), (2, 1, 3)]):
        states, tokens = rows(head.shape, counts, turn)
        ends = (K, 0, 1)
        expected, found = Asked(ends), Asked(ends)
        true = [cache.length + n for cache, n in zip(own, counts, strict=True)]
        eager.chains(own, states, tokens, K, expected)
        native.chains(theirs, states, tokens, K, found)
        assert found.tokens == expected.tokens
        for a, b in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(torch.stack(a), torch.stack(b), atol=tolerance, rtol=tolerance)
        assert [cache.length for cache in theirs] == [cache.length for cache in own]
        for one, other, length in zip(theirs, own, true, strict=True):
            one.truncate(length)
            other.truncate(length)


@pytest.mark.parametrize("flag", ["", *FLAGS])
def test_chains_equal_the_twin_s(flag: str) -> None:
    """Would catch a norm that is left out, a position that is off by one, and drafts that stay behind a roll-back."""
    compared(a_head(replace(SHAPE, **({flag: True} if flag else {}))), 1e-4)


def test_a_head_of_two_layers_and_all_ids() -> None:
    """Would catch a second layer that reads tokens, and ids that are taken for places."""
    compared(a_head(replace(SHAPE, n_layers=2, draft_vocab=0, hidden_size=48)), 1e-4)


@pytest.mark.parametrize("isa", [None, "portable"])
def test_int8_chains_equal_the_twin_s(isa: str | None) -> None:
    """Would catch codes that are merged under one scale, and inputs that are rounded twice."""
    head = a_head()
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    assert NativeChains.runs(head)
    assert isa is None or isa in instruction_sets()
    compared(head, 1e-3, isa)


def test_threads_share_the_work() -> None:
    """Would catch a row that a thread reads before another one has written it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(5):
            compared(a_head(), 1e-4)
    finally:
        torch.set_num_threads(threads)


def test_drafters_of_one_target_share_a_head() -> None:
    """Would catch weights that are packed for every request, and batches whose caches belong to different heads."""
    head = a_head()
    one, other = (eagle3_chains(head, IDS_D, KNOWN, TableLM(table(1, 6))) for _ in range(2))
    assert isinstance(one, NativeChains)
    assert one is other


def test_what_a_chooser_raises_ends_the_call() -> None:
    """Would catch an error that crosses frames of C, or is lost there."""

    def broken(*_: object) -> int:
        raise KeyError("of its own")

    native = NativeChains(a_head(), KNOWN, LENGTH)
    with pytest.raises(KeyError, match="of its own"):
        native.chains([native.cache()], *rows(SHAPE, (2,), 0), K, broken)


def test_what_does_not_fit_is_refused() -> None:
    """Would catch reads outside of a cache, a vocabulary or a head."""
    head = a_head()
    native = NativeChains(head, KNOWN, LENGTH)
    cache, asked = native.cache(), Asked((K,))
    states, tokens = rows(SHAPE, (LENGTH - K + 2,), 0)
    with pytest.raises(IntegrityError, match="more positions than the cache holds"):
        native.chains([cache], states, tokens, K, asked)
    with pytest.raises(IndexError, match="outside of the vocabulary"):
        native.chains([cache], [states[0][:1]], [torch.tensor([SHAPE.vocab_size])], K, asked)
    with pytest.raises(IntegrityError, match="continues one row or more"):
        empty = native.cache()
        native.chains([cache, empty], [states[0][:1], states[0][:0]], [tokens[0][:1], tokens[0][:0]], K, asked)
    with pytest.raises(IntegrityError, match="a chosen place lies outside of the head"):
        native.chains([cache], [states[0][:1]], [tokens[0][:1]], K, lambda *_: KNOWN)
    with pytest.raises(IntegrityError, match="an id lies outside of the vocabulary"):
        NativeChains(a_head_with(IDS_D + SHAPE.vocab_size), KNOWN, LENGTH)
    with pytest.raises(IntegrityError, match="more ids are drafted than a head has rows"):
        NativeChains(head, SHAPE.drafted + 1, LENGTH)


def a_head_with(ids_D: Tensor) -> Eagle3:
    head = a_head()
    head.ids_D = ids_D
    return head
