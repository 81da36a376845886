"""What the C++ core is given and does not believe: it reads nothing outside of what it was given."""

from ctypes import byref, c_int32
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges.hf import load_folder
from qspec.errors import IntegrityError
from qspec.nn.cpp.decoder import CopiedStates, NativeDecoder
from qspec.nn.cpp.heads import NativeHeads
from qspec.nn.cpp.int8_map import INPUTS, Int8Map
from qspec.nn.cpp.interface import CLayer, CPart, CPiece, CShape, NativeLinear, failure, matrix_of
from qspec.nn.cpp.model import WeightSource, shape_of
from qspec.nn.cpp.weights import Packed, pack_linears
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, swap_linears
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import INT8
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.records import LoadedModel, QLinear
from tests.tiny import tiny_model

LENGTH = 20


@pytest.fixture(autouse=True)
def _library() -> None:
    reason = NativeDecoder.missing()
    if reason is not None:
        pytest.skip(f"needs the C++ core: {reason}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def decoder(model: LoadedModel) -> NativeDecoder:
    """A sequence of four tokens in a cache of twenty."""
    made = NativeDecoder(model, LENGTH)
    made.forward(torch.arange(4))
    return made


@pytest.mark.parametrize(
    ("count", "parents", "nodes", "last", "rule"),
    [
        (17, None, 0, 1, "more positions than the cache holds"),
        (3, None, 0, 4, "more rows are asked for than there are"),
        (3, None, 0, -1, "more rows are asked for than there are"),
        (1, [-1] * 17, 17, 1, "more positions than the cache holds"),
        (3, [-1, 0], 2, 1, "more rows than nodes"),
        (3, [-1, 0, 2], 3, 3, "a node of a tree comes before its parent"),
        (3, [-1, 5, 0], 3, 3, "a node of a tree comes before its parent"),
        (3, [-2, 0, 1], 3, 3, "a node of a tree comes before its parent"),
    ],
)
def test_positions_lie_in_the_cache(
    decoder: NativeDecoder, count: int, parents: list[int] | None, nodes: int, last: int, rule: str
) -> None:
    """Would catch keys written behind the cache, and nodes of a tree that read slots of other memory."""
    tokens_T, up = torch.arange(count), None if parents is None else (c_int32 * len(parents))(*parents)
    part = CPart(decoder._sequence, tokens_T.data_ptr(), up, count, nodes)
    logits_TV, hidden_TK = torch.empty(LENGTH, decoder.vocab_size), torch.empty(LENGTH, decoder.arch.hidden_size)
    with pytest.raises(IntegrityError, match=rule):
        decoder._core.forward([part], last, logits_TV, None, hidden_TK, CopiedStates([], 3, 64))
    assert decoder.length == 4


def test_sequences_are_of_their_model(decoder: NativeDecoder, model: LoadedModel) -> None:
    """Would catch a cache of one model that is read with the sizes of another."""
    other, tokens_T, hidden_TK = NativeDecoder(model, 2 * LENGTH), torch.arange(1), torch.empty(1, 64)
    part = CPart(other._sequence, tokens_T.data_ptr(), None, 1, 0)
    with pytest.raises(IntegrityError, match="a sequence of another model"):
        decoder._core.forward([part], 1, torch.empty(1, 300), None, hidden_TK, CopiedStates([], 1, 64))


@pytest.mark.parametrize("layers", [[-1], [3], [1, 1], [2, 0], [0, 1, 2, 3]], ids=str)
def test_taps_are_layers_of_the_model(decoder: NativeDecoder, layers: list[int]) -> None:
    """Would catch states of a layer that is not there, or written behind their rows."""
    tokens_T, tapped = torch.arange(2), CopiedStates(layers, 2, 64)
    part = CPart(decoder._sequence, tokens_T.data_ptr(), None, 2, 0)
    with pytest.raises(IntegrityError, match=r"no such layer to tap|no place for what is tapped"):
        decoder._core.forward([part], 1, torch.empty(1, 300), None, torch.empty(1, 64), tapped)
    assert decoder.length == 4


@pytest.mark.parametrize("path", [[-1], [0, 0], [1, 0], [16], [2**31 - 1]])
def test_paths_stay_in_the_cache(decoder: NativeDecoder, path: list[int]) -> None:
    """Would catch positions moved from, or to, outside of the cache."""
    given = (c_int32 * len(path))(*path)
    assert not decoder._lib.qspec_keep(decoder._sequence, given, len(path))
    assert "a path leaves its tree" in str(failure("a path"))


@pytest.mark.parametrize("length", [-1, 5, 2**31 - 1])
def test_sequences_are_not_lengthened(decoder: NativeDecoder, length: int) -> None:
    """Would catch a cache that is said to be longer than it is."""
    assert not decoder._lib.qspec_truncate(decoder._sequence, length)
    assert decoder.length == 4


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {"n": 120}),
        (0, {"k": 72}),
        (1, {"k": 32}),
        (2, {"n": 128}),
        (3, {"n": 72}),
        (3, {"k": 120}),
        (0, {"bytes": 1}),
        (0, {"codes": None}),
        (0, {"kind": 9}),
        (0, {"kind": 7}),
        (0, {"input": 1}),
        (0, {"group": 0}),
        (0, {"group": 7}),
    ],
    ids=str,
)
def test_weights_have_the_models_shape(decoder: NativeDecoder, model: LoadedModel, place: int, changes: Any) -> None:
    """Would catch a weight that is read, or whose outputs are written, beyond its end."""
    source, core = WeightSource(model), decoder._core
    packed = source.layer("model.layers.0")
    matrices = [matrix_of(p) for p in packed]
    core._set_layer(0, source, matrices)
    for name, value in changes.items():
        setattr(matrices[place], name, value)
    with pytest.raises(IntegrityError, match=r"cannot be run by the C\+\+ core: (a weight|groups|inputs)"):
        core._set_layer(0, source, matrices)


@pytest.mark.parametrize(
    ("place", "changes"), [(0, {"n": 301}), (0, {"n": 0}), (0, {"k": 32}), (1, {"n": 299})], ids=str
)
def test_the_ends_have_the_models_shape(decoder: NativeDecoder, model: LoadedModel, place: int, changes: Any) -> None:
    """Would catch a token's row that is read behind the embedding, and logits written behind their row."""
    source = WeightSource(model)
    packed = source.ends()
    matrices = [matrix_of(p) for p in packed]
    for name, value in changes.items():
        setattr(matrices[place], name, value)
    with pytest.raises(IntegrityError, match=r"head has other rows|shape|number of codes"):
        decoder._core._set_ends(source, matrices)


def test_parts_of_the_model_are_there(decoder: NativeDecoder) -> None:
    """Would catch a layer, a rotation, or a streamed layer of a number that the model does not have."""
    core, table = decoder._core, torch.zeros(LENGTH * 8)
    for number in (-1, 2):
        assert not core.lib.qspec_set_layer(core.handle, number, byref(CLayer()), 0)
        assert "no such layer" in str(failure("it"))
        assert not core.lib.qspec_set_rope(core.handle, number, table.data_ptr(), table.data_ptr())
        assert "no such rotation" in str(failure("it"))
        pieces = (CPiece * 1)(CPiece(number, 0, 8, table.data_ptr()))
        assert not core.lib.qspec_set_stream(core.handle, 0, pieces, 1)
        assert "streamed layers do not rise" in str(failure("it"))
    assert not core.lib.qspec_memory(core.handle, -1)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"hidden": -1},
        {"vocab": 2**31 - 1},
        {"max_length": 0},
        {"kv_heads": 3},
        {"head_dim": 12},
        {"head_dim": 264},
        {"rotary": 18},
        {"cache": 3},
        {"ropes": 0},
        {"experts": 4, "experts_per_token": 5, "expert_size": 8},
    ],
    ids=str,
)
def test_models_have_sizes(decoder: NativeDecoder, changes: dict[str, int]) -> None:
    """Would catch rows of a thread's scratch that a head or a token's experts do not fit into."""
    shape: CShape = shape_of(decoder.arch, LENGTH, 0)
    for name, value in changes.items():
        setattr(shape, name, value)
    assert not decoder._lib.qspec_model(decoder._core._pool.handle, byref(shape), None)
    assert isinstance(failure("it"), IntegrityError)


def a_weight() -> QLinear:
    """64 x 32 in INT8, two weights of each row kept apart."""
    w_NK = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    kept = SparseMatrix.from_dense(w_NK, torch.arange(32).expand(64, 32) % 16 == 3)
    return QLinear(quantize_weight(w_NK, INT8, PerChannel()), INPUTS, None, None, kept)


@pytest.mark.parametrize("change", ["column", "negative column", "row end", "first row end"])
def test_columns_lie_among_the_inputs(change: str) -> None:
    """Would catch a sparse matrix whose columns read beside the inputs, or whose row ends read beside the columns."""
    packed = pack_linears([a_weight()], [None])
    assert packed.outliers is not None
    ends, inputs, _ = packed.outliers
    array, at, value = {
        "column": (inputs, 5, 32),
        "negative column": (inputs, 5, -1),
        "row end": (ends, 3, 10**6),
        "first row end": (ends, 0, -4),
    }[change]
    array[at] = value
    with pytest.raises(IntegrityError, match="sparse matrix"):
        NativeLinear(packed)(torch.ones(1, 32))


@pytest.mark.parametrize(
    "change",
    [
        {"scale": torch.ones(7)},
        {"scale": torch.ones(64).double()},
        {"bias": torch.ones(63)},
        {"half_scale": torch.ones(64)},
        {"outliers": (torch.zeros(64, dtype=torch.int32), *[torch.zeros(0)] * 2)},
        {"codes": torch.zeros(8, 8, 128)[..., ::2]},
    ],
    ids=lambda change: "".join(change),
)
def test_arrays_are_as_long_as_they_are_read(change: dict[str, Any]) -> None:
    """Would catch an array that is shorter than its weight, of which the core learns the beginning alone."""
    packed = pack_linears([a_weight()], [None])
    with pytest.raises(IntegrityError, match="are due"):
        replace(packed, **change)


def test_inputs_are_as_long_as_they_are_read() -> None:
    """Would catch rows of another width, of which a matmul would read the memory behind."""
    linear = NativeLinear(pack_linears([a_weight()], [None]))
    assert linear(torch.ones(2, 32)).shape == (2, 64)
    for x_TK in (torch.ones(2, 31), torch.ones(2, 32).double()):
        with pytest.raises(IntegrityError, match="reads 64 floats"):
            linear(x_TK)


def heads(vocab: int = 40) -> tuple[MLPSpeculator, list[list[Packed | None]], Tensor]:
    """Three INT8 heads of 20 ids, as the core takes them."""
    ids_D = torch.arange(0, vocab, 2)
    head = MLPSpeculator(SpeculatorShape(16, vocab, 3, 8, draft_vocab=len(ids_D)), ids_D).requires_grad_(False)
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    packed = NativeHeads.packed(head)
    assert packed is not None
    return head, packed, ids_D


@pytest.mark.parametrize("last", [-1, 40, 2**40])
def test_ids_lie_in_the_vocabulary(last: int) -> None:
    """Would catch a draft that reads the embedding at an id that it does not have."""
    head, packed, ids_D = heads()
    ids_D[-1] = last
    with pytest.raises(IntegrityError, match="an id lies outside of the vocabulary"):
        NativeHeads(head, packed, ids_D, len(ids_D))


def test_heads_have_their_shape() -> None:
    """Would catch a stage whose state is longer or shorter than the one before leaves."""
    head, packed, ids_D = heads()
    with pytest.raises(IntegrityError, match="more ids are drafted than a head has rows"):
        NativeHeads(head, packed, torch.arange(21), 21)
    packed[1] = packed[0]  # the first head reads the target's state
    with pytest.raises(IntegrityError, match="another shape"):
        NativeHeads(head, packed, ids_D, len(ids_D))


def test_proposals_stay_in_their_heads() -> None:
    """Would catch more heads, or ids, than there are, and a place that was chosen outside of the head."""
    head, packed, ids_D = heads()
    native, hidden_1H = NativeHeads(head, packed, ids_D, len(ids_D)), torch.ones(1, 16)
    assert native.paths(hidden_1H, 1, [2, 2, 2])[0].shape == (8, 3)
    for widths, rule in (([1] * 4, "there are fewer heads"), ([21], "there are fewer ids"), ([0], "fewer ids")):
        with pytest.raises(IntegrityError, match=rule):
            native._draft(hidden_1H, [1], widths)
    with pytest.raises(IntegrityError, match="a chosen place lies outside of the head"):
        native.chains(hidden_1H, [1], 2, lambda *_: 20)
    with pytest.raises(IntegrityError, match="reads 32 floats"):
        native._draft(hidden_1H, [1, 2], [1])
    with pytest.raises(IndexError):
        native.paths(hidden_1H, 40, [1])
