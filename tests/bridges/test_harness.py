"""lm-evaluation-harness through qspec's engine, item by item against the harness's own transformers backend."""

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
    return models.asked_model(Engine(Decoder.from_float(model), model.tokenizer, EOS), QUIET)


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
    mine = models.asked_model(Engine(Decoder.from_float(model), model.tokenizer, EOS), QUIET)
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
    assert mine.samples == reference.samples
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
