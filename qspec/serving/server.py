"""A pair behind an OpenAI-style address, on qspec's own engine: what vLLM does not run of it, it runs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
from pathlib import Path
import socket
import sys
from typing import Any

from qspec.errors import OutputError, QspecError, RecipeError
from qspec.pair.check import check
from qspec.pair.open import open_pair
from qspec.schema.api import Question
from qspec.schema.problems import validate
from qspec.serving import openai as api
from qspec.serving.engine import Answers

MOST_BYTES = 16 << 20
"""Of a request; a prompt of a million tokens has less."""


class Server(ThreadingHTTPServer):
    """Listens from the beginning, so that an address that is taken is told before a model is loaded."""

    daemon_threads = True
    request_queue_size = 128  # a connection beyond it waits a second, or three
    answers: Answers

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            rule = f"cannot be listened at ({error.strerror})"
            raise OutputError(f"{host}:{port}", rule, "give another one: --host, --port") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is no fault of the server."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextmanager
def serving_own(pair: Path, host: str, port: int, at_once: int = 8, speculative: bool = True) -> Iterator[Server]:
    """A server that is ready to `serve_forever`, of a pair that is intact; its engine runs within."""
    with Server(host, port) as server:
        check(pair)
        with Answers(open_pair(pair), at_once, speculative) as server.answers:
            yield server


class _Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold back what follows a small packet, for 40 ms on a kept connection
    server: Server

    def do_GET(self) -> None:
        match self.path:
            case "/health":
                self._send(200, b"", "text/plain")
            case "/v1/models":
                self._json(200, api.models(self.server.answers))
            case "/metrics":
                self._send(200, api.metrics(self.server.answers).encode(), "text/plain; version=0.0.4")
            case _:
                self._refuse(404, f"{self.path}: is not here; ask /v1/models, {', '.join(api.QUESTIONS)} or /metrics")

    def do_POST(self) -> None:
        try:
            question = self._question()
            if question is not None:
                self._answer(question)
        except QspecError as error:
            self._refuse(400, str(error))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked has gone
        except Exception as error:  # noqa: BLE001 (of this request; others are answered)
            self._refuse(500, f"{type(error).__name__}: {error}")

    def _question(self) -> Question | None:
        """What is asked; None where it has been refused."""
        size = self.headers.get("Content-Length", "")
        if not (size.isdecimal() and len(size) < 10 and int(size) <= MOST_BYTES):
            self.close_connection = True  # its body stays unread
            self._refuse(413, f"a body of {size or 'unsaid'} bytes: {MOST_BYTES} are read at most; send less")
            return None
        name = self.server.answers.pair.recipe.name
        body, kind = self.rfile.read(int(size)), api.QUESTIONS.get(self.path)
        if kind is None:
            self._refuse(404, f"{self.path}: is not here; ask one of {', '.join(api.QUESTIONS)}")
            return None
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RecipeError("request", f"is not JSON ({error})", "send a JSON object") from error
        question = validate(kind, data, "request")
        if question.model not in ("", name):
            self._refuse(404, f"model {question.model!r}: is not served here; ask for {name!r}")
            return None
        return question

    def _answer(self, question: Question) -> None:
        answers = self.server.answers
        reply = api.Reply.to(self.path, answers.pair.recipe.name)
        answer = api.answer_to(answers, question, self._gone)
        try:
            if question.stream:
                options = question.stream_options
                self._stream(reply.events(answer, options is not None and options.include_usage))
            else:
                self._json(200, reply.whole("".join(answer), answer))
        finally:
            answer.unwanted = True

    def _gone(self) -> bool:
        """Whether whoever asked has hung up."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Server-sent events, on a connection that ends with them."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in _written(events):
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()

    def _refuse(self, status: int, message: str) -> None:
        with suppress(OSError):
            self._json(status, api.failure(status, message))

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not printed."""


def _written(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    """What a stream says, `[DONE]` at its end; a failure is said in it, since the status has been sent."""
    try:
        for event in events:
            yield json.dumps(event)
        yield "[DONE]"
    except Exception as error:  # noqa: BLE001 (of this request; others are answered)
        yield json.dumps(api.failure(500, f"{type(error).__name__}: {error}"))
