"""lm-evaluation-harness through qspec's engine, item by item against the harness's own transformers backend."""

from dataclasses import replace
import json
from pathlib import Path
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qspec.bridges import harness
from qspec.bridges.harness import engine as harness_engine, models, tasks
from qspec.bridges.harness.engine import Engine
from qspec.bridges.harness.prompts import CHAT, Cuts
from qspec.bridges.hf import load_folder, load_tokenizer
from qspec.errors import RecipeError
from qspec.nn.eager.decoder import Decoder
from qspec.progress import Progress
from qspec.schema.recipe import TaskSpec
from tests.arms import HFModel, Letters, Parrot
from tests.tiny import tiny_model

EOS = [2]
QUIET = Progress(quiet=True)
CONTEXTS = ["The quick brown", "The quick brown fox", "The quick brown fox jumps over", "Numbers such as 0, ", ""]
TOLERANCE = 2e-4
"""Sums of up to 30 log-probabilities in float32, whose rows were computed in other groups (cached prefixes)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def ours(folder: Path) -> Any:
    model = load_folder(folder)
    return models.harness_model(Engine(Decoder.from_float(model), model.tokenizer, EOS), QUIET)


@pytest.fixture
def theirs(folder: Path) -> Any:
    return models.folder_model(folder, Cuts())


@pytest.fixture
def local_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A multiple-choice task of twelve items, found in the `tasks` folder."""
    rows = [{"q": f"Numbers such as {i}", "choices": [" appear", " jumps", " fox"], "gold": i % 3} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 7},
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny_choice.yaml").write_text(json.dumps(task))
    monkeypatch.setattr(tasks, "eval_dir", lambda: tmp_path)
    return "tiny_choice"


def _requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_loglikelihoods_equal_those_of_transformers(ours: Any, theirs: Any):
    """Would catch a wrong split of context and continuation, a shifted position, a stale cache, a doubled BOS."""
    pairs = [(context, tail) for context in CONTEXTS for tail in (" fox jumps", " dog")]
    pairs += [("The quick ", "brown"), ("<s>The quick", " brown"), ("jumps over the lazy dog " * 30, "and then")]
    mine = ours.loglikelihood(_requests("loglikelihood", *pairs))
    reference = theirs.loglikelihood(_requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in reference], abs=TOLERANCE)


def test_a_greedy_continuation_is_recognised(folder: Path):
    """Would catch an `is_greedy` that is constant, or that looks at the first token only."""
    engine, prompt = Engine(HFModel(folder), load_tokenizer(folder), EOS), [1, 50, 60, 70]
    greedy = list(prompt)
    for _ in range(3):
        greedy.append(int(HFModel(folder).forward(torch.tensor(greedy), last=1).argmax()))
    assert engine.score(prompt, greedy[4:])[1]
    assert not engine.score(prompt, [*greedy[4:6], greedy[6] + 1])[1]


def test_rolling_loglikelihoods_equal_those_of_transformers(ours: Any, theirs: Any):
    """Would catch windows over a long text that score a token twice or lose context."""
    texts = [("The quick brown fox jumps over the lazy dog. ",), ("Numbers such as 0, 12 and 345 appear here. " * 20,)]
    mine = ours.loglikelihood_rolling(_requests("loglikelihood_rolling", *texts))
    reference = theirs.loglikelihood_rolling(_requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    assert mine == pytest.approx(reference, rel=1e-5)  # sums of up to 300 terms


def test_a_text_begins_as_for_the_harness(folder: Path, tmp_path: Path):
    """Would catch a stop token in front of texts where the tokenizer has a BOS but adds none."""
    silent = tmp_path / "silent"
    shutil.copytree(folder, silent)
    told = json.loads((silent / "tokenizer.json").read_text(encoding="utf-8"))
    (silent / "tokenizer.json").write_text(json.dumps(told | {"post_processor": None}), encoding="utf-8")
    model = load_folder(silent)
    assert model.tokenizer.encode("") == []
    mine = models.harness_model(Engine(Decoder.from_float(model), model.tokenizer, EOS), QUIET)
    reference = models.folder_model(silent, Cuts())
    assert mine.prefix_token_id == reference.prefix_token_id
    asked = _requests("loglikelihood_rolling", ("The quick brown fox jumps over the lazy dog. ",))
    assert mine.loglikelihood_rolling(asked) == pytest.approx(reference.loglikelihood_rolling(asked, True), rel=1e-5)


@pytest.mark.parametrize("until", [[], ["\n\n"], [" the", "e"], ["</s>"], ["</s>", "o"]])
def test_answers_equal_those_of_transformers(until: list[str], ours: Any, theirs: Any):
    """Would catch a stop string that is missed or kept, a limit that is off by one, a prompt cut at the wrong end."""
    options = {"until": until, "max_gen_toks": 24, "do_sample": False}
    contexts = [*CONTEXTS[:-1], "jumps over the lazy dog " * 30]
    arguments = [(context, dict(options, until=list(until))) for context in contexts]
    mine = ours.generate_until(_requests("generate_until", *arguments))
    assert mine == theirs.generate_until(_requests("generate_until", *arguments), disable_tqdm=True)
    assert any(mine)


def test_sampling_defaults_of_the_authors_change_no_answers(folder: Path, ours: Any, tmp_path: Path):
    """Would catch a repetition penalty, or a length, of generation_config.json in what is measured by transformers."""
    told = {"repetition_penalty": 9.0, "max_new_tokens": 1, "eos_token_id": 2}
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    asked = _requests("generate_until", ("The quick brown fox", {"until": [], "max_gen_toks": 12, "do_sample": False}))
    assert models.folder_model(copy, Cuts()).generate_until(asked, disable_tqdm=True) == ours.generate_until(asked)


def _engine(script: str, **options: Any) -> tuple[Engine, Parrot]:
    lm = Parrot(Letters().encode(script, special=False), **options)
    return Engine(lm, Letters(), EOS), lm


def test_generation_ends_at_the_stop_string():
    """Would catch a stop string that is only cut off afterwards, at the price of the whole token limit."""
    engine, lm = _engine("so the answer is (B). Question: what")
    assert engine.answer("Q", "key", ["Question:"], 500) == "so the answer is (B). "
    assert lm.length <= 2 + len("so the answer is (B). Question:")
    assert not engine.cuts.answers


def test_a_stop_string_in_pieces_of_characters():
    """Would catch a stop string that straddles tokens which are no whole characters."""
    engine, _ = _engine("eins 模型 zwei")
    assert engine.answer("Q", "key", ["型"], 100) == "eins 模"


def test_cut_answers_and_prompts_are_counted():
    """Would catch a truncated answer that counts as a wrong one without a word, and a prompt that lost its head."""
    engine, lm = _engine("no end in sight ")
    lm.max_length = 40
    engine.answer("short", "a", ["?"], 20)
    engine.answer("much longer than twenty tokens", "b", ["si"], 20)
    assert engine.cuts == Cuts(answers={"a"}, prompts={"b"})
    with pytest.raises(RecipeError, match="max_gen_toks"):
        engine.answer("short", "a", [], 40)


def test_chat_prompts_become_tokens_as_served():
    """Would catch a chat prompt that is tokenised as text: special tokens as letters, a second BOS."""
    engine, _ = _engine("x")
    messages = [{"role": "user", "content": "hi"}]
    assert engine.encode(CHAT + json.dumps(messages)) == Letters().chat(messages)
    started = [*messages, {"role": "assistant", "content": "The"}]
    assert engine.encode(CHAT + json.dumps(started)) == Letters().chat(messages) + Letters().encode("The", False)


def test_sampling_tasks_are_refused(ours: Any):
    """Would catch a task that asks for sampling and silently gets greedy answers."""
    with pytest.raises(RecipeError, match="greedily"):
        ours.generate_until(_requests("generate_until", ("a", {"do_sample": True, "temperature": 0.7})))


def test_a_task_of_ones_own_on_both_backends(local_task: str, folder: Path):
    """Would catch backends that disagree on an item, and conditions that a report cannot do without."""
    task = TaskSpec(name=local_task, num_fewshot=0, limit=8)
    model = load_folder(folder)
    mine = harness.evaluate(Decoder.from_float(model), model.tokenizer, task, EOS, QUIET)
    reference = harness.evaluate_folder(folder, task)
    one, other = ([replace(sample, likelihood=None) for sample in arm.samples] for arm in (mine, reference))
    assert one == other
    likelihoods = [[sample.likelihood for sample in arm.samples] for arm in (mine, reference)]
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=TOLERANCE)
    assert mine.metric == "acc,none"
    assert len(mine.samples) == 8
    assert {0.0, 1.0} == {sample.score for sample in mine.samples}
    stated = {"task_version": "7", "fewshot": "0", "limit_per_task": 8, "rows_available": 12, "bos": True}
    stated |= {"chance": 0.3333}
    assert stated.items() <= mine.condition.items()


def test_mmlu_pro_runs_offline_on_the_harness_definition(data_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a prompt that is not the benchmark's, a filter that never matches, subjects that are mixed up."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    prompts: list[str] = []

    def answer(self: Engine, context: str, key: str, stops: list[str], limit: int) -> str:
        prompts.append(context)
        assert (stops, limit) == (["Question:"], 2048)
        return " The answer is (A)."  # the filter wants `answer is (A)` in this very form

    monkeypatch.setattr(harness_engine.Engine, "answer", answer)
    task = TaskSpec(limit=25, subjects=("computer science", "law"))
    scores = harness.evaluate(HFModel(folder), load_tokenizer(folder), task, EOS, QUIET)
    assert len(prompts) == len(scores.samples) == 50
    assert prompts[0].startswith("The following are multiple choice questions (with answers) about computer science.")
    assert all(prompt.count("Question:\n") == 6 for prompt in prompts)
    assert all(prompt.endswith("Answer: Let's think step by step.") for prompt in prompts)
    assert 0 < sum(sample.score for sample in scores.samples) < 50
    assert scores.condition["task_version"] == "3.1"
    assert scores.condition["rows_available"] == 410 + 1101
    assert 0.1 <= float(str(scores.condition["chance"])) <= 0.2  # most of its questions have ten options, none five
    assert scores.metric == "exact_match,custom-extract"


def test_unknown_names_are_one_line(monkeypatch: pytest.MonkeyPatch):
    """Would catch a typo in a recipe that ends in a stack trace of the harness."""
    monkeypatch.setattr(tasks, "_index", lambda defaults: SimpleNamespace(all_tasks=["arc_easy", "hellaswag"]))
    for task, message in (
        (TaskSpec(name="helaswag"), "did you mean 'hellaswag'"),
        (TaskSpec(name="arc", subjects=("easy", "hard")), "'arc_hard'"),
    ):
        with pytest.raises(RecipeError, match=message), tasks.find_tasks(task):
            pass


def test_the_leaderboards_mmlu_pro_reads_the_same_rows(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a task that is refused offline although its rows are those of `mmlu_pro`, which lie here."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert tasks.require(TaskSpec(name="leaderboard_mmlu_pro", limit=3), 4096) == 3


def test_mmlu_pro_by_choices_runs_offline(data_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch few-shot examples that are missing, choices that are not its ten, a right one that is mixed up."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked: list[str] = []

    def score(self: Engine, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        asked.append(Letters().decode(context))
        return (-1.0 if Letters().decode(continuation) == " B" else -2.0), False

    monkeypatch.setattr(harness_engine.Engine, "score", score)
    task = TaskSpec(name="leaderboard_mmlu_pro", limit=20)
    found = harness.evaluate(HFModel(folder), Letters(), task, EOS, QUIET)
    assert found.metric == "acc,none"
    assert found.condition["fewshot"] == "5"
    assert 0.1 <= float(str(found.condition["chance"])) <= 0.2
    assert all(prompt.count("Answer:") == 6 for prompt in asked)
    assert {sample.score: sample.likelihood for sample in found.samples} == {1.0: -1.0, 0.0: -2.0}


def _write_task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}"}
    task["dataset_kwargs"] = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
    (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task | fields))


def test_right_answers_keep_their_likelihood(
    local_task: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch the likelihood of another choice, of another item (they are asked in another order), or a share."""
    model = load_folder(folder)
    engine = Engine(Decoder.from_float(model), model.tokenizer, EOS)
    asked = TaskSpec(name=local_task, num_fewshot=0)
    found = harness.evaluate(Decoder.from_float(model), model.tokenizer, asked, EOS, QUIET)
    right = [[" appear", " jumps", " fox"][i % 3] for i in range(12)]
    expected = [
        engine.score(*engine.encode_pair(f"Numbers such as {i}", f" {word}"))[0] for i, word in enumerate(right)
    ]
    assert [sample.likelihood for sample in found.samples] == pytest.approx(expected, abs=TOLERANCE)

    text = [{"q": f"Numbers {i}", "word": "fox"} for i in range(4)]
    both = [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc", "aggregation": "mean"}]
    _write_task(tmp_path, "said", text, output_type="loglikelihood", doc_to_target=" {{word}}", metric_list=both)
    written = [{"metric": "exact_match"}]
    _write_task(tmp_path, "told", text, output_type="generate_until", doc_to_target="{{word}}", metric_list=written)
    monkeypatch.setattr(tasks, "eval_dir", lambda: tmp_path)
    said, told = (
        harness.evaluate(
            Decoder.from_float(model), model.tokenizer, TaskSpec(name=name, num_fewshot=0, max_gen_toks=4), EOS, QUIET
        )
        for name in ("said", "told")
    )
    assert said.metric == "acc,none"
    assert {sample.score for sample in said.samples} <= {0.0, 1.0}
    expected = [engine.score(*engine.encode_pair(f"Numbers {i}", " fox"))[0] for i in range(4)]
    assert [sample.likelihood for sample in said.samples] == pytest.approx(expected, abs=TOLERANCE)
    assert {sample.likelihood for sample in told.samples} == {None}


@pytest.mark.parametrize(("stated", "expected"), [(("acc_norm", "acc"), "acc_norm"), (("acc", "acc_norm"), "acc")])
def test_a_task_is_scored_by_the_metric_that_it_states_first(
    stated: tuple[str, ...], expected: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch `acc` of a task whose choices differ in length, and which therefore states `acc_norm`."""
    rows = [{"q": "The", "gold": 1} for _ in range(2)]
    choices = {"doc_to_choice": ["quick", "quick brown fox jumps"], "doc_to_target": "gold"}
    metrics = [{"metric": metric} for metric in stated]
    _write_task(tmp_path, "long", rows, output_type="multiple_choice", metric_list=metrics, **choices)
    monkeypatch.setattr(tasks, "eval_dir", lambda: tmp_path)
    monkeypatch.setattr(harness_engine.Engine, "score", lambda _self, _a, b: (-(float(len(b)) ** 0.5), False))
    found = harness.evaluate(HFModel(folder), Letters(), TaskSpec(name="long", num_fewshot=0), EOS, QUIET)
    assert found.metric == f"{expected},none"
    assert [sample.score for sample in found.samples] == [float(expected == "acc_norm")] * 2


class Counting(HFModel):
    """A tiny model that is given tokens, and not asked."""

    def forward(self, tokens_T: torch.Tensor, last: int | None = None) -> torch.Tensor:
        self.fed, self.at = self.fed + len(tokens_T), self.at + len(tokens_T)
        return torch.zeros(last or len(tokens_T), self.vocab_size)

    def truncate(self, length: int) -> None:
        self.at = length

    @property
    def length(self) -> int:
        return self.at


def test_what_begins_alike_is_read_once(folder: Path):
    """Would catch choices that read their item's prompt anew, and items of two subjects in turns, whose worked examples
    are read for each. 50 items of 4 choices: each prompt's own tokens once, and each choice's."""
    shots = ["Worked examples of one subject. " * 8, "Other ones, of the other subject. " * 8]
    pairs = [(f"{shots[i % 2]}Item {i:02}:", f" choice {c}") for i in range(50) for c in "abcd"]
    lm = Counting(folder, max_length=4096)
    model = models.harness_model(Engine(lm, Letters(), EOS), QUIET)
    model.loglikelihood(_requests("loglikelihood", *pairs))
    naive = sum(len(Letters().encode(context + tail)) - 1 for context, tail in pairs)
    own, choice = len("Item 00:"), len(" choice a")
    assert lm.fed <= sum(map(len, shots)) + 50 * own + 200 * choice + 2
    assert naive > 15 * lm.fed


def test_scores_come_back_in_the_order_of_the_questions(ours: Any):
    """Would catch scores in the order in which prompts are read."""
    pairs = [(context, tail) for tail in (" fox", " dog jumps") for context in reversed(CONTEXTS[:4])]
    together = ours.loglikelihood(_requests("loglikelihood", *pairs))
    alone = [ours.loglikelihood(_requests("loglikelihood", pair))[0] for pair in pairs]
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], abs=TOLERANCE)
