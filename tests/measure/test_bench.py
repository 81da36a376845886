"""The benchmark: order of turns, arithmetic of the statistics on made-up clocks, and the proof of equality."""

from collections.abc import Sequence
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qspec.bridges.hf import load_folder
from qspec.errors import SourceError
from qspec.measure import bench as stage
from qspec.measure.arm import Arm, Run, TokenizedPrompt
from qspec.measure.stats import ArmFacts, acceptance, summarize
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.cuda.loop import CudaLoop
from qspec.nn.cuda.passes import Captured
from qspec.progress import Progress
from qspec.schema.recipe import BenchmarkSpec, Recipe
from qspec.schema.results import Measurement, Speed
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Generation, StepRecord
from tests.arms import Letters, Parrot
from tests.speculation.toys import Scripted
from tests.tiny import tiny_model

QUIET = Progress(quiet=True)
BANDWIDTH = Measurement(metric="memory read", value=1e9, unit="B/s", n=1)


@pytest.fixture(autouse=True)
def _small_memory_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"text": f"question {i}", "category": "even" if i % 2 == 0 else "odd"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _recipe(prompts: str, **benchmark: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "target": {"model": "m"},
            "draft": {"kind": "ngram"},
            "benchmark": {"prompts": prompts, "per_category": 2, "max_new_tokens": 12, "repeats": 2, **benchmark},
        }
    )


class Wrong:
    """A target whose passes over several rows favour another token: a broken verification."""

    def __init__(self, lm: Parrot, gap: float) -> None:
        self.lm, self.gap, self.vocab_size, self.max_length = lm, gap, lm.vocab_size, lm.max_length

    @property
    def length(self) -> int:
        return self.lm.length

    def truncate(self, length: int) -> None:
        self.lm.truncate(length)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        several = len(tokens_T) > 1 and self.lm.length > 0
        logits_TV = self.lm.forward(tokens_T, last).clone()
        logits_TV[:, 7] = logits_TV.max(-1).values + (1 if several else -1) * self.gap
        return logits_TV


SCRIPT = [40, 50, 60, 70, 80]


def test_four_arms_end_to_end(prompts: str):
    """Would catch arms that are not all run on all prompts, a wrong partner, and results that JSON cannot hold."""
    one, two = Parrot(SCRIPT, noise=0.1), Parrot(SCRIPT, noise=0.2)
    arms = {
        "original": Arm(one, weight_bytes=1000, kv_bytes_per_token=10),
        "original + draft": Arm(one, Scripted(SCRIPT[:3]), None, weight_bytes=1000, draft_bytes=100),
        "quantized": Arm(two, weight_bytes=500),
        "quantized + draft": Arm(two, Scripted([9, 9]), None),
    }
    one.prompt_length = two.prompt_length = len(Letters().chat([{"role": "user", "content": "question 0"}]))
    speed = stage.bench(arms, Letters(), _recipe(prompts), QUIET, eos_ids=[2])
    assert [(a.arm, a.tpot.n) for a in speed.arms] == [(name, 8) for name in arms]
    pairs = [(r.arm, r.baseline, r.speedup.n) for r in speed.ratios]
    assert pairs == [
        ("original + draft", "original", 4),
        ("quantized", "original", 4),
        ("quantized + draft", "quantized", 4),
        ("quantized + draft", "original", 4),
    ]
    assert [(e.arm, e.baseline, e.n, e.equal) for e in speed.equality] == [
        ("original + draft", "original", 8, 8),
        ("quantized + draft", "quantized", 8, 8),
    ]
    assert {(a.arm, a.category) for a in speed.acceptance} == {
        (name, c) for name in ("original + draft", "quantized + draft") for c in ("all", "even", "odd")
    }
    assert [a.alpha.value for a in speed.acceptance if a.arm == "quantized + draft"] == [0.0, 0.0, 0.0]
    assert [p.arm for p in speed.predictions] == ["original + draft", "quantized + draft"]
    assert (speed.condition["prompts"], speed.condition["data"]) == (4, "prompts.jsonl")
    assert Speed.model_validate_json(speed.model_dump_json()) == speed


def test_arms_on_a_gpu_run_in_its_loop(prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that times the host's steps for the loop's, or captures, or does not say what it timed."""
    model = load_folder(tiny_model("llama", tmp_path / "model", vocab_size=Letters.vocab_size))
    target, captured = CudaDecoder.load(model, torch.float32, 64, device="cpu"), list[int]()
    draft, capture = CudaDecoder.load(model, torch.float32, 64, device="cpu"), CudaLoop.capture

    def watched(loop: CudaLoop, drafts: int, batch: int) -> Captured[None]:
        captured.append(len(loop._graphs))
        return capture(loop, drafts, batch)

    monkeypatch.setattr(CudaLoop, "capture", watched)
    arms = {
        "plain": Arm(target),
        "draft": Arm(target, ModelDrafter(draft), Fixed(3), new_drafter=lambda: ModelDrafter(draft.fork())),
        "lookup": Arm(target, NgramDrafter(), Fixed(3)),
    }
    made = stage.measure(
        arms, [TokenizedPrompt("a", [1, 40, 50])], _recipe(prompts, temperatures=[0.0, 0.7]), [2], QUIET
    )
    first = next(made)
    assert captured.count(0) == 4, "two arms at two temperatures"
    runs = [first, *made]
    assert captured.count(0) == 4
    assert [run.generation.tokens for run in runs if run.temperature == 0] == [runs[0].generation.tokens] * 6
    speed = stage.bench(arms, Letters(), _recipe(prompts, batch_sizes=[1, 2]), QUIET, eos_ids=[2], prove="plain")
    assert speed.condition["in the loop on the GPU"] == "plain, draft"
    assert [batch.arm for batch in speed.batches] == ["plain", "draft"]
    assert all(seconds.equal == seconds.answers for seconds in speed.batches)


@pytest.mark.parametrize(("gap", "near_tie"), [(1e-3, True), (1.0, False)])
def test_a_difference_is_found_and_classified(gap: float, near_tie: bool, prompts: str):
    """Would catch a broken verification that passes as lossless, and a rounding tie that is called a fault."""
    target = Wrong(Parrot(SCRIPT, prompt_length=len(Letters().chat([{"role": "user", "content": "question 0"}]))), gap)
    arms = {"plain": Arm(target), "speculative": Arm(target, Scripted([11]))}
    speed = stage.bench(arms, Letters(), _recipe(prompts, repeats=1), QUIET, eos_ids=[2])
    (equality,) = speed.equality
    assert (equality.n, equality.equal) == (4, 0)
    assert equality.lossless is near_tie
    for mismatch in equality.mismatches:
        assert mismatch.position == 1  # the first token comes from the prompt's pass in both arms
        assert mismatch.margin == pytest.approx(gap, rel=1e-2)  # float32 logits near 10
        assert mismatch.near_tie is near_tie


def test_arms_take_turns():
    """Would catch all runs of one arm in a row, which turns drift of the machine into a difference between arms."""
    spec = BenchmarkSpec(repeats=2, temperatures=(0.0, 1.0))
    turns = list(stage._turns(["a", "b", "c"], 2, spec))
    assert len(turns) == 2 * 2 * 2 * 3
    groups = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all({name for *_, name in group} == {"a", "b", "c"} for group in groups)
    assert all(len({turn[:3] for turn in group}) == 1 for group in groups)
    assert {group[0][3] for group in groups} == {"a", "b", "c"}


def _run(arm: str, prompt: int, seconds: float, repeat: int = 0, steps: Sequence[StepRecord] = ()) -> Run:
    return Run(arm, 0.0, repeat, prompt, Generation(list(range(11)), list(steps), 0.5, seconds, "length"))


PLAIN = StepRecord(0, 0, 0.0, 0.1, 0.0)
FACTS = {
    "p": ArmFacts(False, "p", weight_bytes=1000, kv_bytes_per_token=2),
    "s": ArmFacts(True, "p", weight_bytes=1000, draft_bytes=100, kv_bytes_per_token=2),
}
REQUESTS = [TokenizedPrompt("x", [1] * 20), TokenizedPrompt("y", [1] * 20)]


def test_statistics_of_a_made_up_clock():
    """Would catch seconds for milliseconds, n tokens for n - 1, ratios upside down, repeats counted as prompts."""
    steps = [StepRecord(4, 3, 0.08, 0.11, 0.01), StepRecord(4, 1, 0.08, 0.11, 0.01)]
    runs = [
        _run("p", 0, 1.0, steps=[PLAIN] * 10),
        _run("p", 0, 3.0, repeat=1, steps=[PLAIN] * 10),
        _run("p", 1, 2.0, steps=[PLAIN] * 10),
        _run("s", 0, 1.0, steps=steps),
        _run("s", 1, 4.0, steps=steps),
    ]
    speed = summarize(FACTS, REQUESTS, runs, {}, BANDWIDTH, {})
    plain, speculative = speed.arms
    assert plain.tpot.median == pytest.approx(200)  # ms: 100, 200, 300
    assert plain.ttft.median == pytest.approx(500)
    assert plain.decode_rate.median == pytest.approx(5)
    assert plain.total_rate.median == pytest.approx(11 / 2.5)
    assert plain.tpot.n == 3
    assert plain.bytes_per_token == pytest.approx(1000 + 2 * (20 + 5.5))
    assert plain.ceiling_tokens_s == pytest.approx(1e9 / 1051)
    assert speculative.bytes_per_token == pytest.approx((1051 + 4 * 100) / 3)  # 4 drafted, 2 accepted per step
    assert speculative.time_share == pytest.approx({"draft": 0.4, "verify": 0.55, "other": 0.05})
    (ratio,) = speed.ratios
    assert ratio.per_prompt == pytest.approx((2.0, 0.5))
    assert ratio.speedup.value == pytest.approx(1.0)
    assert ratio.speedup.n == 2
    (prediction,) = speed.predictions
    assert (prediction.draft_cost, prediction.verify_cost) == pytest.approx((0.2, 1.1))
    assert prediction.alpha == pytest.approx(8 / 12)  # 8 stood, 4 were refused
    expected = sum(prediction.alpha**i for i in range(5)) / (4 * 0.2 + 1.1)
    assert prediction.predicted == pytest.approx(expected)
    pooled = speed.acceptance[0]
    assert (pooled.category, pooled.steps, pooled.drafted, pooled.accepted) == ("all", 4, 16, 8)
    assert pooled.tokens_per_step == pytest.approx(3)
    assert pooled.per_position == (1.0, 0.5, 0.5, 0.0)


def test_answers_of_one_token_have_no_pace():
    """Would catch a division by zero when a model stops at once."""
    stop = Generation([2], [], 0.5, 0.0, "eos")
    runs = [Run(arm, 0.0, 0, 0, stop) for arm in FACTS]
    speed = summarize(FACTS, REQUESTS, runs, {}, BANDWIDTH, {})
    assert speed.arms[0].tpot.n == 0
    assert speed.ratios == ()
    assert speed.predictions == ()
    assert Speed.model_validate_json(speed.model_dump_json()).arms[0].tpot.n == 0


def test_a_base_model_gets_plain_prompts(prompts: str, monkeypatch: pytest.MonkeyPatch):
    """Would catch a benchmark that dies on a tokenizer without a chat template."""

    class Base(Letters):
        def chat(self, messages: list[dict[str, str]]) -> list[int]:
            raise SourceError("tokenizer", "has no chat template", "use text")

    requests, templated = stage.load_requests(_recipe(prompts).benchmark, Base(), room=100)
    assert not templated
    assert requests[0].tokens == Letters().encode("question 0")
    assert [request.category for request in requests] == ["even", "even", "odd", "odd"]


def test_bandwidth_is_a_rate():
    """Would catch bytes and elements mixed up: no machine reads less than 50 MB/s or more than 50 TB/s."""
    found = stage.bandwidth(repeats=2)
    assert 5e7 < found.value < 5e13
    assert torch.get_num_threads() == found.condition["threads"]


def test_teacher_forced_acceptance_stands_beside_the_counted_one(prompts: str):
    """Would catch a draft model compared on its own text, laws of other settings, or a number without its interval."""
    target, draft = Parrot(SCRIPT, noise=0.1), Parrot(SCRIPT, noise=0.2)
    target.prompt_length = draft.prompt_length = len(Letters().chat([{"role": "user", "content": "question 0"}]))
    arms = {"plain": Arm(target), "drafting": Arm(target, ModelDrafter(draft), c_hat=0.1)}
    speed = stage.bench(arms, Letters(), _recipe(prompts), QUIET, eos_ids=[2])
    (everything, *by_category) = speed.acceptance
    assert everything.teacher_forced is not None
    assert (everything.teacher_forced.value, everything.teacher_forced.n) == (1.0, 4 * 12)  # greedy, the same script
    assert [a.teacher_forced and a.teacher_forced.n for a in by_category] == [2 * 12, 2 * 12]
    assert everything.teacher_forced.ci == (1.0, 1.0)
    assert len(everything.per_position_ci) == len(everything.per_position)
    (prediction,) = speed.predictions
    drafted = prediction.draft_length
    assert prediction.operations == pytest.approx((1.1 * drafted + 1) / everything.tokens_per_step)
    assert prediction.best_length is not None


def test_what_was_measured_earlier_is_not_measured_again(prompts: str):
    """Would catch a benchmark that, stopped and started, begins anew or leaves a prompt out."""
    target = Parrot(list(range(40, 90)), noise=0.1)
    arms = {"plain": Arm(target), "drafting": Arm(target, SuffixDrafter())}
    requests, _ = stage.load_requests(_recipe(prompts).benchmark, Letters(), room=200)
    recipe = _recipe(prompts, repeats=2)
    every = {(0.0, repeat, prompt) for repeat in range(2) for prompt in range(len(requests))}
    done = {(0.0, 0, 0), (0.0, 1, 1)}
    runs = list(stage.measure(arms, requests, recipe, [2], QUIET, done))
    assert {(r.temperature, r.repeat, r.prompt) for r in runs} == every - done


def test_repeats_do_not_ask_a_memory_what_it_has_answered(prompts: str):
    """Would catch the trap of suffix caches: the second round of the same prompts would be drafted from the first."""
    target, lookup = Parrot(list(range(40, 90)), noise=0.1), SuffixDrafter()
    target.prompt_length = len(Letters().chat([{"role": "user", "content": "question 0"}]))
    arms = {"plain": Arm(target), "drafting": Arm(target, lookup)}
    requests, _ = stage.load_requests(_recipe(prompts).benchmark, Letters(), room=200)
    runs = list(stage.measure(arms, requests, _recipe(prompts, repeats=3), [2], QUIET))
    rounds = [
        [(s.drafted, s.accepted) for r in runs if r.arm == "drafting" and r.repeat == n for s in r.generation.steps]
        for n in range(3)
    ]
    assert rounds[0] == rounds[1] == rounds[2]
    assert any(accepted for _, accepted in rounds[0])  # from the other prompts of its round


def test_acceptance_is_as_sure_as_its_prompts():
    """Would catch greedy repeats and the tokens of one answer counted as independent, and one prompt taken for many."""
    easy, hard = [StepRecord(4, 4, 0.1, 0.1, 0.1)] * 40, [StepRecord(4, 0, 0.1, 0.1, 0.1)] * 40
    answers = [easy, hard, easy, hard]
    requests = [TokenizedPrompt("x" if i < 3 else "y", [1]) for i in range(4)]
    runs = [_run("s", i, 1.0, repeat, answers[i]) for repeat in range(3) for i in range(4)]
    pooled, _, of_y = acceptance("s", runs, requests, {})
    assert pooled.alpha.value == pytest.approx(320 / 400)
    assert pooled.alpha.n == 3 * 400
    assert pooled.alpha.ci is not None
    assert pooled.alpha.ci[1] - pooled.alpha.ci[0] > 0.4  # Wilson's interval of 1200 tokens is 0.05 wide
    assert pooled.tokens_per_step_ci is not None
    assert pooled.tokens_per_step_ci[0] < 3 < pooled.tokens_per_step_ci[1]
    assert (of_y.prompts, of_y.alpha.ci, of_y.tokens_per_step_ci) == (1, None, None)
    same = acceptance("s", runs[::2], requests, {})[0]  # both easy: nothing differs, and still no certainty
    assert same.alpha.ci == (pytest.approx(0.988, abs=2e-3), 1.0)  # Wilson's of one round of two prompts
