"""Scheme names to formats, and the rules of fused groups, groups and tiles."""

from dataclasses import replace

import pytest

from qspec.errors import RecipeError
from qspec.numerics.quantization.blocks import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import INT8
from qspec.plan import TensorScheme
from qspec.quantization.units import candidate_schemes
from qspec.records import ArchMap
from qspec.schema.quantization import ClipSpec, KVSpec, MixedSpec, QuantSpec, RuleSpec, SmoothingSpec
from qspec.scheme_table import IN_GROUPS, SCHEMES
from qspec.schemes.build import build_plan, needs_statistics, resolve_plan, scheme_label, validate_plan

ARCH = ArchMap(
    model_type="llama",
    architecture="LlamaForCausalLM",
    n_layers=2,
    hidden_size=256,
    intermediate_size=384,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    vocab_size=512,
    max_positions=128,
    rope_inv_freq=(1.0,) * 32,
)


@pytest.mark.parametrize(
    ("name", "weight", "activation"),
    [
        ("W8A8", ("int8", PerChannel(), False), ("int8", PerToken(), True)),
        ("FP8", ("fp8_e4m3", PerTensor(), False), ("fp8_e4m3", PerTensor(), False)),
        ("FP8_DYNAMIC", ("fp8_e4m3", PerChannel(), False), ("fp8_e4m3", PerToken(), True)),
        ("FP8_BLOCK", ("fp8_e4m3", PerBlock(128, 128), False), ("fp8_e4m3", PerGroup(128), True)),
        ("W4A16", ("int4", PerGroup(64), False), None),
        ("W4A8", ("int4", PerGroup(64), False), ("int8", PerToken(), True)),
    ],
)
def test_schemes_are_the_presets_of_that_name(name: str, weight: tuple, activation: tuple | None):
    """Would catch a scheme name that means something else here than in compressed-tensors and vLLM."""
    scheme = SCHEMES[name].layer(64)
    assert (scheme.weight.fmt.name, scheme.weight.granularity, scheme.weight.dynamic) == weight
    found = scheme.activation and (scheme.activation.fmt.name, scheme.activation.granularity, scheme.activation.dynamic)
    assert found == activation


def test_zero_points_are_for_4_bit_weights_alone():
    """Would catch zero points that INT8 rows get too, and a recipe that asks for them where nothing has any."""
    mixed = QuantSpec(scheme="W4A8", symmetric=False, rules=(RuleSpec(match="down_proj", scheme="W8A8"),))
    plan = build_plan(mixed)
    assert [s.weight.symmetric for s in (plan.default, plan.rules[-1].scheme) if s is not None] == [False, True]
    assert scheme_label(plan.default) == "W4A8 g128 asymmetric"
    with pytest.raises(ValueError, match="symmetric: false is for 4-bit weights"):
        QuantSpec(scheme="W8A8", symmetric=False)
    with pytest.raises(ValueError, match="mixed weighs symmetric schemes"):
        QuantSpec(symmetric=False, mixed=MixedSpec(bits=6))


def test_ignore_rules_clip_and_kv_reach_the_plan():
    """Would catch a recipe field that the plan drops."""
    spec = QuantSpec(
        clip=ClipSpec(method="percentile", percentile=99.0),
        rules=(RuleSpec(match="down_proj", scheme="W4A16", group_size=32),),
        kv=KVSpec(granularity="head", scales="cast"),
    )
    plan = build_plan(spec)
    schemes = resolve_plan(plan, ARCH)
    assert schemes["lm_head"] is None
    assert scheme_label(schemes["model.layers.1.mlp.down_proj"]) == "W4A16 g32 percentile"
    assert scheme_label(schemes["model.layers.1.mlp.up_proj"]) == "W8A8 percentile"
    assert schemes["model.layers.0.mlp.up_proj"].weight.clip.percentile == 99.0
    assert (plan.kv.fmt.name, plan.kv.granularity, plan.kv.scales) == ("fp8_e4m3", "head", "cast")


def test_8_bits_are_in_groups_where_a_size_stands_beside_them():
    """Would catch a size that inputs do not get too, or that a rule's or a candidate's W8A8 takes from its recipe."""
    by_rule = (RuleSpec(match="o_proj", scheme="W8A8", group_size=64), RuleSpec(match="down_proj", scheme="W8A8"))
    plan = build_plan(QuantSpec(scheme="W8A8", group_size=32, rules=by_rule))
    schemes = [rule.scheme for rule in plan.rules[-2:]] + [plan.default]
    assert [scheme_label(scheme) for scheme in schemes] == ["W8A8 g64", "W8A8", "W8A8 g32"]
    assert plan.default.activation == TensorScheme(INT8, PerGroup(32), dynamic=True)
    solved = QuantSpec(group_size=32, mixed=MixedSpec(bits=6))
    assert list(map(scheme_label, candidate_schemes(solved).values())) == ["W4A16 g32", "W8A8", "none"]
    assert [IN_GROUPS in spec.modifiers for spec in (solved, QuantSpec(rules=by_rule), QuantSpec(group_size=32))] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "gate_proj"])
def test_a_fused_group_has_one_scheme(part: str):
    """Would catch mixed schemes inside a merged matmul, which servers refuse at load."""
    spec = QuantSpec(rules=(RuleSpec(match=part, scheme="none"),))
    with pytest.raises(RecipeError, match="merge these layers"):
        resolve_plan(build_plan(spec), ARCH)


def test_a_fused_group_has_one_group_size():
    """Would catch members that share a scheme's name and not its group size."""
    spec = QuantSpec(scheme="W4A16", group_size=64, rules=(RuleSpec(match="k_proj", scheme="W4A16", group_size=32),))
    with pytest.raises(RecipeError, match=r"W4A16 g64 and W4A16 g32"):
        resolve_plan(build_plan(spec), ARCH)


def test_whole_groups_may_differ():
    """Would catch a refusal of a legal mixed plan: gate and up together, layers apart."""
    spec = QuantSpec(rules=(RuleSpec(match=r"re:.*layers\.0\.mlp\.(gate|up)_proj", scheme="FP8_DYNAMIC"),))
    schemes = resolve_plan(build_plan(spec), ARCH)
    assert scheme_label(schemes["model.layers.0.mlp.up_proj"]) == "FP8_DYNAMIC"
    assert scheme_label(schemes["model.layers.1.mlp.up_proj"]) == "W8A8"


def test_groups_and_tiles_divide_their_layers():
    """Would catch a group or tile that crosses the end of a row, found only when quantization has begun."""
    narrow = replace(ARCH, hidden_size=192)
    with pytest.raises(RecipeError, match="groups of 128; use group_size: 64"):
        resolve_plan(build_plan(QuantSpec(scheme="W4A16")), narrow)
    with pytest.raises(RecipeError, match="tiles of 128x128; use scheme: FP8_DYNAMIC"):
        resolve_plan(build_plan(QuantSpec(scheme="FP8_BLOCK")), narrow)
    assert resolve_plan(build_plan(QuantSpec(scheme="FP8_BLOCK")), ARCH)["lm_head"] is None


def test_a_tied_head_stays():
    """Would catch a head that is quantized apart from the embedding it is tied to."""
    spec = QuantSpec(ignore=())
    with pytest.raises(RecipeError, match="tied to the embedding"):
        resolve_plan(build_plan(spec), replace(ARCH, tied=True))
    assert resolve_plan(build_plan(spec), ARCH)["lm_head"] is not None


@pytest.mark.parametrize(
    ("device", "scheme", "fix"),
    [("b200", "W8A8", "FP8_DYNAMIC"), ("l40s", "FP8_BLOCK", "FP8_DYNAMIC")],
)
def test_a_plan_that_the_device_cannot_run_is_refused(device: str, scheme: str, fix: str):
    """Would catch hours of work for a checkpoint that its device cannot load or runs slowly."""
    with pytest.raises(RecipeError, match=fix):
        validate_plan(build_plan(QuantSpec(scheme=scheme)), ARCH, device)


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"scheme": "W8A8"}, []),
        ({"scheme": "FP8"}, ["static activation scales"]),
        ({"scheme": "FP8", "ignore": ("re:.*",)}, []),
        ({"kv": KVSpec()}, ["KV scales"]),
        ({"kv": KVSpec(scales="cast")}, []),
        ({"kv": KVSpec(format="int8", granularity="token_head")}, []),
        ({"smoothing": SmoothingSpec()}, ["smoothing"]),
        ({"engine": "llmcompressor", "method": "gptq"}, ["gptq"]),
        ({"method": "gptq", "smoothing": SmoothingSpec()}, ["smoothing", "gptq"]),
        ({"scheme": "W4A16", "group_size": 8, "clip": ClipSpec(method="mse")}, []),
        ({"clip": ClipSpec(method="mse"), "method": "gptq"}, ["gptq", "clip mse (weighted by inputs)"]),
        ({"clip": ClipSpec(method="mse"), "kv": KVSpec()}, ["KV scales", "clip mse (weighted by inputs)"]),
        ({"clip": ClipSpec(method="mse"), "engine": "llmcompressor", "method": "gptq"}, ["gptq"]),
    ],
)
def test_calibration_happens_when_something_needs_it(fields: dict, reasons: list[str]):
    """Would catch static scales without data, and minutes of calibration that nothing reads."""
    spec = QuantSpec(**fields)
    plan = build_plan(spec)
    assert needs_statistics(plan.resolve(ARCH.linears()), plan, spec) == reasons


def test_the_experts_of_a_layer_have_one_scheme():
    """Catches one expert, or all down_proj of them, under another scheme: servers run a layer's experts as one."""
    sizes = {"n_experts": 4, "experts_per_token": 2, "expert_size": 256, "dense_layers": (0,)}
    mixture = replace(ARCH, **sizes)
    for match in (r"re:.*experts\.1\.", r"re:.*experts.*down_proj"):
        rule = RuleSpec(match=match, scheme="FP8_DYNAMIC")
        with pytest.raises(RecipeError, match=r"model\.layers\.1\.mlp\.experts: has the schemes"):
            resolve_plan(build_plan(QuantSpec(scheme="W8A8", rules=(rule,))), mixture)
    rule = RuleSpec(match=r"re:.*experts", scheme="FP8_DYNAMIC")
    schemes = resolve_plan(build_plan(QuantSpec(scheme="W8A8", rules=(rule,))), mixture)
    assert schemes["model.layers.0.mlp.down_proj"] != schemes["model.layers.1.mlp.experts.0.down_proj"]
