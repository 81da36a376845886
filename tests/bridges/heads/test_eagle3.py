"""EAGLE-3 heads on disk, in both formats, against a plain reference and against the library speculators."""

from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges.heads import eagle3
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import PairError, SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eagle3 import Eagle3, Eagle3Shape, HeadCache
from qspec.nn.mlp_speculator import swap_linears
from qspec.records import ArchMap
from tests.nn.test_eagle3 import FLAGS, IDS_D, LENGTH, SHAPE, Reference, a_head, chain, inputs

TARGET = ArchMap("llama", "LlamaForCausalLM", 3, 32, 48, 4, 2, 8, 40, 128, (1.0,))
EMBEDDING, OUTPUT = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(5))
FORMATS = ("native", "speculators")
STORED: list[dict[str, Any]] = [
    {},
    *({flag: True} for flag in FLAGS),
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    {"draft_vocab": 0, "n_layers": 2},
    {"window": 4, "rope_theta": 1e6, "norm_eps": 1e-6},
    {"target_hidden": 24, "own_embedding": True, "taps": (1,)},
]


def head_of(changes: dict[str, Any]) -> Eagle3:
    head = a_head(replace(SHAPE, **changes))
    if head.rows_VH is not None:
        head.rows_VH = EMBEDDING
    return head


def read(folder: Path, shape: Eagle3Shape = SHAPE, **options: Any) -> Eagle3:
    return eagle3.read(folder, replace(TARGET, hidden_size=shape.target_hidden), EMBEDDING, OUTPUT, **options)


def stored(folder: Path, form: eagle3.Format = "native", **changes: Any) -> Eagle3:
    """A head of random weights, written to a folder."""
    head = head_of(changes)
    target = replace(TARGET, hidden_size=head.shape.target_hidden)
    eagle3.write(head, folder, target, {"seed": 3}, form, "org/target")
    return head


def reconfigure(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None takes one away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def restore(folder: Path, **tensors: Tensor | None) -> None:
    """Change stored tensors, `__` in place of dots; None takes one away."""
    changed = dict(read_tensors(folder)) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", {name: x for name, x in changed.items() if x is not None})


def same_chains(head: Eagle3, other: Eagle3) -> None:
    """Sums of float32 may differ in their last bits by where tensors lie."""
    given = inputs(head.shape)
    for mine, its in zip(chain(head, *given, 3), chain(other, *given, 3), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("changes", STORED, ids=str)
def test_a_head_reads_back_as_it_was_written(tmp_path, changes, form):
    """Would catch a switch that is not stored or read at another place, other names, and maps of other ids."""
    head = stored(tmp_path, form, **changes)
    back = read(tmp_path, head.shape)
    assert back.shape == head.shape
    assert eagle3.read_config(tmp_path)["qspec"] == {"seed": 3}
    assert back.ids_D is None or torch.equal(back.ids_D, IDS_D)
    assert back.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in back.state_dict().items())
    same_chains(back, head)


def test_names_are_those_of_the_formats(tmp_path):
    """Would catch names that vLLM and speculators do not look for."""
    for form, layer in (("native", "midlayer"), ("speculators", "layers.0")):
        stored(tmp_path / form, form, norm_before_fc=True)
        parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "hidden_norm", "input_layernorm")
        names = {f"{layer}.{part}.weight" for part in parts} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t"}
        assert names | {"t2d", "input_norm.weight"} <= read_tensors(tmp_path / form).keys()
    tensors, config = read_tensors(tmp_path / "native"), json.loads((tmp_path / "native/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert torch.equal(tensors["d2t"] + torch.arange(12), IDS_D)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == IDS_D.tolist()
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 64)


def test_int8_heads_keep_their_codes(tmp_path):
    """Would catch codes without scales, codes that are rounded again, and layers that vLLM is not told of."""
    head = head_of({})
    swap_linears(head, lambda linear: linear if linear is head.lm_head else Int8Map.rounded(linear.weight))
    eagle3.write(head, tmp_path, TARGET)
    back = read(tmp_path)
    assert isinstance(back.fc, Int8Map)
    assert torch.equal(back.fc.weight.codes, head.fc.weight.codes)
    assert not isinstance(back.lm_head, Int8Map)
    same_chains(back, head)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert len(config["ignore"]) == 1
    assert "lm_head" in config["ignore"][0]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_absent_has_the_defaults_of_its_format(tmp_path, form):
    """Would catch a default taken from the other format, or from the target: theta 10000, layers 2, L / 2 and L - 3."""
    library = form == "speculators"
    stored(tmp_path, form, draft_vocab=0, rope_theta=10000.0)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"] if library else config
    for name in ("rope_theta", "num_hidden_layers"):
        del layer[name]
    absent = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config", "target_hidden_size"]
    for name in (*absent, "eagle_aux_hidden_state_layer_ids"):
        config.pop(name, None)
    config["draft_vocab_size"] = 40  # absent it is 32000 to speculators, more than there are here
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = replace(TARGET, n_layers=12)
    shape = eagle3.read_shape(tmp_path, target)
    assert shape == replace(SHAPE, draft_vocab=0, taps=(2, 6, 9), norm_before_residual=library)
    assert eagle3.read_shape(tmp_path, target, taps=[9, 1, 4]).taps == (1, 4, 9)
    if not library:
        reconfigure(tmp_path, draft_vocab_size=None)
        assert eagle3.read_shape(tmp_path, target).draft_vocab == 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {"rope_theta": 5e5, "type": "default"}},
    ],
    ids=str,
)
def test_rotations_are_flat_or_nested(tmp_path, rope):
    """Would catch a nested theta that is not seen, and 10000 in its place."""
    stored(tmp_path)
    reconfigure(tmp_path, **{"rope_theta": None, **rope})
    assert eagle3.read_shape(tmp_path, TARGET) == replace(SHAPE, rope_theta=5e5)


def test_scaled_rotations_survive(tmp_path):
    """Would catch frequencies without their scaling, after reading or after writing again."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    stored(tmp_path)
    reconfigure(tmp_path, rope_scaling=scaling)
    head = read(tmp_path)
    assert head.shape.rope_inv_freq[0] == 1.0
    assert head.shape.rope_inv_freq[-1] < 0.5 * float(SHAPE.inv_freq[-1])
    eagle3.write(head, tmp_path / "again", TARGET)
    assert read(tmp_path / "again").shape == head.shape


def test_rows_that_are_not_stored_are_the_targets(tmp_path):
    """Would catch a head without output rows that runs with none, or an embedding of its own that is not read."""
    stored(tmp_path, draft_vocab=0)
    restore(tmp_path, lm_head__weight=None)
    assert torch.equal(read(tmp_path).lm_head.weight, OUTPUT)
    head = stored(tmp_path, own_embedding=True)
    assert torch.equal(read(tmp_path).embed(torch.arange(40)), head.embed(torch.arange(40)))


def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path):
    """Would catch a pair that stores the target's largest matrix again, as libraries write heads."""
    stored(tmp_path, own_embedding=True)
    restore(tmp_path, embed_tokens__weight=EMBEDDING.bfloat16())
    head = eagle3.read(tmp_path, TARGET, EMBEDDING.bfloat16(), OUTPUT)
    assert not head.shape.own_embedding
    assert torch.equal(head.embed(torch.arange(40)), EMBEDDING.bfloat16().float())
    assert read(tmp_path).shape.own_embedding


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"),
    ({"speculators_model_type": "dflash"}, "no EAGLE-3 head"),
    ({"parallel_drafting": True}, "vLLM alone"),
    ({"norm_before_fc": True}, r"must be true or false, and the same"),
    ({"norm_before_fc": True, "eagle_config": None}, "norm_before_fc: is true, but input_norm.weight is not stored"),
    ({"fc_norm": True, "norm_before_fc": True, "eagle_config": None}, "two ways to norm"),
    ({"norm_output": "yes"}, "must be true or false"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: is switched off"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "are both"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "must be layers 0 to 3 of the target"),
    ({"rope_parameters": {"rope_theta": 77.0}}, "rope_theta: is both 77.0 and 10000.0"),
    ({"draft_vocab_size": 11}, "has shape|marks 12 ids"),
    ({"draft_vocab_size": 41}, "draft_vocab_size 41: must be 1 to 40"),
    ({"hidden_act": "gelu"}, "silu|activation|hidden_act"),
    ({"attention_bias": True}, "without biases"),
    ({"num_hidden_layers": 2}, r"layers.1\S* is missing|is missing"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "differ from layer to layer"),
    ({"hidden_size": 2**40}, "hidden_size"),
]


@pytest.mark.parametrize(("fields", "part"), BAD_CONFIGS, ids=lambda x: str(x)[:50])
def test_contradictions_are_refused(tmp_path, fields, part):
    """Would catch a head that runs, and drafts nonsense, where its config.json contradicts itself or its tensors."""
    stored(tmp_path)
    reconfigure(tmp_path, **fields)
    with pytest.raises(SourceError, match=part) as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


def test_heads_of_other_targets_are_refused(tmp_path):
    """Would catch a head that reads states of another width, of layers that are not there, or of other ids."""
    stored(tmp_path)
    for target, part in (
        (replace(TARGET, hidden_size=64), "target_hidden_size 32"),
        (replace(TARGET, vocab_size=41), "vocab_size 40: the target has 41"),
    ):
        with pytest.raises(PairError, match=part):
            eagle3.read_shape(tmp_path, target)
    reconfigure(tmp_path, target_hidden_size=None)
    with pytest.raises(PairError, match="reads 96 numbers, 3 layers of the target have 192"):
        eagle3.read_shape(tmp_path, replace(TARGET, hidden_size=64))
    with pytest.raises(PairError, match="reads 96 numbers, 2 layers"):
        eagle3.read_shape(tmp_path, TARGET, taps=[1, 2])
    reconfigure(tmp_path, eagle_config=None)
    with pytest.raises(SourceError, match=r"\[2, 1, -1\]: must be layers 0 to 2 of the target.*taps"):
        eagle3.read_shape(tmp_path, replace(TARGET, n_layers=2))


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"d2t": torch.full((12,), 30)}, "d2t: reaches from 30 to 41, ids are 0 to 39"),
        ({"d2t": -torch.arange(1, 13)}, "d2t: reaches from -1"),
        ({"d2t": (IDS_D - torch.arange(12)).flip(0), "t2d": None}, "d2t: must rise"),
        ({"d2t": IDS_D - torch.arange(12) + 1}, "ids that t2d does not mark"),
        ({"d2t": torch.zeros(11, dtype=torch.long)}, "d2t: has shape"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "t2d: marks 40 ids"),
        ({"d2t": None, "t2d": None}, "d2t: is missing"),
        ({"lm_head__weight": None}, "other rows than the 12"),
        ({"fc__weight": None}, "fc.weight: is missing"),
        ({"norm__weight": torch.ones(31)}, "norm.weight: has shape"),
        ({"midlayer__self_attn__q_norm__weight": torch.ones(16)}, "belongs to no part of the head"),
        ({"midlayer__self_attn__q_proj__weight": torch.ones(64, 64, dtype=torch.int8)}, "is torch.int8 in place of"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_damaged_tensors_are_refused(tmp_path, tensors, part):
    """Would catch drafts of other ids than the head has learned, or rows read outside of the vocabulary."""
    stored(tmp_path)
    restore(tmp_path, **tensors)
    with pytest.raises(SourceError, match=part):
        read(tmp_path)


def test_maps_may_be_one_of_two(tmp_path):
    """Would catch a head refused for a map that follows from the other, or that says nothing."""
    stored(tmp_path / "a")
    restore(tmp_path / "a", d2t=None)
    assert torch.equal(read(tmp_path / "a").ids_D, IDS_D)
    stored(tmp_path / "b", draft_vocab=0)
    restore(tmp_path / "b", d2t=torch.zeros(40, dtype=torch.long), t2d=torch.ones(40, dtype=torch.bool))
    assert read(tmp_path / "b").ids_D is None


def test_pickles_are_refused_with_the_way_out(tmp_path):
    """Would catch a pickle that is loaded, or a refusal that leaves its owner without a next step."""
    stored(tmp_path)
    torch.save(dict(read_tensors(tmp_path)), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"never read as weights.*weights_only=True"):
        read(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_stored_heads_equal_the_reference(tmp_path, form):
    """Would catch formats that agree with each other alone: the reference reads the tensors by the papers' names."""
    head = stored(tmp_path, form, norm_before_residual=True, norm_output=True)
    tensors = {name.replace("midlayer", "layers.0"): x for name, x in read_tensors(tmp_path).items()}
    given, reference = inputs(), Reference(tensors, head.shape, EMBEDDING)
    for got, want in zip(chain(read(tmp_path), *given, 3), reference.chain(*given, 3), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


LIBRARY: list[dict[str, Any]] = [
    {},
    *({flag: True} for flag in FLAGS if flag != "own_embedding"),
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    {"n_layers": 2, "rope_theta": 5e5},
    {"window": 4},
]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_heads_that_the_library_writes_are_read(tmp_path, kind):
    """Would catch nested rotations, empty fields and class names as the library writes them."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="needs the library speculators")
    stored(tmp_path / "ours", "speculators", own_embedding=True, qk_norm=kind == "qwen3", norm_output=True)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    fields = {name: value for name, value in config.items() if name not in ("qspec", "torch_dtype", "architectures")}
    fields["transformer_layer_config"]["_attn_implementation"] = "eager"
    model = core.Eagle3DraftModel(core.Eagle3SpeculatorConfig(**fields)).float()
    model.load_state_dict(dict(read_tensors(tmp_path / "ours")), strict=False)
    model.save_pretrained(tmp_path / "library")
    assert "rope_theta" not in json.loads((tmp_path / "library/config.json").read_text())["transformer_layer_config"]
    mine, its = read(tmp_path / "ours"), read(tmp_path / "library")
    assert mine.shape == its.shape
    assert all(torch.equal(tensor, its.state_dict()[name]) for name, tensor in mine.state_dict().items())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("changes", LIBRARY, ids=str)
def test_chains_equal_those_of_the_library(tmp_path, changes, form, monkeypatch):
    """Would catch another forward pass than that of the library that trains such heads: three chained steps."""
    core = pytest.importorskip("speculators.models.eagle3.core", reason="needs the library speculators")
    own = stored(tmp_path / form, form, **changes, own_embedding=True)
    back = read(tmp_path / form, own.shape)
    eagle3.write(back, tmp_path / "library", TARGET, form="speculators", verifier="org/target")
    config = json.loads((tmp_path / "library/config.json").read_text())
    fields = {name: value for name, value in config.items() if name not in ("qspec", "torch_dtype", "architectures")}
    fields["transformer_layer_config"]["_attn_implementation"] = "eager"
    model = core.Eagle3DraftModel(core.Eagle3SpeculatorConfig(**fields)).float().eval()
    lacking = model.load_state_dict(dict(read_tensors(tmp_path / "library")), strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= {"verifier_lm_head.weight", "verifier_norm.weight"}
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, given, out: logits.append(out[0]))
    (states_TS, _), tokens_T = (
        inputs(own.shape),
        torch.randint(40, (LENGTH,), generator=torch.Generator().manual_seed(7)),
    )
    with torch.no_grad():
        model(states_TS[None], tokens_T[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)
    assert len(logits) == 3
    for last in (3, 5, LENGTH - 3):  # the row whose chain is followed, over true tokens as in training
        cache, f_TH = HeadCache(back.shape), back.fuse(states_TS[: last + 1])
        for step in range(1 if own.shape.window else 3):  # the library's window does not move with drafts
            rows_T = torch.arange(last + 1) if step == 0 else torch.tensor([last + step])
            y_TH = back.run(f_TH, tokens_T[rows_T], rows_T, cache)
            torch.testing.assert_close(back.logits(y_TH[-1]), logits[step][last], atol=1e-4, rtol=1e-4)
            f_TH = back.feed(y_TH[-1:])
