"""A speed study: what rows say of made-up clocks, what a server is asked, and what the page shows."""

from pathlib import Path

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.bridges.openai_api import Api, Streamed
from qspec.errors import RecipeError
from qspec.eval_files import eval_dir
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.roofline import PassCost
from qspec.planning.planned import resolve
from qspec.report.document import Finding
from qspec.report.render import markdown as report_markdown
from qspec.report.study import document
from qspec.schema.problems import validate
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Generation, Sampling, StepRecord
from scripts.speed.matrix import Lengths, SpeedSubject, read_speed_matrix
from scripts.speed.study import Timed, ceiling, largest_batches, load_server, row, summed, timed
from scripts.speed.synthetic import SyntheticDrafter
from tests.openai_server import Model, serve
from tests.tiny import tiny_model


def _timed(rate: float, ttft: float = 0.5, drafted: int = 0) -> Timed:
    return Timed((ttft, ttft / 2), (1 / rate, 1 / rate), 20, 20 / rate, drafted, drafted // 2, drafted // 4)


def test_a_batch_is_timed_from_its_last_first_token() -> None:
    """Would catch the prompts of others counted as decoding time of the first request, and n tokens for n - 1."""
    steps = [StepRecord(2, 1, 0.0, 0.1, 0.0)] * 2
    group = [Generation([1] * 5, steps, ttft=1.0, seconds=5.0), Generation([1] * 5, steps, ttft=2.0, seconds=4.0)]
    found = timed(group, 6.0)
    assert found.tpot == (1.0, 1.0)
    assert (found.ttft, found.tokens, found.rate) == ((1.0, 2.0), 10, 10 / 6)
    assert (found.drafted, found.accepted, found.steps) == (8, 4, 4)


def test_arms_are_compared_within_their_repeats() -> None:
    """Would catch ratios upside down, medians compared where pairs were measured, a limit that takes the mean."""
    base = {0: _timed(10), 1: _timed(40)}
    found = row({0: _timed(20, drafted=8), 1: _timed(80, drafted=8)}, base, ttft_limit=0.4)
    assert found["speedup"] == found["tpot_speedup"] == [2.0, 2.0, 2.0]
    assert (found["ttft_worst_s"], found["within_ttft"]) == (0.5, False)
    assert (found["tokens_per_step"], found["drafted_per_step"]) == (3.0, 4.0)
    assert row(base, base, 0.5)["speedup"] == [1.0]
    assert row({0: _timed(20)}, base, 0.5)["speedup"] == [2.0]
    assert row({0: _timed(20)}, {}, 0.5)["speedup"] is None


def test_repeats_of_one_prompt_have_no_interval() -> None:
    """Would catch "1.91 (1.81 to 2.01)" of one prompt that was asked three times, as older studies hold it."""
    head = {"model": "m", "shape": "9-9", "batch": 1, "prompt": 9, "new": 9, "synthetic": None}
    base, fast = ({i: _timed(rate) for i in range(3)} for rate in (10, 20))
    rows = [head | {"arm": "original"} | row(base, base, 1), head | {"arm": "INT8"} | row(fast, base, 1)]
    assert "faster at 9-9 x 1 (2.00×)" in report_markdown.render(document({}, rows))
    same = [{name: value for name, value in each.items() if name != "groups"} for each in rows]
    text = report_markdown.render(document({}, same))
    assert "too few groups of prompts at 9-9 x 1 (2.00×)" in text
    assert "2.00 to 2.00" not in text


def test_every_arm_of_a_study_is_named_and_none_is_picked() -> None:
    """Would catch the luckiest arm of a cell called the fastest, by the numbers that made it so."""
    head = {"model": "m", "shape": "9-9", "batch": 1, "prompt": 9, "new": 9, "synthetic": None}
    rates = {"original": (10, 10, 10), "slow": (5, 5.1, 4.9), "even": (10.5, 9.5, 10), "fast": (20, 21, 19)}
    runs = {arm: dict(enumerate(map(_timed, each))) for arm, each in rates.items()}
    rows = [head | {"arm": arm} | row(mine, runs["original"], 1) for arm, mine in runs.items()]
    found = [block for block in document({}, rows).blocks if isinstance(block, Finding)]
    assert [(f.tone, f.text.split(" at ")[0]) for f in found] == [
        ("bad", "m: slow against original: slower"),
        ("open", "m: even against original: no difference shown"),
        ("good", "m: fast against original: faster"),
    ]


def test_the_ceiling_counts_what_a_step_reads() -> None:
    """Would catch a draft that is free, a cache that is read once for all, tokens per step forgotten."""
    cost, lengths = PassCost(weight_bytes=1000, kv_bytes=1, ops=1, attention_ops=1), Lengths(prompt=90, new=20)
    assert ceiling(cost, 1000, 2, lengths, 0.0, {}) == pytest.approx(1200)  # ms: 1000 and 2 x 100 bytes
    assert ceiling(cost, 1000, 2, lengths, 100, {"drafted_per_step": 3, "tokens_per_step": 2}) == pytest.approx(750)


def test_the_largest_batch_is_the_last_in_time() -> None:
    """Would catch a batch that is too slow, and arms of other shapes mixed up."""
    cells = [("a", "x", 1, True), ("a", "x", 4, False), ("b", "x", 1, False), ("a", "y", 4, True)]
    rows = [{"model": "m", "arm": a, "shape": s, "batch": n, "within_ttft": ok} for a, s, n, ok in cells]
    assert [found["largest_batch"] for found in largest_batches(rows, 2.0)] == [1, 0, 4]


def test_random_prompts_are_refused_for_drafts() -> None:
    """Would catch acceptance measured on noise; synthetic acceptance may have it."""
    told = {"model": "m", "shapes": {"a": {"prompt": 8, "new": 2}}, "batches": [1], "prompts": {"random": True}}
    with pytest.raises(RecipeError, match="random prompts"):
        validate(SpeedSubject, told | {"arms": {"d": {"draft": {"kind": "ngram"}}}}, "x")
    validate(SpeedSubject, told | {"arms": {"d": {"synthetic": 0.5}}}, "x")


@pytest.mark.parametrize("name", ["speed", "speed_cpu", "speed_vllm"])
def test_every_arm_of_the_matrices_can_be_planned(name: str) -> None:
    """Would catch an arm that the schema or the device refuses, found out behind an hour of others."""
    for subject in read_speed_matrix(eval_dir() / f"matrices/{name}.yaml").values():
        assert all(resolve(subject.recipe(arm)).target.bytes.resident > 0 for arm in subject.arms)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.from_float(load_folder(tiny_model("llama", tmp_path_factory.mktemp("m"))))


@pytest.mark.parametrize(("alpha", "per_step"), [(1.0, 4.0), (0.0, 1.0), (0.5, None)])
def test_synthetic_drafts_stand_as_often_as_they_should(lm: Decoder, alpha: float, per_step: float | None) -> None:
    """Would catch drafts that are one token off, always right, or that change the answer."""
    prompt = [1, 50, 60]

    def run(drafter: SyntheticDrafter | None) -> Generation:
        asked = GenerationRequest(prompt, 121, torch.Generator().manual_seed(0), drafter, Fixed(3))
        return generate_batch(lm, [asked], Sampling(), (), ())[0]

    plain = run(None)
    found = run(SyntheticDrafter(prompt, plain.tokens, alpha, 300))
    assert found.tokens == plain.tokens
    mean = 120 / len(found.steps)
    if per_step is None:  # 1 + 1/2 + 1/4 + 1/8, of 64 steps with a standard error of 0.12
        assert 1.5 < mean < 2.3
    else:
        assert mean == per_step


def test_a_server_is_loaded_and_timed(lm: Decoder, tmp_path: Path) -> None:
    """Would catch answers cut short by a stop token, tokens counted as events, requests that never were at once."""
    model = Model(lm, load_folder(tiny_model("llama", tmp_path)).tokenizer, set(range(300)), 256)
    with serve(model) as url:
        found = load_server(Api(url), [[1, 50 + i] for i in range(6)], new=5, at_once=3)
    assert (found.tokens, len(found.ttft), len(found.tpot)) == (30, 6, 6)
    assert all(0 < first < found.seconds for first in found.ttft)
    assert summed([Streamed((1.0, 2.0, 3.0), 5)], 3.0).tpot == (0.5,)


def test_the_page_shows_lengths_batches_and_ceilings() -> None:
    """Would catch a synthetic arm called the fastest, and a number without its place."""
    head = {"model": "m", "shape": "9-9", "batch": 2, "prompt": 9, "new": 9, "ceiling_tpot_ms": 1.0, "of_ceiling": 0.5}
    base, fast = ({i: _timed(rate + i) for i in range(3)} for rate in (10, 30))
    rows = [
        head | {"arm": "original", "synthetic": None} | row(base, base, 1),
        head | {"arm": "INT8", "synthetic": None} | row(fast, base, 1),
        head | {"arm": "made up", "synthetic": 0.9} | row({i: _timed(90 + i) for i in range(3)}, base, 1),
    ]
    text = report_markdown.render(document({"cpu": "x"}, [*rows, *largest_batches(rows, 1.0)]))
    assert "m: INT8 against original: faster at 9-9 x 2 (2.8" in text
    assert "made up (no draft) against" not in text
    assert "say nothing of one that could be had" in text
    assert "within 1 s" in text
