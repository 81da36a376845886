"""A model of llama2.c as a transformers folder: its own greedy text, transformers' logits, its own token ids."""

from itertools import pairwise
import json
from pathlib import Path
import struct

import pytest
import torch

from qspec.bridges.text import windows
from qspec.models.load import load
from qspec.nn.eager.decoder import Decoder
from qspec.records import LoadedModel
from qspec.schema.quantization import ModelSpec
from qspec.speculation.engine import generate
from qspec.speculation.types import Sampling
from scripts.engines.convert_llama2c import (
    BOS,
    BYTES,
    STANDARD,
    config_of,
    convert,
    half_split,
    merges,
    read_model,
    read_pieces,
)

PIECES = [(" a", 0.0), ("ab", -1.0), ("bab", -2.0), (" ", -3.0), ("a", -4.0), ("b", -5.0)]


@pytest.fixture(scope="module")
def source(data_dir: Path) -> Path:
    folder = data_dir / "models/stories260K"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source / "stories260K.bin", source / "tok512.bin", tmp_path_factory.mktemp("model") / "stories")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(ModelSpec(model=str(folder)))


def encode(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """llama2.c's `encode`, step by step, with BOS."""
    ids = {piece: i + len(STANDARD) for i, (piece, _) in reversed(list(enumerate(pieces)))}
    names = {i: piece for piece, i in ids.items()}
    found = [BOS]
    for character in f" {text}" if text else "":
        found += [ids[character]] if character in ids else [byte + BYTES for byte in character.encode()]
    while True:
        joined = [names.get(a, "\0") + names.get(b, "\0") for a, b in pairwise(found)]
        scores = {i: pieces[ids[name] - len(STANDARD)][1] for i, name in enumerate(joined) if name in ids}
        if not scores:
            return found
        at = max(scores, key=lambda i: scores[i])  # the first of equals
        found[at : at + 2] = [ids[joined[at]]]


def test_greedy_text_of_256_steps(model: LoadedModel, source: Path) -> None:
    """Catches rows of q and k in the wrong order, a swapped gate, a wrong rotary base: other stories."""
    lm = Decoder.from_float(model)
    steps = generate(lm, None, None, [BOS], 256, Sampling(temperature=0), (), torch.Generator())
    expected = (source / "expected_greedy_256_steps.txt").read_text(encoding="utf-8")
    assert model.tokenizer.decode(list(steps.tokens)).strip() == expected.strip()


def test_logits_of_transformers(model: LoadedModel, folder: Path) -> None:
    """Catches a config that means another model to transformers than to qspec."""
    from transformers import AutoModelForCausalLM

    ids = windows("tinystories", 2, 128, model.tokenizer)[1]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    found = Decoder.from_float(model).forward(torch.tensor(ids))
    assert float((found - expected).abs().max()) < 1e-4  # float32 sums in another order, logits up to 20


def test_token_ids_of_llama2c(model: LoadedModel, source: Path, data_dir: Path) -> None:
    """Catches merges in another order, a lost first space, bytes that are not where llama2.c has them."""
    pieces = read_pieces(source / "tok512.bin")
    lines = (data_dir / "text/tinystories_train_first1097.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:600] for line in lines[::90]]
    for text in [*texts, "", " two  spaces ", "naïve\n\t模型 😀", "aaaa hhhhh"]:
        ids = model.tokenizer.encode(text)
        assert ids == encode(text, pieces)
        assert model.tokenizer.decode(ids) == text


def test_merges_are_ordered_by_score() -> None:
    """Catches a piece that can be made in one way only, or before a better one."""
    assert merges(PIECES) == [(" ", "a"), ("a", "b"), ("b", "ab")]


def test_rows_that_rotate_together() -> None:
    """Catches a reordering across heads: two heads of four rows each, pairs (0, 1) and (2, 3)."""
    rows = torch.arange(8.0).view(1, 8, 1)
    assert half_split(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """Catches a classifier that is left out where the vocabulary size is negative."""
    shape = (4, 6, 1, 2, 1, -8, 3)  # dim, hidden, layers, heads, KV heads, vocabulary, context
    body = 8 * 4 + 4 + 16 + 8 + 8 + 16 + 4 + 3 * 24 + 4 + 2 * 3 * 1 + 8 * 4
    (tmp_path / "m.bin").write_bytes(struct.pack(f"<7i{body}f", *shape, *range(body)))
    header, tensors = read_model(tmp_path / "m.bin")
    assert config_of(header)["tie_word_embeddings"] is False
    assert tensors["lm_head.weight"][-1, -1] == body - 1
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (2, 4)
