"""Comparisons on equal terms: what is stored loses nothing that KL sees, and a winner needs an interval."""

from pathlib import Path

import pytest
import torch

from qspec.nn.eager.decoder import Decoder
from qspec.numerics.statistics.fidelity import kl_divergence, nll
from qspec.quantization.rtn import quantize
from qspec.schema.quantization import ClipSpec, KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from scripts.accuracy.compare import Windows, best, difference, exported_format, measure, reference, summary, verdict
from tests.observed import ROWS, load
from tests.tiny import tiny_model


def windows(kl: list[float]) -> Windows:
    return {"kl": kl, "top1": [1.0] * len(kl), "nll": [2.0] * len(kl)}


def test_means_of_windows_equal_direct_computation(tmp_path: Path) -> None:
    """Catches predictions paired with the wrong token, windows that see each other, a reference too coarse."""
    model = load(tiny_model("llama", tmp_path))
    original = Decoder.from_float(model)
    rounded = Decoder.from_quantized(quantize(model, None, build_plan(QuantSpec(scheme="W4A16", group_size=32))))
    found = measure(rounded, ROWS, [reference(original, row) for row in ROWS])
    for i, row in enumerate(ROWS):
        logits = []
        for lm in (original, rounded):
            lm.truncate(0)
            logits.append(lm.forward(torch.tensor(row[:-1])))
        # float16 holds 11 bits: log-probabilities around 5 are 2e-3 off at random signs, their mean over a law less
        assert found["kl"][i] == pytest.approx(float(kl_divergence(*logits).mean()), abs=1e-4)
        assert found["nll"][i] == pytest.approx(float(nll(logits[1], torch.tensor(row[1:])).mean()), rel=1e-6)
    itself = measure(original, ROWS[:1], [reference(original, ROWS[0])])
    assert itself["kl"][0] < 1e-6  # what float16 loses
    assert itself["top1"] == [1.0]


def test_summary() -> None:
    """Catches a bootstrap of two windows taken for an interval, and perplexity as a mean of exponentials."""
    rows = summary({"kl": [0.1, 0.3], "top1": [0.5, 1.0], "nll": [0.0, 2.0]})
    assert rows["kl"] == pytest.approx(0.2)
    assert rows["ci"] == [0.0, pytest.approx(0.2 + 12.7062 * 0.1)]  # t of one degree of freedom; KL is not below 0
    assert rows["top1_ci"] == [0.0, 1.0]
    assert rows["ppl"] == pytest.approx(2.718281828)
    assert rows["n"] == 2


def test_windows_are_paired() -> None:
    """Catches arms compared as if their windows were not the same: hard text would hide a steady gain."""
    hard_and_easy = [0.01, 0.5, 0.02, 0.9, 0.03, 0.7]
    worse = [kl + 0.02 + 0.01 * kl for kl in hard_and_easy]
    found = difference(windows(hard_and_easy), windows(worse))
    assert found.sign == 1
    assert found.ci[0] > 0
    assert difference(windows(worse), windows(hard_and_easy)).sign == -1
    assert difference(windows(hard_and_easy), windows(hard_and_easy[::-1])).sign == 0
    assert difference(windows([0.1]), windows([0.2])).sign == 0  # one window decides nothing


def test_the_verdict_is_between_the_best_of_each() -> None:
    """Catches a win over a peer's weakest method."""
    ours, strong, weak = windows([0.2] * 4), windows([0.1] * 4), windows([0.3] * 4)
    assert best({"rtn": weak, "gptq": strong}) == "gptq"
    line = verdict({"best": ours}, {"rtn": weak, "gptq": strong})
    assert "llmcompressor gptq 0.10000" in line
    assert line.endswith("llmcompressor wins")
    assert verdict({"best": strong}, {"rtn": weak}).endswith("qspec wins")
    assert verdict({"best": ours}, {"rtn": ours}).endswith("no difference detected")
    assert verdict({"best": ours}, {}).endswith("no contest")


def test_arms_are_chosen_on_other_windows_than_they_are_judged_on() -> None:
    """Catches a win of the luckiest of many arms, each as good as the peer: the mean of the windows that chose it."""
    lucky = {"kl": [0.1, 0.2] * 6} | {metric: [0.5] * 12 for metric in ("top1", "nll")}
    line = verdict({"lucky": lucky, "even": windows([0.16] * 12)}, {"rtn": windows([0.2] * 12)})
    assert "qspec lucky 0.15000" in line
    assert line.endswith("no difference detected")


def test_formats_are_equal_up_to_how_ranges_were_found(tmp_path: Path) -> None:
    """Catches a contest between different numbers of bits, and one that is called off for another clip."""
    arch = load(tiny_model("llama", tmp_path)).arch

    def of(**fields: object) -> object:
        return exported_format(build_plan(QuantSpec.model_validate({"scheme": "FP8", **fields})), arch)

    assert of() == of(clip=ClipSpec(method="mse"), method="gptq")
    assert of(kv=KVSpec()) == of(kv=KVSpec(scales="cast"))
    assert of() != of(kv=KVSpec())
    assert of() != of(rules=({"match": "o_proj", "scheme": "none"},))
    assert of() != of(scheme="FP8_DYNAMIC")
