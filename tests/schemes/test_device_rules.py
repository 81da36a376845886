"""What devices refuse, warn about, or should know, one rule at a time."""

from dataclasses import replace

import pytest

from qspec.errors import RecipeError
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.pair.drafters.registry import kind_of
from qspec.plan import KVScheme
from qspec.records import ArchMap
from qspec.schema.devices import read_device
from qspec.schema.drafts import MlpDraft, SelfDraft
from qspec.schema.quantization import KVSpec, ModelSpec, QuantSpec
from qspec.schema.recipe import Recipe
from qspec.scheme_table import MODIFIERS, SCHEMES, Modifier
from qspec.schemes.build import build_plan
from qspec.schemes.device_rules import PlanFinding, device_findings, modifier_findings, raise_refused
from qspec.schemes.exports import vllm_kv, vllm_weights

ARCH = ArchMap("qwen2", "Qwen2ForCausalLM", 1, 8, 8, 1, 1, 8, 8, 8, (1.0,) * 4, qkv_bias=True)


def said(device: str, scheme: str = "none", kv: KVScheme | None = None, dtype: str = "auto") -> list[tuple[str, str]]:
    found = device_findings(read_device(device), {"l": SCHEMES[scheme].layer()}, kv, dtype, ARCH)
    return [(finding.level, str(finding)) for finding in found]


@pytest.mark.parametrize(
    ("device", "scheme", "dtype", "level", "part"),
    [
        ("b200", "W8A8", "auto", "refused", "SM75 to SM90"),
        ("a100", "FP8", "auto", "warning", "16-bit inputs"),
        ("a100", "FP8_DYNAMIC", "auto", "warning", "use scheme: W8A8"),
        ("a100", "FP8_BLOCK", "auto", "warning", "W8A16"),
        ("l40s", "FP8_BLOCK", "auto", "refused", "FP8_DYNAMIC or W8A8"),
        ("rtx4090", "FP8_BLOCK", "auto", "refused", "slower there"),
        ("h100", "FP8_BLOCK", "float16", "refused", "bfloat16 only"),
        ("h100", "FP8", "float16", "warning", "lose bits"),
        ("b200", "FP8", "auto", "note", "prefill"),
        ("rtx4090", "FP8_DYNAMIC", "auto", "note", "INT8 has twice"),
        ("cpu", "FP8", "auto", "note", "no FP8 matmul"),
        ("cpu", "W4A8", "auto", "note", "Arm CPUs"),
        ("h100", "W4A8", "auto", "refused", "Arm CPUs"),
    ],
)
def test_scheme_rules(device: str, scheme: str, dtype: str, level: str, part: str):
    """Would catch a rule that no longer fires, or fires at another level."""
    assert [text for lev, text in said(device, scheme, None, dtype) if lev == level and part in text]


@pytest.mark.parametrize(
    ("device", "level", "fix"),
    [("cpu", "note", " to serve it elsewhere"), ("h100", "refused", ", or set device: cpu")],
)
def test_8_bits_in_groups_run_here_alone(device: str, level: str, fix: str):
    """Would catch a checkpoint made for a server that stops at its groups."""
    scheme = build_plan(QuantSpec(group_size=32)).default
    (found,) = device_findings(read_device(device), {"l": scheme}, None)
    assert (found.level, found.fix) == (level, f"leave group_size out{fix}")


@pytest.mark.parametrize(
    ("device", "scheme"),
    [("cpu", "W8A8"), ("a100", "W8A8"), ("h20", "W8A8"), ("h100", "FP8_BLOCK"), ("l40s", "FP8"), ("b200", "W4A16")],
)
def test_what_runs_is_not_remarked(device: str, scheme: str):
    """Would catch a refusal or a warning where the device runs the scheme well."""
    assert said(device, scheme) == []


@pytest.mark.parametrize(
    ("device", "kv", "level", "part"),
    [
        ("a100", KVScheme(FP8_E4M3, "tensor"), "warning", "--attention-backend FLASHINFER"),
        ("a100", KVScheme(FP8_E4M3, "token_head"), "refused", "Triton is the first kernel that does, from SM89 on"),
        ("a100", KVScheme(FP8_E4M3, "head"), "refused", "FlashAttention is the first kernel that does, from SM90 on"),
        ("l40s", KVScheme(FP8_E4M3, "head"), "refused", "FlashAttention is the first kernel that does, from SM90 on"),
        ("h100", KVScheme(FP8_E4M3, "tensor"), "warning", "key biases"),
        ("cpu", KVScheme(INT8, "token_head"), "warning", "garbage"),
    ],
)
def test_kv_rules(device: str, kv: KVScheme, level: str, part: str):
    """Would catch a KV format that corrupts output on its device without a word."""
    assert [text for lev, text in said(device, "none", kv) if lev == level and part in text]


@pytest.mark.parametrize(
    ("device", "kv", "served"),
    [
        ("a100", KVScheme(FP8_E4M3, "tensor"), True),
        ("a100", KVScheme(FP8_E4M3, "token_head"), False),
        ("a100", KVScheme(INT8, "token_head"), True),
        ("l40s", KVScheme(FP8_E4M3, "head"), False),
        ("l40s", KVScheme(FP8_E4M3, "token_head"), True),
        ("h100", KVScheme(FP8_E4M3, "head"), True),
        ("cpu", KVScheme(FP8_E4M3, "head"), True),
    ],
)
def test_a_cache_that_no_kernel_reads_is_not_served(device: str, kv: KVScheme, served: bool):
    """Would catch a manifest that promises a server which stops at the format of its cache."""
    assert vllm_kv(kv, read_device(device)).served == served
    refused = [level for level, _ in said(device, "none", kv) if level == "refused"]
    assert refused == ([] if served else ["refused"])


def test_turing_reads_no_fp8_cache():
    """Would catch an FP8 cache approved for devices that vLLM has no kernel for; their FP8 weights run as W8A16."""
    turing = read_device("a100").model_copy(update={"capability": 75})
    found = list(device_findings(turing, {"l": SCHEMES["FP8"].layer()}, KVScheme(FP8_E4M3, "tensor")))
    assert [finding.level for finding in found] == ["warning", "refused"]


def test_fp8_weights_before_ada_are_served_with_16_bit_inputs():
    """Would catch an export that promises the arithmetic which was measured, where a server has another."""
    details = [vllm_weights(QuantSpec(scheme="FP8"), read_device(name), "target")[1] for name in ("a100", "l40s")]
    assert ["W8A16" in detail for detail in details] == [True, False]


def test_key_bias_warning_is_for_models_that_have_one():
    """Would catch the Qwen2 warning on every model."""
    found = device_findings(
        read_device("h100"), {}, KVScheme(FP8_E4M3, "tensor"), "auto", replace(ARCH, qkv_bias=False)
    )
    assert list(found) == []


def test_first_refusal_is_raised_with_its_three_parts():
    """Would catch notes that stop a job, or a refusal that loses its fix on the way."""
    findings = [*device_findings(read_device("cpu"), {"l": SCHEMES["FP8"].layer()}, None)]
    raise_refused(findings)
    findings += device_findings(read_device("b200"), {"l": SCHEMES["W8A8"].layer()}, None)
    with pytest.raises(RecipeError) as caught:
        raise_refused(findings)
    assert (caught.value.value, caught.value.fix) == ("W8A8 on b200 (SM100)", "use scheme: FP8_DYNAMIC")


def test_all_refusals_come_at_once():
    """Would catch a second refusal that shows only after the first was mended, one a run."""
    findings = [*device_findings(read_device("b200"), {"l": SCHEMES["W8A8"].layer()}, None)]
    findings += device_findings(read_device("l40s"), {"l": SCHEMES["FP8_BLOCK"].layer()}, KVScheme(INT4, "token_head"))
    with pytest.raises(RecipeError) as caught:
        raise_refused([*findings, *findings])
    assert len(str(caught.value).splitlines()) == 3
    assert "block FP8 has no kernel of its own on Ada" in str(caught.value)


def recipe(device: str, target: KVSpec | None, draft: KVSpec | None) -> Recipe:
    model = ModelSpec(model="org/m", quantization=QuantSpec(kv=target))
    return Recipe(name="t", device=device, target=model, draft=SelfDraft(kind="self", quantization=QuantSpec(kv=draft)))


def pair_findings(device: str, job: Recipe) -> list[PlanFinding]:
    """Remarks of a recipe's kind of draft about both halves."""
    return list(kind_of(job.draft).findings(read_device(device), job))


def test_unequal_kv_formats_are_told_on_cpu():
    """Would catch a pair that aborts vLLM on CPU: FP8 KV in one half only."""
    (finding,) = pair_findings("cpu", recipe("cpu", KVSpec(), None))
    assert finding.level == "warning"
    assert "aborts" in finding.rule
    assert pair_findings("cpu", recipe("cpu", KVSpec(), KVSpec())) == []


def test_fp8_draft_kv_is_told_on_ada():
    """Would catch an FP8 draft KV cache exported for SM89, where vLLM has crashed with it."""
    (finding,) = pair_findings("l40s", recipe("l40s", KVSpec(), KVSpec()))
    assert "auto" in finding.fix


def test_mlp_speculators_need_the_plugin():
    """Would catch a pair that is made for a server and that none serves, without a word."""
    mlp = recipe("h100", None, None).model_copy(update={"draft": MlpDraft(kind="mlp_speculator", model="org/acc")})
    (finding,) = pair_findings("h100", mlp)
    assert finding.level == "note"
    assert "plugin" in finding.rule


MODIFIED = {
    "W8A8 in groups": {"scheme": "W8A8", "group_size": 32},
    "outliers": {"scheme": "W8A8", "outliers": {"share": 0.5}},
    "rotation.r4": {"scheme": "W8A8", "rotation": {"r4": True}},
}


@pytest.mark.parametrize("half", ["target", "draft"])
@pytest.mark.parametrize("modifier", MODIFIERS, ids=lambda modifier: modifier.name)
def test_what_no_server_runs_is_told_and_refused_on_gpus(half: str, modifier: Modifier):
    """Would catch a pair for a GPU that nothing there runs, or scores that transformers computes wrongly."""
    spec = {"target": {"model": "m"}, "draft": {"kind": "self"}, "name": "t"}
    spec[half] = {**spec[half], "quantization": MODIFIED[modifier.name]}
    made = Recipe.model_validate(spec)
    for device, level in (("cpu", "note"), ("h100", "refused")):
        (found,) = modifier_findings(read_device(device), made)
        assert (found.level, found.rule) == (level, modifier.rule)
        assert found.value.startswith(f"{modifier.name} on {device}")
    made = Recipe.model_validate({**spec, "evaluation": {"tasks": [{"backends": ["hf"]}]}})
    levels = [finding.level for finding in modifier_findings(read_device("cpu"), made)]
    assert levels == ["note", "refused"][: 1 + (half == "target" and modifier.transformers is not None)]
