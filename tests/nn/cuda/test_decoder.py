"""The decoder for CUDA on the eager twins of its operations, against the decoder that runs here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError
from qspec.nn.cuda import passes as cuda_pass
from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.decoder import CudaDecoder, ancestors
from qspec.nn.cuda.model import obstacle
from qspec.nn.cuda.passes import NODES, Inputs
from qspec.nn.eager.decoder import Decoder
from qspec.nn.lm import BatchLM, HiddenLM
from qspec.numerics.speculation.trees import branches
from qspec.ops.cuda import KVLayer
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.engine import generate
from qspec.speculation.types import Sampling
from tests.tiny import VOCAB_SIZE, tiny_model

TOKENS = torch.randint(5, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(1))
PROMPT, NODES_T = TOKENS[:20], TOKENS[20:29]
PARENTS = (-1, -1, 0, 0, 1, 1, 2, 3, 4)
KINDS = ("llama", "qwen2", "qwen3")
SCHEMES: dict[str, dict[str, Any]] = {
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "W8A8": {"scheme": "W8A8"},
    "W4A16": {"scheme": "W4A16", "group_size": 32},
    "FP8 + FP8 cache": {"scheme": "FP8", "kv": KVSpec(format="fp8_e4m3")},
    "W8A8 + INT8 cache": {"scheme": "W8A8", "kv": KVSpec(format="int8", granularity="token_head")},
}
GREEDY, EOS = Sampling(), ()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def build(kind: str) -> LoadedModel:
        if kind not in made:
            made[kind] = load_folder(tiny_model(kind, tmp_path_factory.mktemp(kind)))
        return made[kind]

    return build


def quantized(model: LoadedModel, name: str) -> QuantizedModel:
    return quantize(model, calibrate(model, [TOKENS.tolist()]), build_plan(QuantSpec(**SCHEMES[name])))


def on_cpu(model: LoadedModel | QuantizedModel, sequences: int = 1, dtype: torch.dtype = torch.float32) -> CudaDecoder:
    return CudaDecoder.load(model, dtype, 192, sequences, "cpu")


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    """float32 over two layers: sums in another order."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_float_logits_equal_the_decoder_that_runs_here(kind: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches a wrong rope, bias, q/k norm, head order, tied head, or position at the seams of prompt and pass."""
    decoder, want = on_cpu(model(kind)), Decoder.from_float(model(kind)).forward(TOKENS)
    pieces = [decoder.forward(part) for part in TOKENS.split([70, 1, 5, 65, 9])]
    same(torch.cat(pieces), want)


def test_bfloat16_logits_are_close(model: Callable[[str], LoadedModel]) -> None:
    """Catches a step that leaves the compute dtype, or keeps a residual that no later layer reads."""
    want = Decoder.from_float(model("llama"), torch.bfloat16).forward(TOKENS[:40])
    # bfloat16 has 8 bits, and the two round at different places
    same(on_cpu(model("llama"), dtype=torch.bfloat16).forward(TOKENS[:40]), want, 0.1)


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_logits_equal_the_reference(name: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches scales of the wrong layer or axis, inputs rounded twice, and codes of the cache read without scales."""
    whole = quantized(model("llama"), name)
    decoder, reference = on_cpu(whole), Decoder.from_quantized(whole, kernels="reference")
    for part in PROMPT.split([18, 2]):
        got, want = decoder.forward(part), reference.forward(part)
    # one code apart where a last-bit difference meets the edge of a step
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("name", ["FP8 + FP8 cache", "W8A8 + INT8 cache"])
def test_rolled_back_drafts_leave_no_trace(name: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches rejected drafts that later rows still see."""
    decoder = on_cpu(quantized(model("llama"), name))
    decoder.forward(PROMPT)
    want = decoder.forward(TOKENS[60:62])
    decoder.truncate(20)
    decoder.forward(TOKENS[30:39])
    decoder.truncate(20)
    assert torch.equal(decoder.forward(TOKENS[60:62]), want)
    assert decoder.length == 22


@pytest.mark.parametrize("name", ["float", "FP8 + FP8 cache", "W8A8 + INT8 cache"])
def test_nodes_of_trees_are_computed_as_if_decoded(name: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches a node that sees a sibling, stands at the wrong position, or is kept without its scales."""
    decoder = on_cpu(model("llama") if name == "float" else quantized(model("llama"), name))
    decoder.forward(PROMPT)
    for path, _ in branches(PARENTS):
        want = torch.cat([decoder.forward(NODES_T[node][None]) for node in path])
        behind = decoder.forward(TOKENS[:1])
        decoder.truncate(20)
        halves = decoder.forward_tree(NODES_T[:4], PARENTS[:4]), decoder.forward_tree(NODES_T[4:], PARENTS)
        got = torch.cat(halves)[list(path)]
        assert (got - want).norm() < 0.02 * want.norm()
        decoder.keep(path)
        assert decoder.length == 20 + len(path)
        got = decoder.forward(TOKENS[:1])
        assert (got - behind).norm() < 0.02 * behind.norm()
        decoder.truncate(20)


@pytest.mark.parametrize("name", ["float", "FP8 + FP8 cache", "W8A8 + INT8 cache"])
def test_long_texts_read_the_cache_as_it_is_stored(
    name: str, model: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a prefix that every chunk dequantizes anew, a mask of rows by positions, and rows that see too much or
    too little at the seams of chunks and pieces."""
    whole = model("llama") if name == "float" else quantized(model("llama"), name)
    single, decoder, attend, seen = on_cpu(whole), on_cpu(whole), cuda_pass.ops.attend, list[tuple[int, int]]()
    want = torch.cat([single.forward(part) for part in TOKENS.split([5, *[29] * 5])])
    stored = {layer.k_BGLD.data_ptr(): layer.k_BGLD.dtype for layer in decoder._pool.passes.cache.first(1)}

    def watched(q: Tensor, cache: KVLayer, lengths: Tensor, ancestors: Tensor, scale: float) -> Tensor:
        assert stored[cache.k_BGLD.data_ptr()] == cache.k_BGLD.dtype
        assert ancestors.shape == q.shape[:2]
        seen.append((len(q), q.shape[1]))
        return attend(q, cache, lengths, ancestors, scale)

    monkeypatch.setattr(cuda_pass.ops, "attend", watched)
    monkeypatch.setattr(cuda_pass, "CHUNK", 70)
    got = torch.cat([decoder.forward(TOKENS[:5]), decoder.forward(TOKENS[5:])])  # chunks of 70, 70 and 5 behind 5
    assert (got - want).norm() < (1e-4 if name == "float" else 0.02) * want.norm()
    assert set(seen) == {(1, 5), (2, NODES), (1, NODES)}


@pytest.mark.parametrize("name", ["float", "W8A8 + INT8 cache"])
def test_a_cache_grows_layer_by_layer(
    name: str, model: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches growth that holds the old cache and the new one at once, or graphs that hold the old one's addresses."""
    whole = model("llama") if name == "float" else quantized(model("llama"), name)
    first, make, made, most = on_cpu(whole), CudaCache._layer, list[StorageWeakRef](), 0
    pool = first._pool
    made += [StorageWeakRef(x.untyped_storage()) for x in pool.passes.cache.stored(0)]
    per_layer = len(made) // whole.arch.n_layers

    def layer(cache: CudaCache, i: int) -> KVLayer:
        nonlocal most
        new = make(cache, i)
        scales = [x for x in (new.k_scale, new.v_scale) if isinstance(x, Tensor)]
        made.extend(StorageWeakRef(x.untyped_storage()) for x in (new.k_BGLD, new.v_BGLD, *scales))
        most = max(most, sum(not x.expired() for x in made))
        return new

    monkeypatch.setattr(CudaCache, "_layer", layer)
    pool.passes(Inputs.padding(1, 1, pool.passes.cache.length))
    assert (first.slot, first.fork().slot) == (0, 1)
    assert pool.passes.cache.sequences == 2
    assert most == (whole.arch.n_layers + 1) * per_layer
    assert not pool.passes._graphs


def test_bits_of_whole_chains() -> None:
    """Catches the sign bit of the last of 64 nodes, on the host or on the device."""
    given = Inputs.chain(torch.zeros(1, NODES, dtype=torch.long), torch.tensor([3]))
    assert given.ancestors_BR[0].tolist() == ancestors(range(-1, NODES - 1))
    assert ancestors(range(-1, NODES - 1))[-2:] == [2**63 - 1, -1]
    assert given.positions_BR[0, -1] == 66


def test_sequences_in_one_pass_are_computed_as_if_alone(model: Callable[[str], LoadedModel]) -> None:
    """Catches rows of one sequence in the slot, or at the length, of another, what growth of the cache loses, and slots
    that are never given back."""
    first = on_cpu(model("llama"), sequences=2)
    sequences = [first, first.fork()]
    assert isinstance(first, BatchLM)
    assert isinstance(first, HiddenLM)
    rows, trees = [TOKENS[30:33], TOKENS[40:41], NODES_T], [None, None, PARENTS]
    for sequence, n in zip(sequences, (7, 1), strict=True):
        sequence.forward(TOKENS[:n])
    sequences.append(first.fork())  # a third makes the cache grow
    sequences[2].forward(TOKENS[:20])
    got = CudaDecoder.forward_many(sequences, rows, trees)
    for sequence, n, tokens_T, tree, logits in zip(sequences, (7, 1, 20), rows, trees, got, strict=True):
        sequence.truncate(n)
        same(logits, sequence.forward(tokens_T) if tree is None else sequence.forward_tree(tokens_T, tree))
    slots = {sequence.slot for sequence in sequences}
    del sequence, sequences[1:]
    assert first.fork().slot in slots


def test_the_engine_runs_on_it(model: Callable[[str], LoadedModel]) -> None:
    """Catches a protocol that the engine reads otherwise: speculation must not change the text, alone or in a batch."""
    decoder, prompt = on_cpu(model("llama"), sequences=3), PROMPT.tolist()
    generator = torch.Generator()
    want = generate(Decoder.from_float(model("llama")), None, None, prompt, 30, GREEDY, EOS, generator).tokens
    assert generate(decoder, NgramDrafter(), None, prompt, 30, GREEDY, EOS, generator).tokens == want
    prompts = [GenerationRequest(prompt, 30, generator, NgramDrafter()), GenerationRequest(prompt[:9], 12, generator)]
    assert generate_batch(decoder, prompts, GREEDY, EOS)[0].tokens == want


def test_what_it_does_not_run_is_named(tmp_path: Path, model: Callable[[str], LoadedModel]) -> None:
    """Catches a model that would run with a step left out."""
    assert obstacle(load_folder(tiny_model("gemma2", tmp_path / "a"))) == "activation gelu_tanh"
    assert obstacle(load_folder(tiny_model("mixtral", tmp_path / "b"))) == "a mixture of experts"
    llama = model("llama")
    rotated = replace(llama, arch=replace(llama.arch, down_hadamard=True))
    with pytest.raises(RecipeError, match="Hadamard transform before down_proj"):
        on_cpu(rotated)
    whole = quantize(
        llama,
        None,
        build_plan(QuantSpec(scheme="W8A8", kv=KVSpec(format="int8", granularity="token_head", residual=3))),
    )
    assert "KV cache" in (obstacle(whole) or "")
