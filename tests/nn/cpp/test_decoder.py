"""The C++ core against the torch decoder and the reference kernels, and against itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.bridges.hf import load_folder
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import NativeLinear, instruction_sets
from qspec.nn.cpp.weights import linear_obstacle, pack_linears
from qspec.nn.eager.decoder import Decoder
from qspec.nn.eager.linear import merged_linear
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.quantization.outliers import SparseMatrix
from qspec.numerics.speculation.trees import path_to
from qspec.ops import native_library, reference
from qspec.ops.native_library import NoLibrary
from qspec.plan import TensorScheme
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import LayerStats, LoadedModel, QLinear, QuantizedModel
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation import engine
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Sampling
from tests.tiny import KINDS, NEWER_KINDS, VOCAB_SIZE, tiny_model

ALL_KINDS = (*KINDS, *NEWER_KINDS)

TOKENS = torch.randint(5, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))
SCHEMES = ("W8A8", "W8A8 g32", "W4A16", "W4A8", "FP8", "FP8_DYNAMIC")
SETS = ("portable", "avx2", "avx512", "amx")
CACHES = (None, KVSpec(format="int8", granularity="token_head"), KVSpec(), KVSpec(granularity="head"))


@pytest.fixture(autouse=True)
def _library() -> None:
    reason = NativeDecoder.missing()
    if reason is not None:
        pytest.skip(f"needs the C++ core: {reason}")


def one_of(isa: str) -> str:
    if isa not in instruction_sets():
        pytest.skip(f"this CPU does not run {isa}")
    return isa


Make = Callable[..., QuantizedModel]
"""`make(kind, scheme, kv, **overrides of the config)`; groups are of 32."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny models, each built once."""

    @cache
    def build(kind: str, overrides: tuple[tuple[str, Any], ...]) -> tuple[LoadedModel, LayerStats]:
        model = load_folder(tiny_model(kind, tmp_path_factory.mktemp(kind), **dict(overrides)))
        return model, calibrate(model, [TOKENS.tolist()])

    def quantized(kind: str, scheme: str = "W8A8", kv: KVSpec | None = None, **overrides: Any) -> QuantizedModel:
        model, stats = build(kind, tuple(overrides.items()))
        name, grouped, _ = scheme.partition(" g")
        group = 32 if grouped or name.startswith("W4") else None
        spec = QuantSpec.model_validate({"scheme": name, "group_size": group, "kv": kv})
        return quantize(model, stats, build_plan(spec))

    return quantized


def close(got: Tensor, want: Tensor) -> None:
    """Logits of one model in two orders of summation."""
    assert got.shape == want.shape
    # float32 sums of two layers, before rounding has met a tie
    assert (got[0] - want[0]).abs().max() < 1e-4
    # A last-bit difference at the edge of an 8-bit code moves that row, and through the cache later ones, by up to 2 %;
    # in a mixture it may send one row to another expert.
    rows = ((got - want).norm(dim=1) / want.norm(dim=1)).sort().values
    assert rows[:-1].square().mean().sqrt() < 0.02
    assert rows[-1] < 0.5


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_logits_equal_the_torch_decoder(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a wrong head order, rope half, window edge, bias, norm, gate, tie, soft cap, route or embedding scale."""
    model = load_folder(tiny_model(kind, tmp_path))
    model = replace(model, tensors={name: t.to(dtype) for name, t in model.tensors.items()})
    want = Decoder.from_float(model).forward(TOKENS)
    # float32 sums of the same products in another order
    torch.testing.assert_close(NativeDecoder.from_float(model).forward(TOKENS), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [
        (32, {"hidden_size": 40, "intermediate_size": 52}),
        (64, {"hidden_size": 33, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3}),
        (96, {"hidden_size": 48, "intermediate_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}),
        (128, {"hidden_size": 56, "intermediate_size": 44}),
        (256, {"hidden_size": 72, "intermediate_size": 20}),
    ],
)
@pytest.mark.parametrize("scheme", ["none", "W8A8"])
def test_odd_sizes(head_dim: int, sizes: dict[str, int], scheme: str, make: Make) -> None:
    """Catches panels, pairs and tails that reach past a width, and head sizes that the values' loop skips."""
    options: dict[str, Any] = {"head_dim": head_dim, "vocab_size": 301, "attention_bias": True, "mlp_bias": True}
    model = make("llama", scheme, **sizes, **options)
    close(NativeDecoder(model).forward(TOKENS), Decoder.from_quantized(model, kernels="reference").forward(TOKENS))


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_equal_the_reference(kind: str, scheme: str, make: Make) -> None:
    """Catches scales, codes or activation rounding that are another scheme's."""
    model = make(kind, scheme)
    close(NativeDecoder(model).forward(TOKENS), Decoder.from_quantized(model, kernels="reference").forward(TOKENS))


@pytest.mark.parametrize("kv", CACHES[1:])
def test_quantized_caches_equal_the_torch_ones(kv: KVSpec, make: Make) -> None:
    """Catches a cache scale of another head or position, codes read as another format, or values left in float."""
    model = make("qwen3", "W4A16", kv)
    got = NativeDecoder(model).forward(TOKENS)
    close(got, Decoder.from_quantized(model, kernels="reference").forward(TOKENS))
    assert not torch.equal(got, NativeDecoder(replace(model, plan=replace(model.plan, kv=None))).forward(TOKENS))


def layer(n: int, k: int, fmt: NumFormat, gran: Granularity, activation: TensorScheme | None) -> QLinear:
    w_NK = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) ** 3
    static = activation is not None and not activation.dynamic
    return QLinear(quantize_weight(w_NK, fmt, gran), activation, torch.tensor([0.03]) if static else None, None)


@pytest.mark.parametrize(("n", "k"), [(8, 64), (13, 96), (40, 33), (96, 576)])
@pytest.mark.parametrize("isa", SETS)
def test_int8_products_are_exact(n: int, k: int, isa: str) -> None:
    """Catches sums that saturate or overflow, a lost tail, and activations rounded otherwise than the reference."""
    linear = layer(n, k, INT8, PerChannel(), TensorScheme(INT8, PerToken(), dynamic=True))
    x_TK = torch.randn(9, k) * 5
    x_TK[3] = x_TK[3].sign()  # all codes ±127
    x_TK[4] = 0
    x_TK[5] = (torch.arange(k) % 7).float() * 0.5  # ties
    got = NativeLinear(pack_linears([linear], [None]), one_of(isa))(x_TK)
    assert torch.equal(got, reference.int8_linear(x_TK, linear.weight.codes, linear.weight.scale))


@pytest.mark.parametrize(
    ("fmt", "gran", "activation"),
    [
        (INT4, PerGroup(32), None),
        (INT4, PerGroup(64), None),
        (INT4, PerGroup(128), None),
        (INT8, PerChannel(), None),
        (INT8, PerGroup(64), None),
        (INT8, PerTensor(), TensorScheme(INT8, PerTensor())),
        (INT8, PerGroup(32), TensorScheme(INT8, PerToken(), dynamic=True)),
        (INT8, PerGroup(64), TensorScheme(INT8, PerGroup(64), dynamic=True)),
        (INT4, PerGroup(32), TensorScheme(INT8, PerToken(), dynamic=True)),
        (INT4, PerGroup(32), TensorScheme(INT8, PerGroup(32), dynamic=True)),
        (INT4, PerGroup(128), TensorScheme(INT8, PerTensor())),
        (INT4, PerChannel(), TensorScheme(INT8, PerToken(), dynamic=True)),
        (FP8_E4M3, PerChannel(), None),
        (FP8_E4M3, PerBlock(16, 128), None),
        (FP8_E4M3, PerTensor(), TensorScheme(FP8_E4M3, PerTensor())),
        (FP8_E4M3, PerChannel(), TensorScheme(FP8_E4M3, PerToken(), dynamic=True)),
    ],
)
@pytest.mark.parametrize("isa", SETS)
def test_every_format_equals_its_reference(
    fmt: NumFormat, gran: Granularity, activation: TensorScheme | None, isa: str
) -> None:
    """Catches a group's scale applied to its neighbour, subnormal e4m3 codes, and inputs that are not rounded."""
    linear = layer(44, 384, fmt, gran, activation)
    x_TK = torch.randn(7, 384)
    x_TK[2] *= 1e-3
    got = NativeLinear(pack_linears([linear], [None]), one_of(isa))(x_TK)
    want = reference.linear(x_TK, linear.weight, activation, linear.input_scale)
    if activation is not None and reference.is_int8_grouped(linear.weight, activation):
        assert torch.equal(got, want)
    # float32 sums of 384 products in another order
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_scales_are_halved_only_where_nothing_is_lost() -> None:
    """Catches scales of another tool that float16 rounds: the core would compute another model than the reference."""
    linear = layer(16, 64, INT4, PerGroup(32), TensorScheme(INT8, PerToken(), dynamic=True))
    packed = pack_linears([linear], [None])
    assert (packed.scale, packed.half_scale is None) == (None, False)
    exact = replace(linear, weight=replace(linear.weight, scale=linear.weight.scale * (1 + 2**-20)))
    packed = pack_linears([exact], [None])
    assert (packed.scale is None, packed.half_scale) == (False, None)
    x_TK = torch.randn(3, 64)
    assert torch.equal(NativeLinear(packed)(x_TK), reference.linear(x_TK, exact.weight, exact.activation, None))


def test_zero_points_of_merged_layers() -> None:
    """Catches zero points under the rows of another member, and a symmetric member that gets those of its neighbour."""
    inputs = TensorScheme(INT8, PerToken(), dynamic=True)
    w_NK = torch.rand(16, 64) - 0.2
    skewed = QLinear(quantize_weight(w_NK, INT4, PerGroup(32), symmetric=False), inputs, None, None)
    members = [skewed, layer(16, 64, INT4, PerGroup(32), inputs)]
    x_TK = torch.randn(3, 64)
    want = [reference.linear(x_TK, member.weight, member.activation, None) for member in members]
    assert torch.equal(NativeLinear(pack_linears(members, [None, None]))(x_TK), torch.cat(want, 1))


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
@pytest.mark.parametrize("kv", CACHES)
def test_rows_are_computed_as_if_alone(scheme: str, kv: KVSpec | None, make: Make) -> None:
    """Catches sums whose order depends on the number of rows: speculation would change greedy text."""
    decoder = NativeDecoder(make("mistral", scheme, kv))  # its window is 32
    alone = torch.cat([decoder.forward(token[None]) for token in TOKENS])
    for rows in (2, 3, 4, 5, 7, 8, 17, 64, 65):
        decoder.truncate(20)
        assert torch.equal(decoder.forward(TOKENS[20 : 20 + rows]), alone[20 : 20 + rows]), rows
    decoder.truncate(0)
    assert torch.equal(decoder.forward(TOKENS), alone)


@pytest.mark.parametrize("scheme", ["none", "W8A8"])
def test_truncate_forgets(scheme: str, make: Make) -> None:
    """Catches rejected draft tokens that still influence what follows, and tails that are another row's."""
    decoder = NativeDecoder(make("qwen2", scheme, CACHES[1]))
    want = decoder.forward(TOKENS[:30])
    decoder.truncate(11)
    decoder.forward(TOKENS[40:60])
    decoder.truncate(11)
    assert decoder.length == 11
    assert torch.equal(decoder.forward(TOKENS[11:30], last=4), want[26:])
    decoder.truncate(11)
    assert torch.equal(decoder.greedy(TOKENS[11:30]), want[11:].argmax(-1))


@pytest.mark.parametrize("scheme", ["none", "W8A8", "W4A16", "FP8"])
def test_thread_counts_give_equal_bits(scheme: str, make: Make) -> None:
    """Catches a sum that is split between threads, and pieces that are computed twice or by nobody."""
    model, threads, found = make("llama", scheme), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            decoder = NativeDecoder(model)
            found.append(torch.cat([decoder.forward(part) for part in TOKENS.split([70, 1, 19])]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
def test_portable_code_equals_the_fast_one(scheme: str, make: Make) -> None:
    """Catches code for other CPUs that this machine never runs otherwise."""
    model = make("llama", scheme, CACHES[2])
    want = NativeDecoder(model, isa="portable").forward(TOKENS)
    for isa in instruction_sets():
        decoder = NativeDecoder(model, isa=isa)
        assert decoder.isa == isa
        close(decoder.forward(TOKENS), want)


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_greedy_speculation_equals_plain_decoding(scheme: str, make: Make) -> None:
    """Catches verification that decides otherwise than decoding, with a draft that is often wrong."""
    target = NativeDecoder(make("llama", scheme, seed=3))
    draft = NativeDecoder(make("llama", "W4A16", seed=3))
    drafter = ModelDrafter(draft, target.vocab_size, ())
    prompt, law, generator = TOKENS[:12].tolist(), Sampling(), torch.Generator()
    plain = engine.generate(target, None, None, prompt, 60, law, (), generator)
    drafted = engine.generate(target, drafter, Fixed(4), prompt, 60, law, (), generator)
    assert drafted.tokens == plain.tokens
    assert any(step.accepted for step in drafted.steps)


def test_what_is_not_served_is_named(make: Make, tmp_path: Path) -> None:
    """Catches a model that runs with a part of it silently left out."""
    small = load_folder(tiny_model("llama", tmp_path, head_dim=12))
    assert "head size 12" in (NativeDecoder.supports(small) or "")
    large = load_folder(tiny_model("llama", tmp_path / "large", head_dim=264))
    assert "head size 264" in (NativeDecoder.supports(large) or "")
    model = make("llama", "FP8_BLOCK", hidden_size=128, intermediate_size=128, head_dim=64)
    assert "inputs" in (NativeDecoder.supports(model) or "")
    odd = layer(8, 48, INT4, PerGroup(16), TensorScheme(INT8, PerToken(), dynamic=True))
    assert "groups of 16" in (linear_obstacle(odd) or "")
    window = KVSpec(format="int8", granularity="token_head", residual=8)
    assert "residual 8" in (NativeDecoder.supports(make("llama", kv=window)) or "")


@pytest.mark.parametrize("kind", NEWER_KINDS)
@pytest.mark.parametrize("scheme", ["none", "W8A8"])
def test_rows_of_newer_kinds_are_computed_as_if_alone(kind: str, scheme: str, make: Make) -> None:
    """Catches norms, caps and experts whose sums depend on which other rows chose the same expert."""
    decoder = NativeDecoder(make(kind, scheme))
    alone = torch.cat([decoder.forward(token[None]) for token in TOKENS])
    decoder.truncate(0)
    got = torch.cat([decoder.forward(part) for part in TOKENS.split([65, 3, 22])])
    assert torch.equal(got, alone)
    decoder.truncate(0)
    assert torch.equal(decoder.greedy(TOKENS), alone.argmax(-1))


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "W4A8"])
def test_outliers_read_unrounded_inputs_in_their_rows(scheme: Any, make: Make) -> None:
    """Catches a weight kept apart that lands in another row of a merged or paired layer, or reads rounded inputs."""
    plain = make("qwen2", scheme)
    model = replace(plain, linears={name: with_outliers(linear) for name, linear in plain.linears.items()})
    got = NativeDecoder(model).forward(TOKENS)
    close(got, Decoder.from_quantized(model, kernels="reference").forward(TOKENS))
    assert not torch.equal(got, NativeDecoder(plain).forward(TOKENS))


def with_outliers(linear: QLinear) -> QLinear:
    """Three in a hundred weights more, at places of its own."""
    shape, seed = linear.weight.shape, int(linear.weight.codes.long().sum())
    noise_NK = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return replace(linear, outliers=SparseMatrix.from_dense(noise_NK * 0.1, noise_NK > 1.9))


@pytest.mark.parametrize("paired", [False, True])
def test_outliers_of_merged_rows(paired: bool) -> None:
    """Catches rows of a member that is no multiple of a panel, and one without outliers."""
    members = [with_outliers(layer(n, 64, INT4, PerGroup(32), None)) for n in ((24, 24) if paired else (24, 13))]
    members[1] = replace(members[1], outliers=None) if paired else members[1]
    x_TK = torch.randn(5, 64)
    got = NativeLinear(pack_linears(members, [None, None], paired))(x_TK)
    parts = [merged_linear([m], [None], torch.float32, "reference")(x_TK) for m in members]
    want = torch.cat([F.pad(y_TN, (0, -y_TN.shape[1] % 8)) for y_TN in parts], 1)
    if paired:
        want = torch.stack([y_TN.unflatten(1, (-1, 8)) for y_TN in parts], 2).flatten(1)
    # float32 sums of 64 products in another order
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_a_small_head_is_read_as_codes(make: Make) -> None:
    """Catches a head that stays in float, and an untied one whose embedding is read as the head's codes."""
    model = make("qwen2", "W8A8")
    embedding = model.tensors["model.embed_tokens.weight"]
    for head in (layer_of(embedding, INT8, PerChannel()), layer_of(embedding, INT4, PerGroup(32))):
        own = replace(model, arch=replace(model.arch, tied=False), linears={**model.linears, "lm_head": head})
        got = NativeDecoder(own).forward(TOKENS)
        close(got, Decoder.from_quantized(own, kernels="reference").forward(TOKENS))
        assert not torch.equal(got, NativeDecoder(model).forward(TOKENS))


def layer_of(w_NK: Tensor, fmt: NumFormat, gran: Granularity) -> QLinear:
    activation = TensorScheme(INT8, PerToken(), dynamic=True) if fmt == INT8 else None
    return QLinear(quantize_weight(w_NK, fmt, gran), activation, None, None)


def test_bad_calls_are_refused(make: Make) -> None:
    """Catches reads outside of the embedding, and a forked process that waits for threads that it does not have."""
    decoder = NativeDecoder(make("llama"))
    for token in (-1, VOCAB_SIZE):
        with pytest.raises(IndexError):
            decoder.forward(torch.tensor([token]))
    assert decoder.length == 0


def test_forked_process_is_refused(make: Make) -> None:
    """Catches a child that waits forever for threads that only its parent has."""
    decoder = NativeDecoder(make("llama"))
    decoder.forward(TOKENS[:2])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            decoder.forward(TOKENS[:2])
            os.write(write, b"ran")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read, 200)
    os.close(read), os.close(write)


Missing = Literal["compiler", "folder", "source"]


@pytest.mark.parametrize("what", ["compiler", "folder", "source"])
def test_failed_builds_say_why(what: Missing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build that leaves half a library behind, or an error that is not `NoLibrary`."""
    folder = tmp_path / "out"
    if what == "compiler":
        monkeypatch.setattr(native_library, "compiler", lambda: None)
    elif what == "folder":
        folder.write_text("a file")
    else:
        (tmp_path / "bad.cpp").write_text("int main( {")
        monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    with pytest.raises(NoLibrary):
        native_library.build(folder)
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_library_is_named_for_what_it_was_compiled_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sources that change while the compiler runs, and the old library under their name for good."""
    source, run_all = tmp_path / "one.cpp", native_library.run_all
    source.write_text("int one() { return 1; }")

    def changes_sources(commands: Sequence[Sequence[str]], deadline: float | None = None) -> None:
        source.write_text("int one() { return 2; }")
        run_all(commands, deadline)

    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    monkeypatch.setattr(native_library, "run_all", changes_sources)
    before = native_library.library_name(tmp_path)
    assert native_library.build(tmp_path / "out").name == before != native_library.library_name(tmp_path)


TREE = (-1, 0, 0, 1, 2, 2, 5, -1, 7)
"""Two children of the root, with branches that part below."""


@pytest.mark.parametrize("scheme", ["none", "W8A8", "W4A16"])
@pytest.mark.parametrize("kv", CACHES)
def test_a_tree_gives_each_path_the_bits_of_a_sequence(scheme: str, kv: KVSpec | None, make: Make) -> None:
    """Catches a node that sees a sibling, stands at its slot's position, or sums its path in another order."""
    for kind in ("mistral", "qwen3"):  # the first has a window of 32, which ends inside the tree's context
        decoder = NativeDecoder(make(kind, scheme, kv))
        for start in (5, 32, 61):
            decoder.truncate(0)
            decoder.forward(TOKENS[:start])
            nodes = TOKENS[70:79]
            first = decoder.forward_tree(nodes[:4], TREE[:4])
            logits = torch.cat([first, decoder.forward_tree(nodes[4:], TREE)])
            path = path_to(TREE, 6)
            decoder.keep(path)
            after = decoder.forward(TOKENS[:3])
            decoder.truncate(start)
            assert torch.equal(decoder.forward(nodes[path]), logits[path])
            assert torch.equal(decoder.forward(TOKENS[:3]), after)


def test_forks_run_together_as_alone(make: Make) -> None:
    """Catches rows that read another sequence's cache, and lengths that grow for trees."""
    first = NativeDecoder(make("qwen2", "W8A8", CACHES[1]))
    second = first.fork()
    want = first.forward(TOKENS[:40])
    first.truncate(0)
    first.forward(TOKENS[:20])
    chain, tree = NativeDecoder.forward_many([first, second], [TOKENS[20:40], TOKENS[:4]], [None, (-1, 0, 1, 2)])
    assert (first.length, second.length) == (40, 0)
    assert torch.equal(chain, want[20:])
    assert torch.equal(tree, want[:4])
    second.keep([0, 1, 2, 3])
    del first
    assert torch.equal(second.forward(TOKENS[4:40]), want[4:])
