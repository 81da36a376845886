"""Predictions against published floors and the limits of the formula."""

from dataclasses import replace
import json

import pytest

from qspec.eval_files import eval_dir
from qspec.models.load import resolve_arch
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.numerics.roofline import pass_seconds, prefill_seconds
from qspec.pair.drafters.registry import kind_of
from qspec.plan import KVScheme
from qspec.planning.forecast import ALPHAS, Duo, gain, prior, rates
from qspec.schema.devices import read_device
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.build import build_plan, resolve_plan
from qspec.schemes.footprint import Footprint, footprint

FP8_KV = KVScheme(FP8_E4M3, "tensor")


def half(model: str, scheme: str, kv: KVScheme | None = None) -> Footprint:
    arch = resolve_arch(ModelSpec(model=f"meta-llama/{model}"))
    return footprint(arch, resolve_plan(build_plan(QuantSpec(scheme=scheme)), arch), kv, 2)


def duo(target: tuple, draft: tuple | None, device: str = "h100") -> Duo:
    at = rates(read_device(device), {})
    return Duo(half(*target).cost, half(*draft).cost if draft else None, at, at)


EIGHT, SEVENTY, ONE = "Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct", "Llama-3.2-1B-Instruct"


@pytest.mark.parametrize(
    ("half_spec", "device", "milliseconds"),
    [
        ((EIGHT, "none"), "h200", 3.15),
        ((EIGHT, "none"), "rtx4090", 15.0),
        ((EIGHT, "FP8_DYNAMIC", FP8_KV), "h100", 2.42),
        ((EIGHT, "FP8_DYNAMIC", FP8_KV), "l40s", 9.37),
        ((SEVENTY, "FP8_DYNAMIC", FP8_KV), "h200", 14.7),
    ],
)
def test_floor_of_a_decoding_step(half_spec: tuple, device: str, milliseconds: float):
    """Would catch a wrong byte count or data sheet: published floors at batch 1 and 1k tokens, three digits each."""
    seconds = pass_seconds(half(*half_spec).cost, rates(read_device(device), {}), 1, 1024, 1)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=5e-3)


def test_floor_of_a_long_prompt():
    """Would catch attention left out of prefill: 8B in BF16, 10k tokens, RTX 4090: 1004 ms (the head runs once)."""
    cost = half(EIGHT, "none").cost
    body = replace(cost, ops=cost.ops - 2 * 128_256 * 4096)
    seconds = prefill_seconds(body, rates(read_device("rtx4090"), {}), 10_000)
    assert seconds == pytest.approx(1.004, rel=5e-3)  # published to the millisecond


@pytest.mark.parametrize(
    ("target", "draft", "c"),
    [
        ((EIGHT, "none"), (ONE, "none"), 0.165),
        ((EIGHT, "FP8_DYNAMIC", FP8_KV), (ONE, "none"), 0.309),
        ((EIGHT, "FP8_DYNAMIC", FP8_KV), (ONE, "FP8_DYNAMIC", FP8_KV), 0.187),
        ((SEVENTY, "FP8_DYNAMIC", FP8_KV), (ONE, "none"), 0.035),
    ],
)
def test_cost_ratio_of_published_pairs(target: tuple, draft: tuple, c: float):
    """Would catch c from parameters instead of bytes: quantizing only the target makes drafting dearer."""
    assert duo(target, draft).cost_ratio() == pytest.approx(c, abs=1.5e-3)  # published to three decimals


def test_both_ends_quantized_gain_most():
    """Would catch a speedup that ignores c: published 1.69x at k = 3 for BF16 with a BF16 draft, alpha 0.7."""
    found = gain(duo((EIGHT, "none"), (ONE, "none")), 3, 8, 0.7)
    assert found.best_gamma == 3
    assert found.best_speedup == pytest.approx(1.69, abs=0.01)  # published to two decimals


def test_free_drafts_cost_verification_only():
    """Would catch a cost for n-gram drafts: with c = 0 and free rows the speedup is the tokens per step."""
    found = gain(duo((EIGHT, "FP8_DYNAMIC"), None), 4, 8, 0.8)
    assert found.speedup == pytest.approx(found.tokens_per_step, rel=1e-9)


@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        ({"kind": "ngram"}, "heuristic"),
        ({"kind": "suffix"}, "fixed"),
        ({"kind": "suffix"}, "optimal"),
        ({"kind": "self"}, "fixed"),
        ({"kind": "mlp_speculator", "model": "package:qspec/weights/smollm2-135m-mlp"}, "fixed"),
        ({"kind": "mlp_speculator", "model": "package:qspec/weights/smollm2-135m-mlp", "lookup": "suffix"}, "optimal"),
    ],
)
def test_plans_predict_what_such_drafts_were_measured_to_gain(draft: dict, policy: str):
    """Would catch 4.89x predicted for suffixes that gain 1.2x: acceptance of a model, in every step, at no cost."""
    own = kind_of(Recipe.model_validate({"name": "t", "target": {"model": "m"}, "draft": draft}).draft).measured_as
    known = prior(own, policy)
    rows = json.loads((eval_dir() / "baselines/spec_bench.json").read_text())["rows"]
    kind = "optimal" if policy == "optimal" else "fixed 4"
    same = [r for r in rows if (r["drafter"], r["policy"], r["category"]) == (own, kind, "all")]
    row = max(same, key=lambda r: r["n"])
    assert known.c > 0
    assert f"{row['n']} Spec-Bench prompts" in known.source
    assert "eval/baselines/spec_bench.json" in known.source
    small = Duo(half(ONE, "W8A8").cost, half(ONE, "W4A16").cost if draft["kind"] == "self" else None, None, None)
    drafted = round(row["drafted_per_step"] / (1 - row["idle_share"]))
    found = gain(replace(small, prior=known), drafted, 16, known.alphas[0])
    assert found.speedup == pytest.approx(row["speedup"], rel=0.1)  # drafts end early, and by position acceptance falls
    assert found.best_speedup < 1.45


def test_drafts_that_nobody_measured_are_assumed_and_verification_is_not_free():
    """Would catch a prediction that names no assumption, and rows of a pass that cost nothing on a CPU."""
    unknown = prior("", "heuristic")
    assert unknown.alphas == ALPHAS
    assert "assumed" in unknown.source
    blind = Duo(half(EIGHT, "W8A8").cost, half(ONE, "W8A8").cost, None, None, prior=unknown)
    assert blind.verify_cost()(5) > 1.2
    truncated = {"kind": "self", "layers": 4}
    spec = Recipe.model_validate({"name": "t", "target": {"model": "m"}, "draft": truncated}).draft
    assert kind_of(spec).measured_as == ""  # a copy of all layers says nothing of one with four


def test_verification_stops_being_free_at_large_batches():
    """Would catch a switch-off batch that ignores compute: the H20's low rate ends the gain before the H100's."""
    pair = ((SEVENTY, "FP8_DYNAMIC", FP8_KV), (EIGHT, "FP8_DYNAMIC", FP8_KV))
    slow = gain(duo(*pair, device="h20"), 4, 8, 0.7).stops_paying_at_batch
    fast = gain(duo(*pair, device="h100"), 4, 8, 0.7).stops_paying_at_batch
    assert slow is not None
    assert fast is None or fast > slow


def test_without_a_data_sheet_nothing_is_claimed_about_batches():
    """Would catch invented hardware for a CPU: c is a ratio of bytes and the batch limit stays unknown."""
    assert rates(read_device("cpu"), {}) is None
    known = duo((EIGHT, "none"), (ONE, "none"))
    blind = gain(replace(known, target_rates=None, draft_rates=None), 3, 8, 0.7)
    assert blind.stops_paying_at_batch is None
    assert blind.speedup == pytest.approx(gain(known, 3, 8, 0.7).speedup, rel=1e-9)  # batch 1 is memory-bound


def test_a_draft_as_dear_as_the_target_is_not_used():
    """Would catch a plan that recommends drafting where it can only lose."""
    found = gain(duo((ONE, "none"), (ONE, "none")), 4, 8, 0.6)
    assert (found.best_gamma, found.best_speedup) == (0, 1.0)
    assert found.speedup < 1
