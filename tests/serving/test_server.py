"""A pair behind an address, on qspec's own engine: whoever asks gets what they would get alone."""

from concurrent.futures import ThreadPoolExecutor
import itertools
import json
import os
from pathlib import Path
import signal
import socket
from threading import Event, Thread
import time
from typing import Any

import httpx
import pytest

from qspec.bridges.openai_api import Api
from qspec.bridges.vllm import server as vllm
from qspec.cli import main
from qspec.errors import OutputError
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package
from qspec.schema.api import NEUTRAL
from qspec.schema.recipe import Recipe
from qspec.serving import server as own_server
from qspec.serving.engine import Until
from qspec.serving.server import Server, serving_own
from qspec.speculation.batch import Batch
from tests.own_server import ask, chat, running, until
from tests.pairs import halves, recipe
from tests.serving.test_vllm import write_head

TEXTS = ["The quick brown fox", "0, 12 and", "jumps over the lazy dog and", "Numbers", "over"]


@pytest.fixture(scope="module")
def alone(pair: Path) -> LoadedPair:
    return open_pair(pair)


def test_answers_are_those_of_the_pair(served: tuple[Server, str], alone: LoadedPair) -> None:
    """Would catch another template, sampling or seed than those of `generate`, and a reply that no client can read."""
    _, url = served
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}):
        want = alone.generate(TEXTS[0], 24, **sampling)
        got = chat(url, TEXTS[0], max_tokens=24, **sampling).json()
        (choice,) = got["choices"]
        assert choice["message"] == {"role": "assistant", "content": want.text}
        assert choice["finish_reason"] == ("stop" if want.generation.stopped == "eos" else "length")
        assert got["usage"]["completion_tokens"] == len(want.generation.tokens)
    api = Api(url)
    facts = api.facts()
    assert (facts.name, facts.context, facts.engine) == ("tiny", 128, "qspec")
    prompt = alone.model.tokenizer.chat([{"role": "user", "content": TEXTS[0]}])
    assert api.complete(prompt, 24, [], []).text == alone.generate(TEXTS[0], 24, temperature=0.0).text
    timed = api.stream(prompt, 40)
    assert timed.tokens == 40  # beyond a stop token
    assert 1 < len(timed.arrivals) <= 40


def test_requests_share_passes_and_nothing_else(pair: Path, alone: LoadedPair) -> None:
    """Would catch an answer that depends on who else asks, and requests that wait for each other to end."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 9},
    ]
    asked = [(text, samplings[i % 3], 8 + 7 * i) for i, text in enumerate(TEXTS)]
    together, step = list[int](), Batch.step
    with running(pair, at_once=3) as (server, url), pytest.MonkeyPatch.context() as patch:

        def counted(self: Batch, emit: Any) -> Any:
            while not together and len(self) + server.scheduler.waiting.qsize() < len(asked):
                time.sleep(0.001)  # until all have asked
            together.append(len(self))
            return step(self, emit)

        patch.setattr(Batch, "step", counted)
        with ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(lambda one: chat(url, one[0], max_tokens=one[2], ignore_eos=True, **one[1]), asked))
    assert max(together) == 3
    found = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    for text, (prompt, sampling, most) in zip(found, asked, strict=True):
        want = alone.generate(prompt, most, **sampling)
        assert text.startswith(want.text) if want.generation.stopped == "eos" else text == want.text


def test_heads_and_lookups_draft_for_each_request(tmp_path: Path) -> None:
    """Would catch a head that reads another request's states, and a lookup that remembers for another place."""
    target = halves(tmp_path / "source")[0]
    head = write_head(target, tmp_path / "head")
    draft = {"kind": "mlp_speculator", "model": str(head), "n_predict": 2, "shared": True, "lookup": "suffix"}
    pair = package(target, None, Recipe.model_validate(recipe().as_dict() | {"draft": draft}), tmp_path, head)
    want = [open_pair(pair).generate(text, 24, temperature=0.0).text for text in TEXTS]
    with running(pair, at_once=3) as (server, url), ThreadPoolExecutor(len(TEXTS)) as pool:
        replies = list(pool.map(lambda text: chat(url, text, max_tokens=24, temperature=0), TEXTS))
        assert server.scheduler.counts.drafted > 0
    assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == want


def events(url: str, **asked: Any) -> list[dict[str, Any]]:
    text = chat(url, TEXTS[0], stream=True, **asked).text
    *found, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in found]


def test_a_stream_adds_up_to_the_answer(served: tuple[Server, str]) -> None:
    """Would catch pieces that are lost, doubled or out of order, and a stream whose end says nothing."""
    _, url = served
    whole = chat(url, TEXTS[0], max_tokens=24, temperature=0).json()["choices"][0]["message"]["content"]
    first, *middle, last, usage = events(url, max_tokens=24, temperature=0, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == whole
    assert len(middle) > 1
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)


def test_a_stop_string_ends_the_answer(served: tuple[Server, str]) -> None:
    """Would catch a stop string in the text, or a request that goes on computing behind it."""
    server, url = served
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = chat(url, TEXTS[0], **asked).json()["choices"][0]["message"]["content"]
    stop, before = whole[7:10], server.scheduler.counts.tokens
    choice = chat(url, TEXTS[0], stop=stop, **asked).json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert server.scheduler.counts.tokens - before < 60
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events(url, stop=[stop], **asked)]
    assert "".join(pieces) == choice["message"]["content"]


def test_tokens_are_counted_up_to_a_stop_string(served: tuple[Server, str], alone: LoadedPair) -> None:
    """Would catch tokens charged for that stood in the same step behind the stop, and counts that depend on timing."""
    decode, asked = alone.model.tokenizer.decode, {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = alone.generate(TEXTS[0], 40, temperature=0.0)
    stops = [answer.text[i : i + 2] for i in range(len(answer.text) - 2)]
    stops = [stop for stop in stops if "\ufffd" not in stop][::3]
    assert len(stops) > 3
    for stop in stops:
        got = chat(served[1], TEXTS[0], stop=stop, **asked).json()
        assert got["choices"][0]["message"]["content"] == answer.text[: answer.text.index(stop)]
        count = got["usage"]["completion_tokens"]
        before = decode(answer.generation.tokens[: count - 1])
        assert stop in decode(answer.generation.tokens[:count])
        assert stop not in before or before.endswith("\ufffd")  # half a character is held back


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (["ab", "cd"], ["ab", "cd"]),
        (["a<", "b", "<e", "nd>", "x"], ["a", "<b", "", "", ""]),  # "<b" is none after all
        (["a<end>b"], ["a"]),
        (["<en"], [""]),
    ],
)
def test_text_that_may_become_a_stop_string_is_held_back(pieces: list[str], told: list[str]) -> None:
    """Would catch the beginning of a stop string that was streamed before its end was there."""
    until = Until(("<end>", "STOP"))
    assert [until.add(piece) for piece in pieces] == told
    assert "".join(told) + until.rest() == "".join(pieces).partition("<end>")[0]


@pytest.mark.parametrize(
    ("path", "asked", "status", "said"),
    [
        ("completions", {"prompt": "a", "n": 2}, 400, "n 2"),
        ("completions", {"prompt": "a", "logprobs": 1}, 400, "logprobs 1"),
        ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty 0.5"),
        ("completions", {"prompt": "a", "logprobs": 0}, 400, "logprobs 0"),
        ("completions", {"prompt": "a", "min_p": 0.1}, 400, "min_p 0.1: is not done here"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias {'5': 1}"),
        ("completions", {"prompt": "a", "tools": [{"type": "function"}]}, 400, "tools [{'type': 'function'}]"),
        ("completions", {"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("completions", {"prompt": "a", "n": True}, 400, "n True"),
        ("completions", {"prompt": "a", "top_logprob": 0}, 400, "top_logprob: is not a field here"),
        ("completions", {"prompt": "a", "seed": 2**63}, 400, "seed 9223372036854775808"),
        ("completions", {"prompt": "a", "temperature": 1, "top_p": 1e-46}, 400, "top_p 1e-46: outside"),
        ("completions", {"prompt": "a", "temperature": 1e-46}, 400, "temperature 1e-46: below 0"),
        ("completions", {"prompt": "a", "temperature": 1e39}, 400, "temperature 1e+39: below 0, not finite"),
        ("completions", {}, 400, "prompt: is required"),
        ("completions", {"prompt": [10**6]}, 400, "token 1000000: the model knows 300"),
        ("completions", {"prompt": []}, 400, "empty prompt"),
        ("completions", {"prompt": "a", "max_tokens": 1000}, 400, "the context holds 128"),
        ("completions", {"prompt": "a", "max_tokens": 10**30}, 400, "the context holds 128"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature -1"),
        ("completions", {"prompt": "a", "stop": 5}, 400, "stop 5"),
        ("completions", {"prompt": "a", "stop": {"a": 1}}, 400, "stop {'a': 1}"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("completions", {"prompt": ["a", "b"]}, 400, "must have at most 1 item"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            400,
            "name: is not a field",
        ),
        ("completions", {"prompt": "a", "model": "gpt"}, 404, "ask for 'tiny'"),
        ("embeddings", {"input": "a"}, 404, "/v1/completions"),
    ],
)
def test_what_has_no_answer_is_one_line(
    served: tuple[Server, str], path: str, asked: dict[str, Any], status: int, said: str
) -> None:
    """Would catch a wish that is silently not granted, a traceback, and a server that ends."""
    reply = ask(served[1], path, **asked)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_neutral_values_are_taken(served: tuple[Server, str], path: str) -> None:
    """Would catch a client that sends every field of the API, most of them at their defaults, and is refused."""
    neutral: dict[str, Any] = {name: values[-1] for name, values in NEUTRAL.items()}
    neutral |= {"repetition_penalty": 1.0, "min_p": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"}
    neutral |= {"stop": [], "stream_options": None, "top_k": -1, "top_p": 1.0, "model": "tiny", "user": "u"}
    neutral |= {"metadata": {"any": "thing"}, "parallel_tool_calls": True}
    prompt: dict[str, Any] = (
        {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    plain, full, null = (
        ask(served[1], path, **prompt, max_tokens=8, temperature=0, **more)
        for more in ({}, neutral, dict.fromkeys(neutral))
    )
    assert (plain.status_code, full.status_code, null.status_code) == (200, 200, 200), full.text
    assert plain.json()["usage"] == full.json()["usage"] == null.json()["usage"]


def test_a_prompt_may_be_a_list_of_one(served: tuple[Server, str]) -> None:
    """Would catch lm-eval's own client, which sends lists of prompts, being refused."""
    texts = [ask(served[1], prompt=p, max_tokens=8, temperature=0) for p in ("over", ["over"], [[5, 60]], [5, 60])]
    found = [text.json()["choices"][0]["text"] for text in texts]
    assert (found[0], found[2]) == (found[1], found[3])


def test_a_template_that_refuses_a_conversation(served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a fault of the server where a client gives a role that the template does not know."""
    tokenizer: Any = served[0].scheduler.pair.model.tokenizer
    monkeypatch.setattr(tokenizer.inner, "chat_template", "{{ raise_exception('no system role') }}")
    reply = chat(served[1], TEXTS[0])
    assert (reply.status_code, "no system role" in reply.text) == (400, True)


def test_one_thread_at_a_time_tokenizes(served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch questions that fail because another one came at the same moment: "Already borrowed"."""
    kind, inside, most = type(served[0].scheduler.pair.model.tokenizer), list[str](), list[int]()
    encode = kind.encode

    def counted(self: Any, text: str, special: bool = True) -> Any:
        inside.append(text)
        time.sleep(0.01)
        most.append(len(inside))
        inside.remove(text)
        return encode(self, text, special)

    monkeypatch.setattr(kind, "encode", counted)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: ask(served[1], prompt=f"the fox {i}", max_tokens=1), range(8)))
    assert [reply.status_code for reply in replies] == [200] * 8
    assert most == [1] * 8


def test_drafts_are_counted_as_vllm_counts_them(pair: Path) -> None:
    """Would catch acceptance that nobody can watch in production, or that counts something else than the engine's."""
    with running(pair) as (_, url):
        usage = chat(url, TEXTS[0], max_tokens=30, temperature=0, ignore_eos=True).json()["usage"]
        root = url.removesuffix("/v1")
        assert httpx.get(f"{root}/health", trust_env=False).status_code == 200
        text = httpx.get(f"{root}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {name.removeprefix("qspec:"): int(value) for name, value in (line.split(" ") for line in lines)}
    drafts, accepted = (found[f"spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
    assert found["request_success_total"] == 1
    assert found["generation_tokens_total"] == 30
    assert drafts > 0
    assert found["spec_decode_num_draft_tokens_total"] <= 3 * drafts
    by_position = [value for name, value in found.items() if "per_pos" in name]
    assert sum(by_position) == accepted
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": found["spec_decode_num_draft_tokens_total"] - accepted,
    }
    assert by_position == sorted(by_position, reverse=True)
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0


def test_whoever_has_gone_is_not_computed_for(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a batch that fills with requests of clients that are not there any more."""
    step, steps, gone = Batch.step, itertools.count(), Event()

    def held(self: Batch, emit: Any) -> Any:
        assert next(steps) < 6 or gone.wait(30)  # a few steps, for a text that can be shown
        return step(self, emit)

    monkeypatch.setattr(Batch, "step", held)
    with running(pair) as (server, url):
        fields = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/completions", json=fields, timeout=60, trust_env=False) as reply:
            next(reply.iter_raw())
        until(lambda: not server.server_state.tasks)
        gone.set()
        until(lambda: server.scheduler.counts.requests)
        assert server.scheduler.counts.tokens < 100
        assert server.scheduler.running == 0


def hang_up(server: Server, text: str) -> socket.socket:
    """A question whose whole answer is wanted at once: until its end nothing is written that could fail."""
    asked = json.dumps({"prompt": text, "max_tokens": 100, "ignore_eos": True, "temperature": 0})
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(asked)}\r\n\r\n"
    connection.sendall(f"{head}{asked}".encode())
    return connection


def test_whoever_hangs_up_before_anything_is_written(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an engine that is busy for nobody, with an answer that goes on or with one that waits its turn."""
    step, begun, both_gone = Batch.step, Event(), Event()

    def held(self: Batch, emit: Any) -> Any:
        begun.set()
        assert both_gone.wait(30)
        return step(self, emit)

    monkeypatch.setattr(Batch, "step", held)
    with running(pair, at_once=1) as (server, url):
        first = hang_up(server, "a")
        assert begun.wait(30)
        second = hang_up(server, "b")
        until(lambda: server.scheduler.waiting.qsize())
        first.close()
        second.close()
        until(lambda: not server.server_state.tasks)
        both_gone.set()
        assert ask(url, prompt="c", max_tokens=2, ignore_eos=True).status_code == 200
        assert server.scheduler.counts.requests == 2
        assert server.scheduler.counts.tokens < 20


def test_a_fault_of_the_engine_ends_no_server(pair: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch a request that waits for ever behind a failed pass, a server that answers nobody afterwards, and a
    fault that is nowhere in its log.
    """

    def fails(self: Batch, emit: Any) -> None:
        raise RuntimeError("a pass failed")

    with running(pair) as (_, url):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Batch, "step", fails)
            reply = chat(url, TEXTS[0], max_tokens=8)
            assert (reply.status_code, "a pass failed" in reply.text) == (500, True)
            assert "a pass failed" in chat(url, TEXTS[0], max_tokens=8, stream=True).text
        assert chat(url, TEXTS[0], max_tokens=8).status_code == 200
    assert "RuntimeError: a pass failed" in capfd.readouterr().err


def test_a_text_that_cannot_be_read_fails_its_own_request(
    pair: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a client that waits for ever for what failed at its end, and a fault told to whoever is beside it."""
    with running(pair) as (server, url):
        decode = server.scheduler.pair.model.tokenizer.decode

        def fails_once(tokens: list[int], **options: Any) -> str:
            monkeypatch.setattr(server.scheduler.pair.model.tokenizer, "decode", decode)
            raise ValueError("no such text")

        monkeypatch.setattr(server.scheduler.pair.model.tokenizer, "decode", fails_once)
        failed = ask(url, prompt=TEXTS[0], max_tokens=4)
        assert (failed.status_code, "no such text" in failed.text) == (500, True)
        assert ask(url, prompt=TEXTS[0], max_tokens=4).status_code == 200
    assert "no such text" in capfd.readouterr().err


def test_a_taken_address_is_told_before_a_model_is_loaded(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch minutes of loading for nothing."""
    monkeypatch.setattr(own_server, "open_pair", lambda pair: pytest.fail("was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match="cannot be listened at"), serving_own(pair, "127.0.0.1", port):
            pass


def test_the_command_serves_until_it_is_interrupted(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch options that do not arrive, and those of vLLM taken in silence."""
    asked: list[httpx.Response] = []

    def serve(self: Server) -> None:
        thread = Thread(target=self.run, args=([self.socket],))
        thread.start()
        asked.append(chat(f"http://127.0.0.1:{self.port}/v1", TEXTS[0], max_tokens=4))
        assert self.scheduler.at_once == 2
        self.should_exit = True
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", serve)
    port = vllm.free_port()
    told = ["serve", str(pair), "--engine", "qspec", "--port", str(port), "--at-once", "2"]
    assert main(told) == 130
    assert asked[0].status_code == 200
    shown = capsys.readouterr()
    assert f"http://127.0.0.1:{port}/v1" in shown.out
    assert shown.err.splitlines()[-1] == "the server was stopped"
    assert main([*told, "--print"]) == 2
    assert "--print: is for --engine vllm" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_what_it_answers(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], sign: signal.Signals
) -> None:
    """Would catch a service manager that kills an engine in the middle of a pass, and a client that is told nothing."""
    step, begun, told = Batch.step, Event(), list[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    def slow(self: Batch, emit: Any) -> Any:
        begun.set()
        time.sleep(0.1)  # the server is to be stopped in the middle
        return step(self, emit)

    def client(port: int) -> None:
        while not told:
            try:
                asked = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": True}
                with httpx.stream(
                    "POST", f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60, trust_env=False
                ) as reply:
                    assert begun.wait(30)
                    os.kill(os.getpid(), sign)
                    told.append(reply.read().decode())
            except httpx.ConnectError:
                time.sleep(0.01)

    monkeypatch.setattr(Batch, "step", slow)
    port = vllm.free_port()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client, port)
        assert main(["serve", str(pair), "--engine", "qspec", "--port", str(port)]) == 130
        asking.result()
    assert "the server was stopped" in told[0]
    assert "[DONE]" not in told[0]
    assert "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    socket.create_server(("127.0.0.1", port)).close()
