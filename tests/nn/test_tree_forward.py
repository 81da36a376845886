"""Trees at the end of a cache: every node as plain decoding of its path would compute it, and nothing left behind."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError
from qspec.nn.eager.decoder import Decoder
from qspec.nn.eager.kv_cache import QuantizedKVCache
from qspec.nn.lm import BatchLM, TreeLM
from qspec.nn.reuse import PrefixReuse
from qspec.numerics.speculation.trees import branches, path_to
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from tests.speculation.toys import TableLM, table
from tests.tiny import VOCAB_SIZE, tiny_model

TOKENS = torch.randint(5, VOCAB_SIZE, (48,), generator=torch.Generator().manual_seed(1))
PROMPT, NODES = TOKENS[:20], TOKENS[20:41]
# 21 nodes: more than a float head takes at once; three levels of branching, and a branch that ends where it began
PARENTS = (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 15, 18, -1)

KV: dict[str, dict[str, Any] | None] = {
    "float": None,
    "fp8": {"format": "fp8_e4m3"},
    "fp8 head": {"granularity": "head", "query": "head"},
    "int8": {"format": "int8", "granularity": "token_head"},
    "outliers": {"value": {"format": "int4", "granularity": "token_head", "outliers": 5.0}},
    "two kinds": {"format": "fp8_e4m3", "value": {"format": "int4", "granularity": "token_head"}},
    "skipped": {"format": "fp8_e4m3", "query": None, "skip_layers": (1,)},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "residual": {"format": "int8", "granularity": "token_head", "residual": 3},
    "channel": {
        "format": "int4",
        "granularity": "token_head",
        "key": {"format": "int4", "granularity": "channel", "group": 8},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def build(kind: str) -> LoadedModel:
        if kind not in made:
            made[kind] = load_folder(tiny_model(kind, tmp_path_factory.mktemp(kind), vocab_size=2048))
        return made[kind]

    return build


def quantized(model: LoadedModel, kv: dict[str, Any] | None = None) -> Decoder:
    stats = calibrate(model, [TOKENS.tolist()])
    spec = QuantSpec(scheme="W8A8", kv=None if kv is None else KVSpec(**kv))
    return Decoder.from_quantized(quantize(model, stats, build_plan(spec)), max_length=64)


def stored(decoder: Decoder) -> list[Tensor]:
    """What the cache holds of the positions up to its length."""
    if isinstance(decoder.cache, QuantizedKVCache):
        return decoder.cache.codes(decoder.length)
    end, layers = decoder.length, range(decoder.arch.n_layers)
    nothing = torch.empty(decoder.arch.n_kv_heads, 0, decoder.arch.head_dim)
    return [x[:, :end].clone() for i in layers for x in decoder.cache.update(i, end, nothing, nothing)]


def decoded(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits behind each token, decoded one by one after the prompt."""
    decoder.truncate(len(PROMPT))
    return torch.cat([decoder.forward(torch.tensor([token])) for token in tokens])


def check(decoder: Decoder) -> None:
    """Every node's logits and the cache of every kept branch, against plain decoding of the branch."""
    decoder.forward(PROMPT)
    for path, _ in branches(PARENTS):
        text = NODES[path].tolist()
        want, plain = decoded(decoder, text), stored(decoder)
        behind = decoder.forward(TOKENS[:1])
        decoder.truncate(len(PROMPT))
        together = decoder.forward_tree(NODES, PARENTS)
        assert torch.equal(together[path], want)
        assert decoder.length == len(PROMPT)
        decoder.keep(path)
        assert decoder.length == len(PROMPT) + len(path)
        assert all(map(torch.equal, stored(decoder), plain))
        assert torch.equal(decoder.forward(TOKENS[:1]), behind)
        decoder.truncate(len(PROMPT))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text", "qwen3_moe"])
def test_nodes_are_computed_as_if_decoded(kind: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches a node at the wrong position, one that sees a sibling, or a window counted in rows and not in depth."""
    check(quantized(model(kind)))


@pytest.mark.parametrize("kv", KV)
def test_every_cache_keeps_what_decoding_would_have_written(kv: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches codes moved without their scales or outliers, and rejected siblings that stay in the cache."""
    check(quantized(model("llama"), KV[kv]))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_float_model_reads_trees(kind: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches float caches clobbered by the branches that attention lays out in them."""
    decoder = Decoder.from_float(model(kind), max_length=64)
    decoder.forward(PROMPT)
    for path, _ in branches(PARENTS):
        want = decoded(decoder, NODES[path].tolist())
        behind = decoder.forward(TOKENS[:1])
        decoder.truncate(len(PROMPT))
        # float32, two layers: matmuls of one row and of many sum in another order
        torch.testing.assert_close(decoder.forward_tree(NODES, PARENTS)[path], want, rtol=1e-4, atol=1e-4)
        decoder.keep(path)
        torch.testing.assert_close(decoder.forward(TOKENS[:1]), behind, rtol=1e-4, atol=1e-4)
        decoder.truncate(len(PROMPT))


@pytest.mark.parametrize("window", [None, "mistral"])
def test_a_chain_is_a_tree_of_one_branch(window: str | None, model: Callable[[str], LoadedModel]) -> None:
    """Catches any difference between the two ways to feed the same drafts, in float too: the same matmuls."""
    decoder = Decoder.from_float(model(window or "llama"), max_length=64)
    decoder.forward(PROMPT)
    want = decoder.forward(NODES)
    kept = stored(decoder)
    decoder.truncate(len(PROMPT))
    assert torch.equal(decoder.forward_tree(NODES, range(-1, len(NODES) - 1)), want)
    decoder.keep(range(len(NODES)))
    assert all(map(torch.equal, stored(decoder), kept))


@pytest.mark.parametrize("kv", ["float", "int8"])
def test_a_tree_may_grow(kv: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches later nodes written over earlier ones, or read at the positions of the first call."""
    decoder = quantized(model("llama"), KV[kv])
    decoder.forward(PROMPT)
    together = decoder.forward_tree(NODES, PARENTS)
    decoder.truncate(len(PROMPT))
    ends = [0, 2, 3, 9, 21]
    parts = [decoder.forward_tree(NODES[a:b], PARENTS[:b]) for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(parts), together)
    decoder.keep(path_to(PARENTS, 19))
    grown = stored(decoder)
    decoded(decoder, NODES[path_to(PARENTS, 19)].tolist())
    assert all(map(torch.equal, grown, stored(decoder)))


def test_other_calls_forget_a_tree(model: Callable[[str], LoadedModel]) -> None:
    """Catches nodes that are kept, or grown on, after their rows were written over."""
    decoder = quantized(model("llama"))
    for call in (lambda: decoder.forward(TOKENS[:1]), lambda: decoder.truncate(len(PROMPT))):
        decoder.truncate(0)
        decoder.forward(PROMPT)
        decoder.forward_tree(NODES[:2], PARENTS[:2])
        call()
        with pytest.raises((AssertionError, IndexError)):
            decoder.keep([0])
        with pytest.raises(AssertionError, match="another tree"):
            decoder.forward_tree(NODES[2:3], PARENTS[:3])
    decoder.truncate(0)
    decoder.forward(PROMPT)
    decoder.forward_tree(NODES[:3], PARENTS[:3])
    with pytest.raises(AssertionError, match="no path"):
        decoder.keep([1, 2])
    decoder.keep([])
    assert decoder.length == len(PROMPT)


@pytest.mark.parametrize("kv", WINDOWED)
def test_caches_that_round_by_position_refuse_trees(kv: str, model: Callable[[str], LoadedModel]) -> None:
    """Catches siblings written into one another's groups: wrong codes, silently."""
    decoder = quantized(model("llama"), WINDOWED[kv])
    decoder.forward(PROMPT)
    with pytest.raises(RecipeError, match="a tree of 2 drafts: this KV cache rounds tokens by their positions"):
        decoder.forward_tree(NODES[:2], (-1, -1))
    decoder.forward(NODES[:2])
    assert decoder.length == len(PROMPT) + 2


def test_who_reads_trees(model: Callable[[str], LoadedModel]) -> None:
    """Catches an LM that is taken for one that reads trees, or the other way round."""
    decoder = Decoder.from_float(model("llama"), max_length=8)
    assert isinstance(decoder, BatchLM)
    assert isinstance(TableLM(table(1, 3)), BatchLM)
    assert not isinstance(PrefixReuse(decoder), TreeLM)


@pytest.mark.parametrize("kv", ["float", "fp8", "residual", "channel"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_sequences_in_one_pass_are_computed_as_if_alone(
    kind: str, kv: str, model: Callable[[str], LoadedModel]
) -> None:
    """Catches rows of one sequence at the positions, in the cache or in the segments of another."""
    first = quantized(model(kind), (KV | WINDOWED)[kv])
    sequences = [first, *(first.fork() for _ in range(3))]
    prompts, rows = [TOKENS[:n] for n in (9, 1, 30, 17)], [TOKENS[n:] for n in (31, 47, 28, 45)]
    parents = [None] * 4 if kv in WINDOWED else [None, None, PARENTS[: len(rows[2])], None]
    want = []
    for sequence, prompt, tokens, tree in zip(sequences, prompts, rows, parents, strict=True):
        sequence.forward(prompt)
        want.append(sequence.forward(tokens) if tree is None else sequence.forward_tree(tokens, tree))
        sequence.truncate(len(prompt))
    got = Decoder.forward_many(sequences, rows, parents)
    assert all(map(torch.equal, got, want))
    grown = [len(p) + (len(t) if tree is None else 0) for p, t, tree in zip(prompts, rows, parents, strict=True)]
    assert [sequence.length for sequence in sequences] == grown


def test_forks_share_weights_and_nothing_else(model: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    """Catches a fork that copies weights, or writes into its origin's cache."""
    origin = Decoder.from_float(model("llama"), max_length=64)
    origin.forward(PROMPT)
    before = stored(origin)
    fork = origin.fork()
    assert fork.length == 0
    fork.forward(NODES)
    assert all(map(torch.equal, stored(origin), before))
    assert origin.length == len(PROMPT)
    other = Decoder.from_float(load_folder(tiny_model("llama", tmp_path)), max_length=64)
    with pytest.raises(AssertionError, match="different weights"):
        Decoder.forward_many([origin, other], [NODES[:1]] * 2, [None, None])
