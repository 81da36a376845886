"""A pair behind an OpenAI-style address, on qspec's own engine, which also runs what vLLM does not.

starlette and uvicorn speak HTTP. Clients are limited in number, in the length of a request, and in the time to send
one; slow work (JSON, tokenizing) is done beside the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
import json
from pathlib import Path
import re
import socket
from typing import Any, TypeVar

from qspec.errors import OutputError, QspecError, RecipeError
from qspec.pair.check import check
from qspec.pair.open import open_pair
from qspec.schema.problems import short
from qspec.serving import openai as api
from qspec.serving.engine import Failed, Scheduler, Stopped

try:
    import h11
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise RecipeError("--engine qspec", f"needs {error.name}", 'run `pip install "qspec[serve]"`') from error

T = TypeVar("T")
MOST_CONNECTIONS = 512
PATIENCE = 30.0
"""Seconds within which a request has to be there whole."""
PROMETHEUS = "text/plain; version=0.0.4"


class Server(uvicorn.Server):
    """Listens from the beginning, so that an address in use is refused before a model is loaded."""

    scheduler: Scheduler

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            rule = f"cannot be listened at ({str(error.strerror).partition(' (while')[0]})"
            raise OutputError(f"{host}:{port}", rule, "give another one: --host, --port") from error
        config = uvicorn.Config(
            _strict(_app(self)),
            http=_Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def serve_forever(self) -> None:
        """Serve until `should_exit`, SIGINT or SIGTERM; a signal's previous handler runs at the end."""
        self.run([self.socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, so that waiting clients get an error, then all connections."""
        await asyncio.to_thread(self.scheduler.close)
        await super().shutdown(sockets)


@contextmanager
def serving_own(pair: Path, host: str, port: int, at_once: int = 8, speculative: bool = True) -> Iterator[Server]:
    """A server of an intact pair, ready to `serve_forever`; its engine runs inside the block."""
    server = Server(host, port)
    with server.socket:
        check(pair)
        with Scheduler(open_pair(pair), at_once, speculative) as server.scheduler:
            yield server


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 for a limited number of clients, who must send a request in a limited time."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch(False)

    def _watch(self, waiting: bool) -> None:
        """Hang up later, if the request is still incomplete then."""
        if waiting and self._limit is None:
            self._limit = self.loop.call_later(PATIENCE, self.transport.abort)
        elif not waiting and self._limit is not None:
            self._limit.cancel()
            self._limit = None


def _strict(app: ASGIApp) -> ASGIApp:
    """Refuse a body with two stated lengths: a proxy may believe the other one. Accept whole URLs, as proxies send."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        inner, names = app, {name for name, _ in scope["headers"]}
        if {b"transfer-encoding", b"content-length"} <= names:
            inner = _failure(400, "Content-Length beside Transfer-Encoding: a body has one length; send one of them")
            inner.headers["Connection"] = "close"
        await inner({**scope, "path": re.sub("^https?://[^/]*", "", scope["path"])}, receive, send)

    return checked


def _app(server: Server) -> Starlette:
    async def answer(request: Request) -> Response:
        return await _answer(server.scheduler, request)

    routes = [
        Route("/health", lambda _: PlainTextResponse("")),
        Route("/v1/models", lambda _: JSONResponse(api.models(server.scheduler))),
        Route("/metrics", lambda _: PlainTextResponse(api.metrics(server.scheduler), media_type=PROMETHEUS)),
        *(Route(path, answer, methods=["POST"]) for path in api.REQUESTS),
    ]
    kinds = HTTPException, QspecError, Failed, ClientDisconnect, Exception
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refusal))


async def _answer(scheduler: Scheduler, request: Request) -> Response:
    loop, path, name = asyncio.get_running_loop(), request.scope["path"], scheduler.pair.recipe.name
    body = await _body(request, api.most_bytes(scheduler))
    parsed = await loop.run_in_executor(scheduler.reader, api.read, path, body)
    if parsed.model not in ("", name):
        raise HTTPException(404, f"model {short(parsed.model)}: is not served here; ask for {name!r}")
    answer = await loop.run_in_executor(scheduler.reader, api.answer_to, scheduler, parsed, loop)
    reply = api.Reply.to(path, name)
    if parsed.stream:
        events = _written(reply.events(answer, parsed.stream_options))
        return StreamingResponse(events, media_type="text/event-stream", background=BackgroundTask(answer.drop))
    try:
        return JSONResponse(await _while_there(request, reply.whole(answer)))
    finally:
        answer.drop()


async def _body(request: Request, most: int) -> bytes:
    """The body. One that is too long is refused after its end, since most clients read no reply earlier."""
    body = bytearray()
    async for part in request.stream():
        if len(body) <= most:
            body += part
    if len(body) > most:
        raise HTTPException(413, f"a body of more than {most} bytes: no prompt that fits is as long; send less")
    return bytes(body)


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work; ends it and raises `ClientDisconnect` if the client hangs up first."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait([task], timeout=0.1))[0]:
        if await request.is_disconnected():
            task.cancel()
            raise ClientDisconnect
    return task.result()


async def _written(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events, `[DONE]` at their end; a failure is one of them, since the status has been sent."""
    try:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 (of this request; others are answered)
        yield f"data: {json.dumps(api.failure(*_reason(error)))}\n\n"


def _refusal(request: Request, error: Exception) -> Response:
    status, message = _reason(error)
    if message == "Not Found":
        path = short(request.scope["path"])
        message = f"{path}: is not here; ask /v1/models, {', '.join(api.REQUESTS)} or /metrics"
    return _failure(status, message)


def _reason(error: Exception) -> tuple[int, str]:
    """Status and message of what ends a request."""
    match error:
        case HTTPException():
            return error.status_code, error.detail
        case QspecError():
            return 400, str(error)
        case Failed():
            return 503 if isinstance(error, Stopped) else 500, str(error)
    return 500, f"{type(error).__name__}: {error}"


def _failure(status: int, message: str) -> Response:
    return JSONResponse(api.failure(status, message), status)
