"""Tasks through an OpenAI-style server: item by item what qspec's own engine gives on the same model."""

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

import pytest

from qspec.bridges import harness
from qspec.bridges.harness import models, scores, tasks
from qspec.bridges.harness.definitions import passes
from qspec.bridges.harness.engine import Engine
from qspec.bridges.harness.prompts import CHAT
from qspec.bridges.harness.served import ServedModel
from qspec.bridges.hf import load_folder
from qspec.bridges.openai_api import Api
from qspec.errors import RecipeError, SourceError
from qspec.nn.eager.decoder import Decoder
from qspec.progress import Progress
from qspec.records import LoadedModel
from qspec.schema.recipe import TaskSpec
from tests.openai_server import NAME, Model, serve
from tests.tiny import tiny_model

EOS, QUIET = {2}, Progress(quiet=True)
CONTEXT = 200
TOLERANCE = 2e-4
"""Sums of up to 30 log-probabilities in float32, computed in other groups of rows."""
PAIRS = [(f"The quick brown {word}", tail) for word in ("fox", "dog and the") for tail in (" jumps over", " 345", "")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server(model: LoadedModel) -> Iterator[tuple[Model, str]]:
    served = Model(Decoder.from_float(model), model.tokenizer, EOS, CONTEXT)
    with serve(served) as url:
        yield served, url


def _served(model: LoadedModel, url: str, chat: bool = False) -> ServedModel:
    return ServedModel(Api(url), model.tokenizer, EOS, CONTEXT, chat, at_once=4)


@pytest.fixture
def both(model: LoadedModel, server: tuple[Model, str]) -> tuple[Any, Any]:
    """The harness's interface over the engine, and over the server."""
    engine = Engine(Decoder.from_float(model), model.tokenizer, EOS)
    return models.harness_model(engine, QUIET), models.harness_model(_served(model, server[1]), QUIET)


def _requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_loglikelihoods_equal_the_engines(both: tuple[Any, Any]) -> None:
    """Would catch logprobs one position off, the generated token counted in, a second BOS, answers out of order."""
    mine, its = (arm.loglikelihood(_requests("loglikelihood", *PAIRS)) for arm in both)
    assert [value for value, _ in its] == pytest.approx([value for value, _ in mine], abs=TOLERANCE)
    assert [greedy for _, greedy in its] == [greedy for _, greedy in mine]


def test_rolling_loglikelihoods_equal_the_engines(both: tuple[Any, Any]) -> None:
    """Would catch a first token that is not scored behind BOS."""
    texts = [("Numbers such as 0, 12 and 345 appear here.",), ("naïve",)]
    mine, its = (arm.loglikelihood_rolling(_requests("loglikelihood_rolling", *texts)) for arm in both)
    assert its == pytest.approx(mine, rel=1e-5)  # sums of up to 40 terms


def test_a_long_text_fits_the_servers_context(both: tuple[Any, Any], server: tuple[Model, str]) -> None:
    """Would catch windows that fill the context and leave no room for the token that a server must generate."""
    (found,) = both[1].loglikelihood_rolling(_requests("loglikelihood_rolling", ("The quick brown fox jumps. " * 60,)))
    assert found < 0
    assert max(len(asked["prompt"]) for asked in server[0].seen) == CONTEXT - 1


@pytest.mark.parametrize("until", [[], ["\n\n", "e"], ["</s>"], ["<|user|>", " the"]])
def test_answers_equal_the_engines(until: list[str], both: tuple[Any, Any]) -> None:
    """Would catch stop strings and stop tokens that are lost, and a limit that is off by one."""
    arguments = [(text, {"until": list(until), "max_gen_toks": 16, "do_sample": False}) for text, _ in PAIRS]
    mine, its = (arm.generate_until(_requests("generate_until", *arguments)) for arm in both)
    assert its == mine
    assert any(mine)


def test_cuts_are_counted(model: LoadedModel, server: tuple[Model, str]) -> None:
    """Would catch answers that hit the limit, and prompts that lost their beginning, without a word."""
    served = _served(model, server[1])
    served.answer("The quick brown", "short", [], 3)
    served.answer("jumps over the lazy dog " * 40, "long", [], 3)
    assert served.cuts.answers >= {"short"}
    assert served.cuts.prompts == {"long"}
    assert len(server[0].seen[-1]["prompt"]) == CONTEXT - 3


def test_a_chat_api_gets_messages(model: LoadedModel, server: tuple[Model, str]) -> None:
    """Would catch a template applied twice, plain text passed off as a conversation, made-up likelihoods."""
    served, messages = _served(model, server[1], chat=True), [{"role": "user", "content": "The quick"}]
    engine = Engine(Decoder.from_float(model), model.tokenizer, EOS)
    prompt = CHAT + json.dumps(messages)
    assert served.answer(prompt, "a", [], 8) == engine.answer(prompt, "a", [], 8)
    assert server[0].seen[-1]["messages"] == messages
    with pytest.raises(RecipeError, match="chat_template: true"):
        served.answer("The quick", "b", [], 8)
    with pytest.raises(RecipeError, match="probabilities"):
        served.score([1, 50], [60])


def test_a_server_that_is_not_there(model: LoadedModel, server: tuple[Model, str]) -> None:
    """Would catch a typo in an address or a name that ends in a stack trace, or in another model's scores."""
    with pytest.raises(SourceError, match="does not answer"):
        Api("http://127.0.0.1:9/v1").facts()
    with pytest.raises(SourceError, match=f"name one of: {NAME}"):
        Api(server[1], "other").facts()
    with pytest.raises(SourceError, match="answers 400"):
        Api(server[1]).complete([1] * (CONTEXT + 1), 4, [], [])


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "wikitext"])
def test_local_tasks_equal_the_engines(
    name: str, model: LoadedModel, server: tuple[Model, str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a definition that needs the network, rows that are not the task's, arms asked differently."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    task = TaskSpec(name=name, num_fewshot=1 if name == "gsm8k" else 0, limit=2, max_gen_toks=12, run_code=True)
    harness.require(task, CONTEXT)
    lm = Decoder.from_float(model, max_length=CONTEXT - 2 if name == "wikitext" else CONTEXT)
    mine = harness.evaluate(lm, model.tokenizer, task, EOS, QUIET)
    its = harness.evaluate_served(_served(model, server[1]), task, {"server": "test"}, QUIET)
    assert [(s.task, s.doc_id, s.doc_hash, s.prompt_hash, s.cut, s.prompt_cut) for s in its.samples] == [
        (s.task, s.doc_id, s.doc_hash, s.prompt_hash, s.cut, s.prompt_cut) for s in mine.samples
    ]
    assert [s.score for s in its.samples] == pytest.approx([s.score for s in mine.samples], rel=1e-4)
    assert its.condition["prompts"] == mine.condition["prompts"]
    assert its.own == {"server": "test"}
    available = {"gsm8k": 1319, "humaneval": 164, "wikitext": 60}  # articles, as its paper counts them
    assert its.condition["rows_available"] == available[name]


def test_code_is_run_only_where_it_is_allowed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch model-written code that runs because a task was named."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    with pytest.raises(RecipeError, match="run_code: true"):
        harness.require(TaskSpec(name="humaneval", num_fewshot=0), 4096)


def test_programs_are_judged_by_how_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch failed assertions and endless loops that pass, and programs that see this process's secrets."""
    monkeypatch.setattr("qspec.bridges.harness.definitions.SECONDS", 2)
    monkeypatch.setenv("SECRET", "x")
    assert passes("import os\nassert 1 + 1 == 2 and 'SECRET' not in os.environ")
    assert not passes("assert 1 + 1 == 3")
    assert not passes("while True: pass")
    assert not passes("x = bytearray(4 << 30)")


def test_texts_are_scored_by_the_reciprocal_of_perplexity() -> None:
    """Would catch pairs of a log-likelihood and a count that are compared as if more of both were better."""
    assert scores._score((-3.0, 3)) == pytest.approx(0.36787944)
    assert scores._score(True) == 1.0
    assert scores._score(("a", 3)) is None


def test_rows_that_are_nowhere_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Would catch a missing file that ends in a stack trace of the harness."""
    monkeypatch.setenv("QSPEC_DATA", str(tmp_path))
    with pytest.raises(SourceError, match="set QSPEC_DATA"), tasks.find_tasks(TaskSpec(name="gsm8k")) as (names, known):
        known.load(names)
