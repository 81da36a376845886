"""What a transformers folder means, against transformers' own models of the same config."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec.bridges.hf import (
    HFTokenizer,
    arch_from_config,
    clean_config,
    load_folder,
    load_tokenizer,
    open_tokenizer,
    read_config,
)
from qspec.bridges.layout import tensor_shapes
from qspec.bridges.tensors import SINGLE, LazyTensors, read_tensors, write_tensors
from qspec.errors import OutputError, SourceError
from tests.tiny import KINDS, TEXT, save_tokenizer, tiny_model

SAMPLE = "Größe 345 of the fox: naïve 模型!\n\n  Don't stop\tnow."
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: tiny_model(kind, root / kind) for kind in KINDS}


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**read_config(folder), **changes}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    """Would catch a missing bias, norm or head, and a wrong head size, for one of the model kinds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[kind])
    loaded = load_folder(folders[kind])
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert tensor_shapes(loaded.arch) == expected
    assert {name: tuple(t.shape) for name, t in loaded.tensors.items()} == expected
    assert all(torch.equal(loaded.tensors[name], p) for name, p in model.named_parameters())
    assert loaded.lm_head().shape == (300, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_switches_of_each_kind(folders: dict[str, Path], kind: str) -> None:
    """Would catch Gemma without its (1 + weight) norm or scaled embedding, Mistral without its window, and the like."""
    arch = arch_from_config(config_of(folders[kind]))
    gemma = kind == "gemma"
    assert (arch.norm_offset, arch.embed_scale) == ((1.0, 8.0) if gemma else (0.0, 1.0))
    assert arch.activation == ("gelu_tanh" if gemma else "silu")
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias) == (kind == "qwen2", False, False)
    assert arch.qk_norm == (kind == "qwen3")
    assert arch.sliding_window == (32 if kind == "mistral" else None)
    assert arch.tied == (kind in ("qwen2", "gemma"))
    assert (arch.n_heads, arch.n_kv_heads, arch.max_positions, arch.eos_ids) == (4, 2, 256, (2,))


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_are_those_of_transformers(folders: dict[str, Path], rope: str) -> None:
    """Would catch a scaling rule that is ignored: text stays fluent and long contexts break."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parameters = {"rope_type": rope, "rope_theta": 5000.0, **ROPES[rope]}
    config = config_of(folders["llama"], rope_parameters=parameters)
    typed = AutoConfig.for_model("llama", **{k: v for k, v in config.items() if k != "model_type"})
    rotary = AutoModelForCausalLM.from_config(typed).model.rotary_emb
    arch = arch_from_config(config)
    assert torch.equal(torch.tensor(arch.rope_inv_freq), rotary.inv_freq)
    assert arch.rope_factor == rotary.attention_scaling


def test_older_spelling_of_rotary_scaling_means_the_same(folders: dict[str, Path]) -> None:
    """Would catch `rope_scaling` and `rope_theta` of files from before transformers 5 being dropped."""
    new = config_of(folders["llama"], rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0})
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert arch_from_config(old) == arch_from_config(new)


def test_older_spelling_of_two_rotary_bases_means_the_same(tmp_path: Path) -> None:
    """Would catch `rope_local_base_freq` of Gemma 3 files on the Hub, or a numeric window pattern, dropped."""
    new = config_of(tiny_model("gemma3_text", tmp_path))
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 10000.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert arch_from_config(old) == arch_from_config(new)


def test_biases_are_read_from_the_config(folders: dict[str, Path], tmp_path: Path) -> None:
    """Would catch Llama variants whose biases are silently dropped."""
    loaded = load_folder(tiny_model("llama", tmp_path, attention_bias=True, mlp_bias=True))
    assert (loaded.arch.qkv_bias, loaded.arch.o_bias, loaded.arch.mlp_bias) == (True, True, True)
    assert "model.layers.1.self_attn.o_proj.bias" in loaded.tensors


def test_windows_are_kept(folders: dict[str, Path]) -> None:
    """Would catch a Qwen2 window that is lost or on the wrong layer; `max_window_layers` says where windows begin."""
    windowed = {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}
    uniform = arch_from_config(config_of(folders["qwen2"], **windowed, max_window_layers=0))
    assert (uniform.sliding_window, uniform.full_attention) == (16, ())
    mixed = arch_from_config(config_of(folders["qwen2"], **windowed, max_window_layers=1))
    assert [mixed.window(layer) for layer in mixed.layers] == [None, 16]


def test_switches_of_newer_kinds(tmp_path: Path) -> None:
    """Would catch post-norms, a window, a softcap, a rotary base or an expert count that a config gives and is lost."""
    gemma2, gemma3, phi3, mixtral, qwen3_moe = (
        arch_from_config(read_config(tiny_model(kind, tmp_path / kind)))
        for kind in ("gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe")
    )
    assert gemma2.post_norms
    assert (gemma2.attention_scale, gemma2.attention_softcap, gemma2.logit_softcap) == (20**-0.5, 2.0, 3.0)
    assert [gemma2.window(layer) for layer in gemma2.layers] == [16, None]
    assert (gemma3.qk_norm, gemma3.norm_offset, gemma3.attention_softcap) == (True, 1.0, None)
    assert gemma3.window_inv_freq[1] == pytest.approx(100 ** (-1 / 16))
    assert gemma3.rope_inv_freq[1] == pytest.approx(10000 ** (-1 / 16) / 4)
    assert len(phi3.rope_inv_freq) == 0.75 * phi3.head_dim / 2
    assert (mixtral.n_experts, mixtral.experts_per_token, mixtral.expert_size) == (4, 2, 128)
    assert mixtral.normed_routing
    assert (qwen3_moe.n_experts, qwen3_moe.expert_size, qwen3_moe.dense_layers) == (6, 32, (0,))
    assert qwen3_moe.routers() == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    assert len(qwen3_moe.linears()) == 3 * 4 + 3 + 2 * 6 * 3 + 1
    assert qwen3_moe.linear_shape("model.layers.1.mlp.experts.5.down_proj") == (64, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3'.*vision tower"),
        ({"model_type": "mamba"}, "'mamba'.*state-space"),
        ({"model_type": "qwen2_moe"}, "'qwen2_moe'.*every token"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5.*1 to"),
        (
            {"model_type": "gemma3_text", "rope_parameters": None, "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping.*ignores it",
        ),
        ({"model_type": "phi3", "rope_parameters": LONGROPE}, "'longrope'.*change with the text's length"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"model_type": "new_moe", "num_experts": 8}, "'new_moe'.*mixture of experts"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "'deepseek_v3'.*latent attention"),
        ({"model_type": "llava", "vision_config": {"depth": 2}}, "'llava'.*vision"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}, "'own'.*never run"),
        ({"model_type": "falcon"}, "'falcon'.*layer layout"),
        ({"model_type": None}, "does not name its model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'llama' quantized by 'gptq'"),
        ({"quantization_config": {"bits": 4}}, "quantized by 'unnamed'"),
        ({"rope_parameters": LONGROPE}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"num_key_value_heads": 3}, "multiple of KV heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers: must be given"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: must be given"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings 'many': must be 1 to"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    folders: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    """Would catch a model that is run as if it were a Llama, and a refusal that does not say why."""
    with pytest.raises(SourceError, match=message):
        arch_from_config(config_of(folders["llama"], **changes))


def test_config_is_clean(folders: dict[str, Path], tmp_path: Path) -> None:
    """Would catch code references or quantization state written into a new checkpoint, and Gemma's old `gelu`."""
    folder = tiny_model("gemma", tmp_path)
    edit(folder / "config.json", hidden_act="gelu", auto_map={"AutoModel": "x.Y"}, _name_or_path="elsewhere")
    loaded = load_folder(folder)
    assert loaded.arch.activation == "gelu_tanh"
    assert loaded.config == read_config(folders["gemma"])
    assert "quantization_config" not in clean_config({"quantization_config": {"quant_method": "gptq"}})


def test_stop_tokens_of_both_files_count(tmp_path: Path) -> None:
    """Would catch a chat model that runs past its end-of-turn token, which only generation_config.json names."""
    folder = tiny_model("llama", tmp_path)
    edit(folder / "generation_config.json", eos_token_id=[4, 2])
    loaded = load_folder(folder)
    assert (loaded.arch.eos_ids, loaded.config["eos_token_id"]) == ((2, 4), [2, 4])


def test_weights_stay_on_disk_and_origin_is_recorded(folders: dict[str, Path]) -> None:
    """Would catch a loader that reads a whole model into memory, and a result whose weights cannot be traced."""
    loaded = load_folder(folders["llama"], {"model": "org/name", "revision": "abc"})
    assert isinstance(loaded.tensors, LazyTensors)
    assert (loaded.source["model"], loaded.source["revision"]) == ("org/name", "abc")
    assert len(loaded.source["sha256"]) == 64


def tamper(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a folder (None deletes); `__` in a keyword stands for a dot."""
    tensors = {name: value.clone() for name, value in read_tensors(folder).items()}
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    write_tensors(folder / SINGLE, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "model.norm.weight.*needs this tensor"),
        ({"model__norm__weight": torch.ones(63)}, r"has shape \[63\], the config says \[64\]"),
        ({"model__layers__0__mlp__router__weight": torch.ones(2)}, "router.*is no part of a qwen2 model"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int8)}, "stored as I8.*already quantized"),
        ({"lm_head__weight": torch.ones(300, 64)}, "tie_word_embeddings is true"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    """Would catch a tensor that is skipped in silence: the model would run and answer worse."""
    folder = tiny_model("qwen2", tmp_path)
    tamper(folder, **changes)
    with pytest.raises(SourceError, match=message):
        load_folder(folder)


def test_repeated_tensors_of_old_files_are_dropped(tmp_path: Path) -> None:
    """Would catch a refusal of files that store a tied head twice, or the rotary buffer."""
    folder = tiny_model("qwen2", tmp_path)
    head = read_tensors(folder)["model.embed_tokens.weight"].clone()
    tamper(folder, lm_head__weight=head, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    loaded = load_folder(folder)
    assert "lm_head.weight" not in loaded.tensors
    assert torch.equal(loaded.lm_head(), head)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    """Would catch a traceback where a sentence belongs."""
    with pytest.raises(SourceError, match=r"no config\.json"):
        load_folder(tmp_path)
    folder = tiny_model("llama", tmp_path / "llama")
    edit(folder / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(SourceError, match="already quantized"):
        load_folder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(SourceError, match="must hold a JSON object"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match="is not JSON"):
        load_folder(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives_the_tokenizer(folders: dict[str, Path], kind: str) -> None:
    """Would catch spaces, digits or bytes lost on the way, and a start token that is added twice or never."""
    tokenizer = load_tokenizer(folders[kind])
    for text in (SAMPLE, TEXT, "", " ", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == [1, *tokenizer.encode(text, special=False)]
    assert max(tokenizer.encode(SAMPLE)) < 300
    assert set(tokenizer.vocabulary().values()) == set(range(300))


def test_chat_ends_with_the_generation_prompt(folders: dict[str, Path]) -> None:
    """Would catch a second start token in front of a chat, and a prompt that the model has already answered."""
    tokenizer = load_tokenizer(folders["llama"])
    ids = tokenizer.chat([{"role": "user", "content": "fox"}])
    assert ids == [1, 3, *tokenizer.encode("fox", special=False), 2, 4]


def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    """Would catch a base model that is evaluated on prompts in a made-up format."""
    folder = tiny_model("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(SourceError, match="no chat template"):
        load_tokenizer(folder).chat([{"role": "user", "content": "fox"}])


def without_template(tokenizer: HFTokenizer) -> None:
    tokenizer.inner.chat_template = None


def other_end(tokenizer: HFTokenizer) -> None:
    tokenizer.inner.eos_token = "<|user|>"


def added_token(tokenizer: HFTokenizer) -> None:
    tokenizer.inner.add_tokens(["<|new|>"])


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_survives_saving_and_use(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Would catch a pair that fails its own check because it was saved, or used, once."""
    tokenizer = load_tokenizer(folders[kind])
    first = tokenizer.fingerprint()
    tokenizer.inner("fox", truncation=True, max_length=2, padding="max_length")
    assert tokenizer.fingerprint() == first
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_bytes((folders[kind] / "config.json").read_bytes())
    assert load_tokenizer(tmp_path).fingerprint() == first


@pytest.mark.parametrize("change", [without_template, other_end, added_token])
def test_fingerprint_sees_every_change(folders: dict[str, Path], change: Any) -> None:
    """Would catch a draft with another template, end token or vocabulary taken for the target's twin."""
    tokenizer = load_tokenizer(folders["llama"])
    first = tokenizer.fingerprint()
    change(tokenizer)
    assert tokenizer.fingerprint() != first


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    """Would catch a request to the Hub for the tokenizer of a local folder, or the parser's own error."""
    folder = tiny_model("llama", tmp_path)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(SourceError, match="unreadable tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="holds no tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 0},
        {"num_key_value_heads": -1},
        {"vocab_size": -1},
        {"max_position_embeddings": 0},
        {"head_dim": 7},
        {"head_dim": -1},
        {"eos_token_id": "x"},
        {"eos_token_id": [[1]]},
        {"dtype": 5},
        {"dtype": "int8"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
    ],
    ids=str,
)
def test_impossible_configs_are_refused(folders: dict[str, Path], changes: dict[str, Any]) -> None:
    """Would catch sizes that fill the memory, and fields of another type, found deep inside a run or as a traceback."""
    with pytest.raises(SourceError):
        arch_from_config(config_of(folders["llama"], **changes))


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "{{ a.b.c }}", "{% if false %}x{% endif %}"]
)
def test_chat_templates_that_fail_are_refused_at_load(tmp_path: Path, template: str) -> None:
    """Would catch a template that ends the run at its first prompt, after all of quantization."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(SourceError, match="has a chat template that"):
        load_tokenizer(tmp_path)


def test_half_characters_are_no_text(folders: dict[str, Path]) -> None:
    """Would catch the tokenizer library's own TypeError for text that was decoded with `surrogateescape`."""
    tokenizer = load_tokenizer(folders["llama"])
    with pytest.raises(SourceError, match="no Unicode text"):
        tokenizer.encode("a \udcff b")
    with pytest.raises(SourceError, match="no Unicode text"):
        tokenizer.chat([{"role": "user", "content": "a \ud800 b"}])


def test_files_that_cannot_be_written_are_output_errors(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Would catch the writers' own errors (a full disk), which no caller expects, for weights and tokenizer."""
    for name in (SINGLE, "tokenizer.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        write_tensors(tmp_path / SINGLE, {"x": torch.ones(10)})
    with pytest.raises(OutputError, match="cannot be written"):
        load_tokenizer(folders["llama"]).save(tmp_path)


@pytest.mark.parametrize(("kind", "warned"), [("qwen2", False), ("llama", False), ("mistral", True)])
def test_advice_for_mistral_is_for_mistral(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, warned: bool
):
    """Would catch a warning of wrong ids, which are right, for each tokenizer of Qwen; or Mistral's own kept quiet."""
    from transformers import AutoTokenizer

    folder, name = tiny_model("llama", tmp_path / kind), "transformers.tokenization_utils_tokenizers"
    edit(folder / "config.json", model_type=kind)
    advice = "set the `fix_mistral_regex=True` flag"

    def load(*_: object, **__: object) -> None:
        logging.getLogger(name).warning(advice)
        raise ValueError("enough")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(SourceError, match="enough"):
        open_tokenizer(folder)
    assert (advice in caplog.text) == warned
    assert not logging.getLogger(name).filters
