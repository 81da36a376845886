"""Clients that send too much, too slowly, nothing, or what two readers understand differently; on real sockets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
import json
from pathlib import Path
import socket
import sys
from threading import Event
import time
from typing import Any

import httpx
import pytest

from qspec.cli import main
from qspec.serving import server as own_server
from qspec.serving.openai import most_bytes
from qspec.serving.server import Server
from qspec.speculation.batch import Batch
from qspec.speculation.types import Sampling
from tests.own_server import ask, running, until

BIG = 15 << 20
LINE = 1000
"""Bytes that no refusal exceeds; the list of valid fields takes most of them."""


def connected(server: Server) -> closing[socket.socket]:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    return closing(connection)


def all_of(connection: socket.socket) -> bytes:
    """What comes up to the end of the connection."""
    parts = list[bytes]()
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def replies(server: Server, raw: bytes) -> list[tuple[int, bytes]]:
    """Status and body of every response to these bytes, the last of which ends the connection."""
    with connected(server) as connection:
        connection.sendall(raw)
        heads = all_of(connection).split(b"HTTP/1.1 ")[1:]
    return [(int(head[:3]), head.partition(b"\r\n\r\n")[2]) for head in heads]


def request(path: str = "/v1/completions", body: bytes = b"", *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def sized(body: bytes) -> str:
    return f"Content-Length: {len(body)}"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


TEXT = json.dumps({"prompt": "a" * BIG}).encode()
FIELDS = json.dumps(dict.fromkeys((f"field_{i}" for i in range(BIG // 15)), 0)).encode()
MODEL = json.dumps({"prompt": "a", "model": "m" * BIG}).encode()


@pytest.mark.parametrize("form", ["sized", "chunked"])
@pytest.mark.parametrize("body", [TEXT, FIELDS, MODEL], ids=["text", "fields", "model"])
def test_a_long_body_is_refused_shortly_and_holds_nobody_up(served: tuple[Server, str], body: bytes, form: str) -> None:
    """Would catch megabytes that are tokenized, or validated, or sent back, before they are refused."""
    server, url = served
    length = sized(body) if form == "sized" else "Transfer-Encoding: chunked"
    raw = request("/v1/completions", body if form == "sized" else chunked(body), length, "Connection: close")
    with connected(server) as connection:
        connection.sendall(raw[: len(raw) // 2])
        assert ask(url, prompt="a", max_tokens=2).status_code == 200  # in the middle of it
        connection.sendall(raw[len(raw) // 2 :])
        reply = all_of(connection)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert len(reply) < LINE
    assert b"no prompt that fits is as long" in reply


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"prompt": "a", "x" * 50_000: 1}, 400),
        ("/v1/completions", {"prompt": "a", **{f"f{i}": 1 for i in range(5000)}}, 400),
        ("/v1/completions", {"prompt": "a", "temperature": "x" * 50_000}, 400),
        ("/v1/completions", {"prompt": "a", "model": "x" * 50_000}, 404),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}, 400),
        ("/v1/completions", {"prompt": [10**4000]}, 400),
        ("/v1/completions", {"prompt": "a" * 50_000}, 400),
        ("/v1/completions", [{"prompt": "a"}] * 2000, 400),
        (f"/v1/{'x' * 10_000}", {}, 404),
    ],
    ids=["name", "names", "value", "model", "bias", "token", "prompt", "list", "path"],
)
def test_no_refusal_sends_back_what_it_refuses(served: tuple[Server, str], path: str, fields: Any, status: int) -> None:
    """Would catch a reply that is as long as what was asked, of a body that may be read."""
    body = json.dumps(fields).encode()
    assert len(body) <= most_bytes(served[0].scheduler)
    reply = httpx.post(f"{served[1].removesuffix('/v1')}{path}", content=body, timeout=60, trust_env=False)
    assert (reply.status_code, len(reply.content) < LINE) == (status, True)
    assert "x" * 201 not in reply.text


def test_a_template_does_not_send_back_what_it_refuses(
    served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a whole conversation in the message of a template that quotes it."""
    tokenizer: Any = served[0].scheduler.pair.model.tokenizer
    monkeypatch.setattr(tokenizer.inner, "chat_template", "{{ raise_exception('no: ' + messages[0].content) }}")
    reply = ask(served[1], "chat/completions", messages=[{"role": "user", "content": "x" * 50_000}])
    assert (reply.status_code, "no: x" in reply.text, "x" * 201 in reply.text) == (400, True, False)


SMUGGLED = request("/v1/models", b"", "Connection: close", method="GET")


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", f"Content-Length: {len(SMUGGLED) + 5}"),
        ("Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"),
        (f"Content-Length: 0, {len(SMUGGLED)}",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Content-Length: +0",),
        ("Content-Length: -1",),
        ("Content-Length: ²",),
        (f"Content-Length: {'9' * 5000}",),
    ],
)
def test_a_body_whose_length_is_doubtful_ends_the_connection(
    served: tuple[Server, str], headers: tuple[str, ...]
) -> None:
    """Would catch a request within the body of another, which a proxy in front has not seen."""
    raw = request("/v1/completions", b"0\r\n\r\n" + SMUGGLED, *headers)
    found = replies(served[0], raw)
    assert len(found) == 1
    assert found[0][0] in (400, 501)


def test_a_body_of_one_length_given_twice_is_read_once(served: tuple[Server, str]) -> None:
    """Would catch a repeated length (RFC 9110, 8.6: the same one is one) that moves the end of a body."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    found = replies(served[0], request("/v1/completions", body + SMUGGLED, sized(body), sized(body)))
    assert [status for status, _ in found] == [200, 200]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("form", ["sized", "chunked"])
def test_a_body_of_a_get_is_passed_over(served: tuple[Server, str], method: str, form: str) -> None:
    """Would catch the body of a request without one that is taken for the next request."""
    inner = request("/metrics", b"", method="GET")
    body, length = (inner, sized(inner)) if form == "sized" else (chunked(inner), "Transfer-Encoding: chunked")
    found = replies(served[0], request("/health", body, length, method=method) + SMUGGLED)
    assert [(status, b"max_model_len" in text) for status, text in found] == [(200, False), (200, True)]


@pytest.mark.parametrize("address", ["/health?x=1", "http://here/health", "https://here:8000/health?a=b", "/health"])
def test_addresses_are_understood_in_all_their_forms(served: tuple[Server, str], address: str) -> None:
    """Would catch a health check with a query, and a proxy's absolute address, that find nothing."""
    for method in ("GET", "HEAD"):
        assert replies(served[0], request(address, b"", "Connection: close", method=method)) == [(200, b"")]
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    asked = request(address.replace("/health", "/v1/completions"), body, sized(body), "Connection: close")
    assert [status for status, _ in replies(served[0], asked)] == [200]
    assert replies(served[0], request(address, b"", "Connection: close", method="PUT"))[0][0] == 405


def test_head_has_no_body(served: tuple[Server, str]) -> None:
    """Would catch a body behind the headers, which a kept connection takes for the next reply."""
    root = served[1].removesuffix("/v1")
    for path in ("/v1/models", "/metrics"):
        whole, head = (httpx.request(method, root + path, trust_env=False) for method in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]


HALVES = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTT",
    "half a body": request("/v1/completions", b"{", "Content-Length: 100"),
    "half a chunk": request("/v1/completions", b"5\r\n{", "Transfer-Encoding: chunked"),
    "a body that is refused": request("/v1/completions", b"{", f"Content-Length: {BIG}"),
    "half a head behind a whole request": request("/health", b"GET /heal", method="GET"),
}


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "dripping"])
@pytest.mark.parametrize("name", HALVES)
def test_whoever_does_not_end_a_request_is_dropped(
    served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, name: str, drip: bool
) -> None:
    """Would catch connections that a few bytes keep open for ever, 600 of which would hold 600 threads or files."""
    server, _ = served
    monkeypatch.setattr(own_server, "PATIENCE", 0.1)
    monkeypatch.setattr(server.config, "timeout_keep_alive", 0.1)
    with connected(server) as connection:
        connection.sendall(HALVES[name])
        try:
            while drip and name != "nothing":
                connection.sendall(b"1" if "a body" in name else b"x")
                time.sleep(0.01)
        except OSError:
            pass
        all_of(connection)
    until(lambda: not server.server_state.connections and not server.server_state.tasks)


def test_connections_are_limited(served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a client that takes all files of the process, and a limit that the others never come back from."""
    server, url = served
    until(lambda: not server.server_state.connections)
    monkeypatch.setattr(own_server, "MOST_CONNECTIONS", 3)
    with many(server, 3):
        until(lambda: len(server.server_state.connections) == 3)
        with connected(server) as connection:
            assert all_of(connection) == b""
    until(lambda: not server.server_state.connections)
    assert ask(url, prompt="a", max_tokens=1).status_code == 200


@contextmanager
def many(server: Server, count: int) -> Iterator[None]:
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_closes_one_half_gets_all_or_nothing(pair: Path, stream: bool) -> None:
    """Would catch a text without words under status 200, and an engine that goes on for nobody."""
    fields = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": stream}
    body = json.dumps(fields).encode()
    with running(pair) as (server, url):
        with connected(server) as connection:
            connection.sendall(request("/v1/completions", body, sized(body)))
            connection.shutdown(socket.SHUT_WR)
            reply = all_of(connection)
        until(lambda: not server.server_state.tasks)
        if reply and not stream:
            assert len(json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["text"]) > 10
        assert ask(url, prompt="a", max_tokens=2).status_code == 200


def test_whoever_waits_at_the_end_is_told_503(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a load balancer that takes the end of a server for its fault, and clients that wait for ever."""
    step, begun = Batch.step, Event()

    def slow(self: Batch, emit: Any) -> Any:
        begun.set()
        time.sleep(0.1)
        return step(self, emit)

    monkeypatch.setattr(Batch, "step", slow)
    with ThreadPoolExecutor(2) as pool:
        with running(pair, at_once=1) as (server, url):
            waiting = [pool.submit(ask, url, prompt="a", max_tokens=100, ignore_eos=True) for _ in range(2)]
            assert begun.wait(30)
            until(lambda: server.scheduler.waiting.qsize())
        found = [one.result() for one in waiting]
    assert [reply.status_code for reply in found] == [503, 503]
    assert {reply.json()["error"]["message"] for reply in found} == {"the server was stopped"}


def test_tokenizing_holds_nobody_up(served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a long prompt that is tokenized where connections are served, or where the engine runs."""
    server, url = served
    kind, long, done = type(server.scheduler.pair.model.tokenizer), Event(), Event()
    encode = kind.encode

    def held(self: Any, text: str, special: bool = True) -> Any:
        if text.startswith("long"):
            long.set()
            assert done.wait(30)
        return encode(self, text, special)

    monkeypatch.setattr(kind, "encode", held)
    fields = {"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        with httpx.stream("POST", f"{url}/completions", json=fields, timeout=60, trust_env=False) as reply:
            slow = pool.submit(ask, url, prompt="long", max_tokens=1)
            assert long.wait(30)
            assert httpx.get(f"{url}/models", trust_env=False).status_code == 200
            assert "[DONE]" in reply.read().decode()
        done.set()
        assert slow.result().status_code == 200


def test_a_fault_costs_its_own_request(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Would catch one request that ends everyone's, and a place in the batch that stays broken for the next one."""
    whole_probs = Sampling.probs

    def fails(self: Sampling, logits_TV: Any) -> Any:
        if self.temperature == 0.77 and len(logits_TV) > 1:
            raise IndexError("outside the vocabulary")
        return whole_probs(self, logits_TV)

    fields = {"max_tokens": 40, "ignore_eos": True, "seed": 4}
    asked = [{"prompt": text, "temperature": t} for text, t in (("over", 0), ("fox", 0.77), ("lazy", 0.9), ("a", 0))]
    with running(pair) as (_, url), ThreadPoolExecutor(4) as pool:
        whole = [ask(url, **one, **fields).json() for one in asked]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampling, "probs", fails)
            found = list(pool.map(lambda one: ask(url, **one, **fields), asked))
        again = [ask(url, **one, **fields).json()["choices"] for one in asked]
    assert [reply.status_code for reply in found] == [200, 500, 200, 200]
    assert "IndexError: outside the vocabulary" in found[1].text
    assert [found[i].json()["choices"] for i in (0, 2, 3)] == [whole[i]["choices"] for i in (0, 2, 3)]
    assert again == [one["choices"] for one in whole]
    assert "IndexError: outside the vocabulary" in capfd.readouterr().err


def test_the_server_needs_its_libraries(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a traceback where the extra is not installed, or a refusal that does not say what to install."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "qspec.serving.server")
    assert main(["serve", str(pair), "--engine", "qspec"]) == 2
    line = capsys.readouterr().err
    assert 'needs uvicorn; run `pip install "qspec[serve]"`' in line
    assert line.count("\n") == 1
