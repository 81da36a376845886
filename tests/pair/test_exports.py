"""What serves which part, and the exact keys that vLLM reads."""

import ast
from dataclasses import replace
import importlib
import json
import shlex
from typing import get_args

import pytest

from qspec.bridges.vllm.heads import FOLDER_KEY
from qspec.pair.exports import exports, transformers_snippet, vllm_command, vllm_speculative_config
from qspec.records import ArchMap
from qspec.schema.devices import read_device
from qspec.schema.recipe import DraftLengthSpec, Recipe
from qspec.speculation.length.policies import POLICIES


def recipe(device: str = "h100", target: dict | None = None, draft: dict | None = None, **fields: object) -> Recipe:
    data = {
        "name": "t",
        "device": device,
        "target": {"model": "org/m", "quantization": target or {}},
        "draft": draft or {"kind": "self"},
        **fields,
    }
    return Recipe.model_validate(data)


def line(r: Recipe, runtime: str, part: str) -> tuple[bool, str]:
    (found,) = [s for s in exports(r, read_device(r.device)) if (s.runtime, s.part) == (runtime, part)]
    return found.served, found.detail


INT8_KV = {"kv": {"format": "int8", "granularity": "token_head"}}
FP8_KV = {"kv": {"format": "fp8_e4m3"}}


def test_int8_kv_is_a_serve_flag():
    """Would catch an INT8 kv_cache_scheme in config.json, which vLLM refuses to load."""
    served, detail = line(recipe(target=INT8_KV), "vllm", "kv")
    assert served
    assert "int8_per_token_head" in detail
    assert "not in config.json" in detail
    assert "--kv-cache-dtype int8_per_token_head" in vllm_command(recipe(target=INT8_KV))
    assert line(recipe("cpu", INT8_KV), "vllm", "kv")[0] is False


def test_ngram_becomes_vllm_s_method():
    """Would catch keys that vLLM rejects for prompt lookup."""
    config = vllm_speculative_config(recipe(draft={"kind": "ngram", "min_ngram": 2, "max_ngram": 4}))
    expected = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert config == expected


def test_draft_model_says_its_kv_dtype_and_quantization_aloud():
    """Would catch a draft that inherits the target's quantization or KV dtype in vLLM."""
    r = recipe(target=FP8_KV, speculation={"max_length": 64, "draft_length": {"k": 3}})
    assert vllm_speculative_config(r, "pair/draft") == {
        "method": "draft_model",
        "model": "pair/draft",
        "num_speculative_tokens": 3,
        "quantization": "compressed-tensors",
        "kv_cache_dtype": "auto",
    }
    plain = recipe(draft={"kind": "self", "quantization": {"scheme": "none"}})
    assert "quantization" not in vllm_speculative_config(plain)


def test_ada_drafts_keep_their_kv_dtype():
    """Would catch an FP8 draft KV cache exported for SM89, where vLLM has crashed with it."""
    draft = {"kind": "self", "quantization": FP8_KV}
    found = [vllm_speculative_config(recipe(d, FP8_KV, draft))["kv_cache_dtype"] for d in ("l40s", "rtx4090", "h100")]
    assert found == ["auto", "auto", "fp8"]


def test_mlp_speculators_are_served_by_the_plugin():
    """Would catch a method that vLLM no longer has, and a proposer that is not told where its head lies."""
    r = recipe(draft={"kind": "mlp_speculator", "model": "org/acc", "n_predict": 2})
    config = vllm_speculative_config(r)
    assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 2)
    module, _, name = config["model"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert line(r, "vllm", "draft")[0] is True
    words = shlex.split(vllm_command(r))
    assert json.loads(words[words.index("--additional-config") + 1]) == {FOLDER_KEY: "pair/draft"}


def test_eagle3_heads_are_served_by_their_method():
    """Would catch a method that vLLM guesses from the path, and a draft length that it has no default for."""
    r = recipe(draft={"kind": "eagle3", "model": "org/head", "lookup": "suffix"})
    config = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5}
    assert vllm_speculative_config(r) == config
    words = shlex.split(vllm_command(r))
    assert json.loads(words[words.index("--speculative-config") + 1]) == config | {"model": "pair/draft"}
    served, detail = line(r, "vllm", "draft")
    assert served
    assert "--speculative-algorithm EAGLE3 --speculative-num-steps 5" in detail
    assert "it drafts with the head alone, without lookup" in detail
    assert line(r, "transformers", "draft") == (False, "has no EAGLE-3 head")


def test_truncated_self_drafts_are_ordinary_checkpoints():
    """Would catch a claim that a layer-skipping draft needs a special runtime."""
    assert "ordinary checkpoint with 4 layers" in line(recipe(draft={"kind": "self", "layers": 4}), "vllm", "draft")[1]


def test_truncated_self_drafts_need_kernels_too():
    """Would catch an FP8 draft called servable on CPU because it has fewer layers."""
    draft = {"kind": "self", "layers": 4, "quantization": {"scheme": "FP8"}}
    served, detail = line(recipe("cpu", draft=draft), "vllm", "draft")
    assert not served
    assert "no usable FP8 matmul on CPU" in detail


@pytest.mark.parametrize(
    ("target", "draft", "served"),
    [(FP8_KV, FP8_KV, True), (FP8_KV, {}, False), ({}, {}, True), ({"scheme": "FP8"}, {}, True)],
)
def test_cpu_drafts_need_the_target_s_kv_dtype(target: dict, draft: dict, served: bool):
    """Would catch a pair called servable that aborts vLLM on CPU."""
    assert line(recipe("cpu", target, {"kind": "self", "quantization": draft}), "vllm", "draft")[0] is served


def test_fp8_weights_are_not_served_on_cpu():
    """Would catch a claim that vLLM on CPU runs FP8 matmuls."""
    assert line(recipe("cpu", {"scheme": "FP8_DYNAMIC"}), "vllm", "target")[0] is False
    assert line(recipe("h100", {"scheme": "FP8_DYNAMIC"}), "vllm", "target")[0] is True


def test_the_command_carries_valid_json():
    """Would catch a command line that a shell or vLLM cannot parse."""
    text = vllm_command(recipe(target=FP8_KV)).partition("--speculative-config ")[2]
    assert json.loads(text.strip("'"))["method"] == "draft_model"


@pytest.mark.parametrize("kind", ["self", "ngram", "mlp_speculator"])
def test_the_snippet_is_python(kind: str):
    """Would catch a snippet with a syntax error, or an assistant that samples (20 % slower)."""
    draft = {"kind": kind} | ({"model": "org/acc"} if kind == "mlp_speculator" else {})
    text = transformers_snippet(recipe(target={"scheme": "FP8"}, draft=draft), 90)
    ast.parse(text)
    assert ("do_sample = False" in text) is (kind == "self")
    assert "use_optimized_inference=True" in text


@pytest.mark.parametrize("half", ["target", "draft"])
def test_outliers_are_served_by_nobody_else(half: str):
    """Would catch dense + sparse weights offered to a runtime that drops the sparse part or cannot load them."""
    sparse = {"scheme": "W8A8", "outliers": {"share": 0.5}}
    kinds = {"target": recipe("cpu", sparse), "draft": recipe("cpu", draft={"kind": "self", "quantization": sparse})}
    for runtime, part in (("vllm", "dense + sparse"), ("transformers", "stops")):
        served, detail = line(kinds[half], runtime, half)
        assert not served
        assert part in detail


@pytest.mark.parametrize("half", ["target", "draft"])
def test_transforms_at_run_time_are_served_by_nobody_else(half: str):
    """Would catch a half with rotation.r4 offered to transformers, which ignores the transform without a word."""
    turned = {"scheme": "W8A8", "rotation": {"r4": True}}
    kinds = {"target": recipe("cpu", turned), "draft": recipe("cpu", draft={"kind": "self", "quantization": turned})}
    for runtime in ("vllm", "transformers"):
        served, detail = line(kinds[half], runtime, half)
        assert not served
        assert "rotation.r4" in detail
    folded = {"scheme": "W8A8", "rotation": {}}
    assert line(recipe("cpu", folded), "transformers", "target")[0]
    assert line(recipe("cpu", folded), "vllm", "target")[0]


def test_what_an_architecture_costs_in_transformers():
    """Would catch INT8 experts offered to transformers, and Gemma 2 run there without its soft-capping."""
    kind = ArchMap("x", "XForCausalLM", 2, 64, 128, 4, 2, 16, 300, 256, (1.0,) * 8)
    mixture, capped = replace(kind, n_experts=4), replace(kind, attention_softcap=50.0)
    for scheme, arch, served, part in (
        ("W8A8", mixture, False, "INT8 experts"),
        ("W4A16", mixture, True, "loads"),
        ("W8A8", capped, True, 'attn_implementation="eager"'),
    ):
        lines = exports(recipe("cpu", {"scheme": scheme}), read_device("cpu"), arch)
        found = next(x for x in lines if (x.runtime, x.part) == ("transformers", "target"))
        assert found.served == served
        assert part in found.detail


def test_a_quantized_head_is_told():
    """Would catch a head in codes that is promised like every other layer, or told of where it stays in float."""
    assert "lm_head" not in line(recipe("cpu"), "vllm", "target")[1]
    for rules in ([], [{"match": "lm_head", "scheme": "W8A8"}]):
        quantization = {"ignore": [], "rules": rules}
        both = recipe("cpu", quantization, {"kind": "self", "quantization": quantization})
        for half in ("target", "draft"):
            served, detail = line(both, "vllm", half)
            assert served
            assert "lm_head is quantized too" in detail


@pytest.mark.parametrize("half", ["target", "draft"])
@pytest.mark.parametrize(("scheme", "reason"), [("W4A8", "Arm"), ("W8A8", "refuses")])
def test_integer_products_in_groups_are_no_server_s(half: str, scheme: str, reason: str):
    """Would catch integers in groups under INT8 inputs offered to vLLM: it has them in 4 bits, on Arm CPUs only."""
    quantization = {"scheme": scheme, "group_size": 32}
    kinds = {
        "target": recipe("cpu", quantization),
        "draft": recipe("cpu", draft={"kind": "self", "quantization": quantization}),
    }
    served, detail = line(kinds[half], "vllm", half)
    assert not served
    assert reason in detail
    assert line(kinds[half], "transformers", half)[0]


def test_suffix_becomes_vllm_s_method():
    """Would catch keys that vLLM rejects for suffix decoding, a memory that it must not keep, a package left unsaid."""
    draft = {"kind": "suffix", "max_match": 20, "across_requests": False}
    assert vllm_speculative_config(recipe(draft=draft)) == {
        "method": "suffix",
        "num_speculative_tokens": 5,
        "suffix_decoding_max_tree_depth": 25,
        "suffix_decoding_max_cached_requests": 0,
    }
    served, detail = line(recipe(draft=draft), "vllm", "draft")
    assert served
    assert "arctic-inference" in detail
    assert line(recipe(draft=draft), "transformers", "draft")[0] is False


def test_batch_schedule_reaches_vllm():
    """Would catch a schedule that the server never hears, or hears with a method that does not know it."""
    speculation = {"draft_length": {"k": 3, "by_batch": [[1, 8, 3], [9, 64, 0]]}}
    head = {"kind": "mlp_speculator", "model": "org/acc", "lookup": "suffix", "n_predict": 2}
    detail = line(recipe(draft=head, speculation=speculation), "vllm", "draft")[1]
    assert "by_batch through the plugin" in detail
    assert "head alone, without lookup" in detail
    assert "fixed at 2, vLLM has no +2/-1" in detail
    for draft in ({"kind": "self"}, {"kind": "ngram"}, head):
        config = vllm_speculative_config(recipe(draft=draft, speculation=speculation))
        assert config["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 64, 0]]
    suffix = recipe(draft={"kind": "suffix"}, speculation=speculation)
    assert "num_speculative_tokens_per_batch_size" not in vllm_speculative_config(suffix)
    assert "by_batch is left out" in line(suffix, "vllm", "draft")[1]


def test_every_policy_is_known_to_recipes_and_exports():
    """Would catch a policy that a recipe cannot name, and one that vLLM drops without a word."""
    assert set(POLICIES) == set(get_args(DraftLengthSpec.model_fields["policy"].annotation))
    recipes = {policy: recipe(speculation={"draft_length": {"policy": policy}}) for policy in POLICIES}
    said = [policy for policy, r in recipes.items() if "draft length fixed at 5" in line(r, "vllm", "draft")[1]]
    assert said == [policy for policy in POLICIES if policy != "fixed"]


@pytest.mark.parametrize(
    ("policy", "part"), [("heuristic", "+2/-1"), ("confidence", "threshold"), ("optimal", "measured cost")]
)
def test_policies_that_vllm_lacks_are_said(policy: str, part: str):
    """Would catch a pair that promises its adaptive draft length on a server that drafts a fixed one."""
    r = recipe(speculation={"draft_length": {"policy": policy, "k": 4}}, draft={"kind": "self", "lookup": "ngram"})
    detail = line(r, "vllm", "draft")[1]
    assert part in detail
    assert "fixed at 4" in detail
    assert "without lookup" in detail
    snippet = transformers_snippet(r, None)
    assert ("assistant_confidence_threshold = 0.4" in snippet) is (policy == "confidence")
