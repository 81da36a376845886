"""Whole proposals in one call of the C++ core, against the stages on torch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.heads import NativeHeads
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.draft_heads import DraftHeads, EagerHeads, draft_heads
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, swap_linears
from tests.nn.test_mlp_speculator import a_head

SIZES = [(6, 11, 8, 0), (40, 301, 72, 77), (97, 130, 65, 61), (64, 512, 200, 512)]
"""Hidden size, vocabulary, inner size, ids that can be drafted (0: all)."""


@pytest.fixture(autouse=True, params=[1, 3], ids=lambda n: f"{n} threads")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    reason, before = NativeDecoder.missing(), torch.get_num_threads()
    if reason is not None:
        pytest.skip(f"needs the C++ core: {reason}")
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def int8_head(size: tuple[int, int, int, int], tie: bool, shared: bool, dtype: torch.dtype) -> MLPSpeculator:
    hidden, vocab, inner, drafted = size
    generator = torch.Generator().manual_seed(sum(size))
    ids_D = torch.randperm(vocab, generator=generator)[:drafted].sort().values if drafted else None
    rows = torch.randn(2, vocab, hidden, generator=generator).to(dtype)
    shape = SpeculatorShape(hidden, vocab, 3, inner, tie, tie, drafted, shared)
    head = MLPSpeculator(shape, ids_D, *rows)
    initialize(head, generator)
    for norm in head.ln:
        nn.init.normal_(norm.weight, 1.0, 0.2, generator=generator)
        nn.init.normal_(norm.bias, generator=generator)
    head.requires_grad_(False)
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    return head


def both(head: MLPSpeculator, spared: int = 0) -> tuple[EagerHeads, NativeHeads]:
    """The twins; `spared`: ids at the end that are padding."""
    ids_D = torch.arange(head.shape.vocab_size) if head.ids_D is None else head.ids_D
    known = len(ids_D) - spared
    native = draft_heads(head, ids_D, known)
    assert isinstance(native, NativeHeads)
    return EagerHeads(head, ids_D, known), native


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied and scaled"])
@pytest.mark.parametrize("size", SIZES)
def test_chains_equal_their_twin(size: tuple[int, int, int, int], tie: bool, shared: bool) -> None:
    """Catches a stage's weights read for another's, lanes of a short panel or padding drafted, places taken for ids."""
    head = int8_head(size, tie, shared, torch.bfloat16)
    hidden_1H = torch.randn(1, size[0], generator=torch.Generator().manual_seed(1))
    for taken in (0, 2):  # the likeliest, and what a sampler might draw instead
        told: list[list[tuple[int, float, Tensor]]] = []
        for heads in both(head, spared=3):
            heard: list[tuple[int, float, Tensor]] = []

            def choose(_, best, probability, logits_1D, heard=heard, taken=taken):
                heard.append((best, probability, logits_1D.clone()))
                return int(logits_1D.topk(3).indices[0, taken])

            heads.chains(hidden_1H, [size[1] - 1], 3, choose)
            told.append(heard)
        for (best, p, logits), (best_too, p_too, logits_too) in zip(*told, strict=True):
            # the last bits of a norm can move an input to the next of 127 steps
            torch.testing.assert_close(logits, logits_too, rtol=0, atol=0.02 * float(logits.abs().max()))
            assert (best, p) == (best_too, pytest.approx(p_too, rel=0.05))
            assert int(logits.argmax()) == best


Heard = dict[int, list[tuple[int, float, Tensor]]]


def heard_of(heads: DraftHeads, hidden_BH: Tensor, tokens: list[int], numbers: list[int]) -> Heard:
    """What chains are told that draw different tokens and end behind none to three of them, by their numbers."""
    heard: Heard = {i: [] for i in numbers}

    def choose(i: int, best: int, probability: float, logits_1D: Tensor) -> int | None:
        told = heard[numbers[i]]
        told.append((best, probability, logits_1D.clone()))
        return None if len(told) > numbers[i] % 4 else int(logits_1D.topk(3).indices[0, numbers[i] % 3])

    heads.chains(hidden_BH, tokens, 3, choose)
    return heard


@pytest.mark.parametrize("size", SIZES)
def test_chains_together_equal_chains_alone(size: tuple[int, int, int, int]) -> None:
    """Catches a chain that goes on behind another's state, token or logits, where others have ended or fill a block."""
    generator, numbers = torch.Generator().manual_seed(3), list(range(11))  # more than the core's eight rows
    hidden_BH = torch.randn(len(numbers), size[0], generator=generator)
    tokens = torch.randint(size[1], (len(numbers),), generator=generator).tolist()
    for heads, tolerance in zip(both(int8_head(size, True, True, torch.bfloat16), spared=3), (0.02, 0.0), strict=True):
        together = heard_of(heads, hidden_BH, tokens, numbers)
        assert [len(together[i]) for i in numbers] == [min(i % 4 + 1, 3) for i in numbers]
        for i in numbers:
            alone = heard_of(heads, hidden_BH[i : i + 1], tokens[i : i + 1], [i])[i]
            for (best, p, logits_1D), (best_too, p_too, logits_too) in zip(together[i], alone, strict=True):
                spread = tolerance * float(logits_too.abs().max())
                # the last bits of torch's norms may depend on the rows, and move an input to the next of 127 steps
                torch.testing.assert_close(logits_1D, logits_too, rtol=0, atol=spread)
                assert (best, p) == (best_too, pytest.approx(p_too, abs=tolerance))


@pytest.mark.parametrize("widths", [(5, 4, 3), (1, 3), (9,), (3, 1, 2)])
@pytest.mark.parametrize("size", SIZES[1:3])
def test_trees_equal_their_twin(size: tuple[int, int, int, int], widths: tuple[int, ...]) -> None:
    """Catches children behind the state of another path, and blocks of rows that overwrite each other."""
    head = int8_head(size, False, True, torch.float32)
    hidden_1H = torch.randn(1, size[0], generator=torch.Generator().manual_seed(2))
    (paths_PK, scores_P), (paths, scores) = (heads.paths(hidden_1H, 4, widths) for heads in both(head))
    torch.testing.assert_close(scores.sort().values, scores_P.sort().values, rtol=0, atol=0.05)
    want, found = ({tuple(path) for path in x.tolist()} for x in (paths_PK, paths))
    assert len(want & found) >= 0.9 * len(want)  # near ties fall either way
    assert torch.equal(paths[int(scores.argmax())], paths_PK[int(scores_P.argmax())])


def test_who_stops_and_who_raises_is_heard() -> None:
    """Catches stages that run on behind a no, and an error that the C frames swallow."""
    _, heads = both(int8_head(SIZES[1], False, True, torch.float32))
    asked: list[int] = []

    def stop(_: int, best: int, probability: float, logits_1D: Tensor) -> int | None:
        asked.append(best)
        return None if len(asked) == 2 else best

    heads.chains(torch.zeros(1, 40), [0], 3, stop)
    assert len(asked) == 2

    def fail(_: int, best: int, probability: float, logits_1D: Tensor) -> int | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heads.chains(torch.zeros(2, 40), [0, 1], 3, fail)
    with pytest.raises(IndexError, match="301"):
        heads.chains(torch.zeros(2, 40), [0, 301], 3, stop)


def test_heads_in_float_stay_on_torch() -> None:
    """Catches a head whose layers the core cannot read, taken for one of INT8 layers."""
    assert isinstance(draft_heads(a_head(), torch.arange(11), 11), EagerHeads)
