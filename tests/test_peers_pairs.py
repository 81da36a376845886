"""What users of other toolkits have hit with drafts, pairs and evaluation, and that it does not happen here.

A row of the peers' table each, as in `test_peers.py`; each docstring says what was hit.
"""

from contextlib import redirect_stdout
from dataclasses import replace
import importlib
from io import StringIO
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges import harness
from qspec.bridges.harness import Sample, TaskScores
from qspec.bridges.heads import speculator
from qspec.bridges.hf import load_tokenizer
from qspec.errors import PairError, RecipeError, SourceError
from qspec.measure.evaluate import compare
from qspec.models.layers import truncate_layers
from qspec.nn.eager.decoder import Decoder
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize
from qspec.pair.drafters.registry import kind_of
from qspec.pair.exports import transformers_snippet
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.planning.compatibility import compatibility
from qspec.planning.planned import resolve
from qspec.planning.remarks import remarks
from qspec.progress import Progress
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.report.verdict import blockers, findings
from qspec.schema.drafts import MlpDraft
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe, TaskSpec
from qspec.schema.results import Accuracy, Measurement, Results, TaskResult
from qspec.schema.training import TrainingData
from qspec.schemes.build import build_plan
from qspec.serving.vllm import serving
from qspec.speculation.drafters.model import ModelDrafter
from qspec.train import data as draft_data, loop as train_draft
from qspec.train.data import Rollout
from qspec.train.head import HeadLearner, lay_out
from qspec.train.loop import Judgement
from tests import example_results
from tests.observed import ROWS, load
from tests.tiny import tiny_model
from tests.train.test_loop import SPEC, rollouts, trained

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


def quantized(folder: Path, scheme: str, layers: int = 2) -> QuantizedModel:
    model = truncate_layers(load(folder), layers)
    plan = build_plan(QuantSpec.model_validate({"scheme": scheme, **({"group_size": 32} if "4" in scheme else {})}))
    return quantize(model, calibrate(model, ROWS), plan)


def a_recipe(model: Path | str, draft: dict[str, Any], **fields: Any) -> Recipe:
    speculation = {"draft_length": {"policy": "fixed", "k": 3}, "max_length": 128}
    target = {"model": str(model), "quantization": {"scheme": "W8A8"}}
    return Recipe.model_validate({"name": "t", "target": target, "draft": draft, "speculation": speculation} | fields)


def self_draft(scheme: str) -> dict[str, Any]:
    quantization = {"scheme": scheme, **({"group_size": 32} if "4" in scheme else {})}
    return {"kind": "self", "layers": 1, "quantization": quantization}


def with_draft(llama: Path, folder: Path, scheme: str = "W8A8") -> tuple[Path, Recipe]:
    """A pair with a one-layer draft of its own, and the recipe that asks for it."""
    recipe = a_recipe(llama, self_draft(scheme))
    return package(quantized(llama, "W8A8"), quantized(llama, scheme, 1), recipe, folder), recipe


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """An untrained speculator head for the tiny model."""
    made = MLPSpeculator(SpeculatorShape(64, 300, 2, 16, shared=True), None, *torch.randn(2, 300, 64))
    initialize(made, torch.Generator().manual_seed(0))
    speculator.write(made, tmp_path / "head")
    return tmp_path / "head"


def head_draft(head: Path) -> dict[str, Any]:
    return {"kind": "mlp_speculator", "model": str(head), "n_predict": 2, "inner_dim": 16, "shared": True}


def test_T22_a_drafts_head_is_kept_until_it_is_asked_for_and_its_price_told(llama: Path) -> None:
    """A rounded head cost a draft its acceptance; in 16 bits it was 37 % of what a draft step read, and nobody knew."""

    def planned(**quantization: Any) -> tuple[Any, list[str]]:
        draft = {"kind": "model", "model": str(llama), "quantization": {"scheme": "W8A8"} | quantization}
        pair = resolve(a_recipe(llama, draft))
        assert pair.draft is not None
        return pair.draft.schemes["lm_head"], [f.fix for f in remarks(pair) if f.value == "draft lm_head"]

    scheme, (advice,) = planned()
    assert scheme is None
    assert "draft.quantization.ignore: []" in advice
    scheme, told = planned(ignore=())
    assert scheme is not None
    assert told == []  # it is done already


def test_T26_a_head_of_another_vocabulary_is_refused(head: Path, llama: Path) -> None:
    """A speculator's configuration held its own vocabulary in place of the verifier's, and its ids meant others."""
    draft, arch = MlpDraft.model_validate(head_draft(head)), load(llama).arch
    assert kind_of(draft).require_files(arch) == head
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 301}))
    with pytest.raises(RecipeError, match=r"vocab_size 300: but its config\.json says 301"):
        kind_of(draft).require_files(arch)


def test_T27_a_head_is_kept_for_its_acceptance_not_for_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts with a good validation loss were hardly accepted: what is kept is what is accepted most."""
    alphas = iter(([0.1, 0.1], [0.5, 0.5], [0.9, 0.9], [0.4, 0.4]))
    kept: list[list[Tensor]] = []

    def judged(learner: HeadLearner, _: object) -> Judgement:
        kept.append([parameter.detach().clone() for parameter in learner.module.parameters()])
        alpha = next(alphas)
        return Judgement(alpha, alpha, 8)

    monkeypatch.setattr(HeadLearner, "judge", judged)
    made, course = trained(tmp_path)
    losses: list[Any] = [entry["loss"] for entry in course.curve]
    assert losses[3] < losses[2]  # by its loss the last one would be the best
    assert course.best_step == 80
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), kept[2], strict=True))


def test_T29_what_explains_a_low_acceptance_is_told_before(llama: Path, tmp_path: Path) -> None:
    """Drafts had 1.9 tokens per step where others reported twice that: another template, a base model, another type."""
    draft = tiny_model("llama", tmp_path / "draft", num_hidden_layers=1)
    assert not {"chat template", "float32 and float16"} & {f.value for f in compatibility(str(llama), str(draft))}
    config, settings = draft / "config.json", draft / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    for template, reason in (("{{ messages[0].content }}", "another one"), (None, "base and an instruct")):
        for path in draft.glob("chat_template*"):
            path.unlink()
        state = {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
        settings.write_text(json.dumps(state | ({"chat_template": template} if template else {})))
        found = {f.value: f for f in compatibility(str(llama), str(draft))}
        assert found["chat template"].level == "warning"
        assert ("base and an instruct" in found["chat template"].rule) == (reason == "base and an instruct")
        assert "float32 and float16" in found


def test_T30_a_speculator_loads_from_the_arguments_that_serve_it(llama: Path, head: Path, tmp_path: Path) -> None:
    """Exported speculators did not load in the server that they were made for: what is emitted is loaded here."""
    recipe = a_recipe(llama, head_draft(head))
    pair = package(quantized(llama, "W8A8"), None, recipe, tmp_path, head)
    job = serving(pair)
    told = dict(zip(job.arguments[::2], job.arguments[1::2], strict=True))
    speculative = json.loads(told["--speculative-config"])
    module, _, name = speculative["model"].rpartition(".")
    vllm_config = SimpleNamespace(
        additional_config=json.loads(told["--additional-config"]),
        model_config=SimpleNamespace(model=str(job.model)),
        speculative_config=SimpleNamespace(num_speculative_tokens=speculative["num_speculative_tokens"]),
    )
    proposer = getattr(importlib.import_module(module), name)(vllm_config)
    proposer.follow(torch.randn(1, 64), [1], [[5]])
    ((first, second),) = proposer.propose([[5]])
    assert {first, second} <= set(range(300))


def with_states(count: int, seed: int) -> list[Rollout]:
    """Sequences in which two tokens decide the next; states are dense, of very different sizes, and noisy."""
    generator = torch.Generator().manual_seed(9)
    rows_VH, size = torch.randn(6, 32, generator=generator), torch.logspace(-1, 2, 12)[:, None]
    made = rollouts(count, seed)
    return [replace(one, states_MS=(rows_VH[one.tokens_T] * size[: len(one.tokens_T)] + 0.05).half()) for one in made]


def test_T33_states_in_eight_bits_train_as_good_a_head(tmp_path: Path) -> None:
    """Hidden states fill disks, and nobody knew whether FP8 ones train drafts that are accepted as often."""
    scores, sizes, kept = [], [], []
    for states in ("float16", "fp8_e4m3"):
        folder = tmp_path / states
        for i in range(3):
            folder.mkdir(exist_ok=True)
            draft_data._write(folder / f"{i}.safetensors", with_states(8, i), TrainingData(states=states))
        parts = [lay_out(list(draft_data._read(folder / f"{i}.safetensors")), 2, None, 20) for i in range(3)]
        head = MLPSpeculator(SpeculatorShape(32, 20, 2, 16))
        initialize(head, torch.Generator().manual_seed(0))
        course = train_draft.train(HeadLearner(head), (parts[0], parts[1]), parts[2], SPEC, 0, folder, QUIET)
        scores.append(course.best)
        sizes.append((folder / "0.safetensors").stat().st_size)
        kept.append(parts[0].hidden_MH)
    assert not torch.equal(kept[0], kept[1])
    assert float((kept[1] / kept[0] - 1).abs().max()) < 0.1  # 3 bits behind the leading one, small ones fewer
    assert sizes[1] < 0.7 * sizes[0]  # ids and laws stay as they are
    assert scores[0] > 2.0  # of 3
    assert abs(scores[1] - scores[0]) < 0.1  # tokens per step


def test_T36_drafts_that_rounding_spoilt_are_not_published() -> None:
    """A kernel sliced a draft's packed q/k/v and read garbage: nothing failed, but hardly a draft was accepted."""

    def against(kl: float, accepted: int, of: int) -> list[str]:
        rate = Measurement(metric="alpha", value=accepted / of, unit="", n=of)
        update = {"drafted": of, "accepted": accepted, "alpha": rate}
        speed = example_results.speed()
        speed = speed.model_copy(update={"acceptance": (speed.acceptance[0].model_copy(update=update),)})
        accuracy = example_results.sound().model_copy(update={"draft": example_results.draft(kl=kl)})
        return blockers(Results(name="t", recipe={}, environment={}, accuracy=accuracy, speed=speed))

    assert against(0.05, 40, 68) == []
    (reason,) = against(0.6, 40, 68)
    assert reason.startswith("the draft: KL 0.600 nats/token from the model that it was made from, not at most 0.2")
    (reason,) = against(0.05, 0, 68)
    assert reason.startswith("quantized + draft: 0 of 68 drafted tokens stand")


def test_T54_a_draft_reads_the_targets_own_ids(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts got text that was encoded anew in every round, with another BOS in front; two tokenizers crashed."""
    pair, recipe = with_draft(llama, tmp_path / "a")
    opened = open_pair(pair, kernels="torch")
    assert isinstance(opened.drafter, ModelDrafter)
    draft, held = opened.drafter.lm, list[int]()
    forward, truncate = Decoder.forward, Decoder.truncate

    def reads(self: Decoder, tokens_T: Tensor, last: int | None = None) -> Tensor:
        if self is draft:
            held.extend(tokens_T.tolist())
        return forward(self, tokens_T, last)

    def forgets(self: Decoder, length: int) -> None:
        if self is draft:
            del held[length:]
        truncate(self, length)

    monkeypatch.setattr(Decoder, "forward", reads)
    monkeypatch.setattr(Decoder, "truncate", forgets)
    generation = opened.generate("The quick brown", 24).generation
    assert len(generation.steps) > 3
    prompt = opened.model.tokenizer.chat([{"role": "user", "content": "The quick brown"}])
    both = [*prompt, *generation.tokens]
    certain = len(both) - 4  # behind that the draft holds what was rejected last
    assert len(held) >= certain > len(prompt)
    assert held[:certain] == both[:certain]

    target, other = quantized(llama, "W8A8"), quantized(llama, "W8A8", 1)
    names = target.tokenizer.vocabulary()
    strange: Any = SimpleNamespace(vocabulary=lambda: {name: i ^ 1 for name, i in names.items()})
    with pytest.raises(PairError, match="both must share one tokenizer"):
        package(target, replace(other, tokenizer=strange), recipe, tmp_path / "b")


def run_snippet(recipe: Recipe, pair: Path) -> tuple[dict[str, Any], str]:
    """The emitted Python, run as it is: its names, and what it printed."""
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()) as printed:
        exec(transformers_snippet(recipe, None, str(pair)), names)
    return names, printed.getvalue().removesuffix("\n")


@pytest.mark.parametrize(
    ("scheme", "policy"), [("W8A8", "fixed"), ("FP8_DYNAMIC", "heuristic"), ("W4A16", "confidence")]
)
def test_T57_assisted_equals_greedy_in_transformers(llama: Path, scheme: str, policy: str, tmp_path: Path) -> None:
    """Assisted generation wrote another text than greedy decoding: the emitted snippet is run, in this release."""
    pair, recipe = with_draft(llama, tmp_path, scheme)
    length = recipe.speculation.draft_length.model_copy(update={"policy": policy})
    speculation = recipe.speculation.model_copy(update={"draft_length": length})
    names, printed = run_snippet(recipe.model_copy(update={"speculation": speculation}), pair)
    plain = names["target"].generate(**names["inputs"], max_new_tokens=64)[0]
    assert len(plain) > 20
    assert printed == names["tokenizer"].decode(plain)


def test_T57_prompt_lookup_equals_greedy_in_transformers(llama: Path, tmp_path: Path) -> None:
    """See above, for drafts that are looked up."""
    recipe = a_recipe(llama, {"kind": "ngram"})
    names, printed = run_snippet(recipe, package(quantized(llama, "W8A8"), None, recipe, tmp_path))
    assert printed == names["tokenizer"].decode(names["target"].generate(**names["inputs"], max_new_tokens=64)[0])


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "W4A16"])
def test_T63_a_quantized_assistant_drafts_with_its_cache(llama: Path, scheme: str, tmp_path: Path) -> None:
    """An assistant in 8 bits failed, or wrote something else, as soon as it used its cache."""
    pair, recipe = with_draft(llama, tmp_path, scheme)
    names, _ = run_snippet(recipe, pair)
    draft, inputs = names["draft"], names["inputs"]
    calls = list[int]()
    draft.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    names["target"].generate(**inputs, max_new_tokens=24, assistant_model=draft)
    assert calls
    assert max(calls[1:]) <= 4  # of each round the new tokens only, so the cache was used
    cached, anew = (draft.generate(**inputs, max_new_tokens=16, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, anew)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task with examples, answered by choice."""
    rows = [{"q": f"Number {i}", "choices": [" appear", " jumps"], "gold": i % 2} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    task = {
        "task": "peers_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl"), "train": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "fewshot_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks" / "peers_choice.yaml").write_text(json.dumps(task))
    monkeypatch.setattr(harness.tasks, "eval_dir", lambda: tmp_path)
    return "peers_choice"


class Listening(Decoder):
    """A decoder that remembers what it was asked."""

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        if self.length == 0:
            self.__dict__.setdefault("heard", []).append(tokens_T.tolist())
        return super().forward(tokens_T, last)

    @property
    def prompts(self) -> list[list[int]]:
        return list(self.__dict__.get("heard", []))


def asked(folder: Path, task: TaskSpec) -> tuple[TaskScores, list[list[int]]]:
    """A task's scores, and the prompts as the model read them."""
    model = load(folder)
    decoder = Listening.from_float(model)
    found = harness.evaluate(decoder, model.tokenizer, task, model.arch.eos_ids, QUIET)
    assert isinstance(decoder, Listening)
    return found, decoder.prompts


def test_T64_bos_is_the_tokenizers_and_recorded(llama: Path, questions: str, tmp_path: Path) -> None:
    """A default about BOS changed between two versions, and scores fell from .90 to .76 without a word."""
    task = TaskSpec(name=questions, num_fewshot=1)
    with_bos, prompts = asked(llama, task)
    assert with_bos.condition["bos"] is True
    assert prompts
    assert all(prompt[0] == 1 and 1 not in prompt[1:] for prompt in prompts)
    bare = tiny_model("llama", tmp_path / "bare")
    path = bare / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    without, prompts = asked(bare, task)
    assert without.condition["bos"] is False
    assert all(1 not in prompt for prompt in prompts)
    with pytest.raises(SourceError, match=r"(bos|tokenizer) .* cannot be compared"):
        compare(task, "qspec", with_bos, without)
    for folder, added in ((llama, True), (bare, False)):
        assert harness.evaluate_folder(folder, task).condition["bos"] is added


def test_T66_templates_are_those_of_both_arms_and_said(llama: Path, questions: str) -> None:
    """An instruct model asked without its template, or one arm with and one without, lost or gained 40 points."""
    plain, templated = (TaskSpec(name=questions, num_fewshot=2, chat_template=chat) for chat in (False, True))
    found, prompts = asked(llama, templated)
    user, assistant = (load_tokenizer(llama).encode(turn, special=False)[0] for turn in ("<|user|>", "<|assistant|>"))
    assert (found.condition["chat_template"], found.condition["fewshot_form"]) == (True, "turns of a conversation")
    assert all((prompt.count(user), prompt.count(assistant)) == (3, 3) for prompt in prompts)  # two examples, and it
    other, prompts = asked(llama, plain)
    assert all(user not in prompt for prompt in prompts)
    with pytest.raises(SourceError, match="cannot be compared"):
        compare(plain, "qspec", found, other)
    said = [_verdict(compare(task, "qspec", arm, arm)) for task, arm in ((plain, other), (templated, found))]
    assert ["without its chat template" in sentence for sentence in said] == [True, False]


def _verdict(task: TaskResult) -> str:
    (found,) = findings(Results(name="t", recipe={}, environment={}, accuracy=Accuracy(tasks=(task,))))
    return found.text


def test_T68_noise_is_not_taken_for_an_effect() -> None:
    """A quantized model was "better" than its original: the noise of other questions was larger than the effect."""

    def arm(scores: list[int], name: str = "p") -> TaskScores:
        samples = [Sample("t", i, f"d{i}", f"{name}{i}", float(s), False, False) for i, s in enumerate(scores)]
        return TaskScores("acc", samples, {})

    original, luckier = arm([1] * 60 + [0] * 40), arm([1] * 57 + [0] * 3 + [1] * 7 + [0] * 33)
    found = compare(TaskSpec(), "qspec", original, luckier)
    assert (found.quantized.value, found.only_original, found.only_quantized) == (0.64, 3, 7)
    assert found.verdict.startswith("no difference detected, McNemar p = 0.34; a drop of ")
    assert found.detectable > 0.04  # more than what was seen
    assert found.difference.ci is not None
    assert found.difference.ci[0] < 0 < found.difference.ci[1]
    with pytest.raises(SourceError, match="not asked the same questions"):
        compare(TaskSpec(), "qspec", original, arm([1] * 100, "other"))
