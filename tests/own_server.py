"""qspec's own server in a thread of this process, and what asks it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
import time
from typing import Any

import httpx

from qspec.serving.server import Server, serving_own


@contextmanager
def running(pair: Path, at_once: int = 8) -> Iterator[tuple[Server, str]]:
    """The server, and its address up to and with `/v1`."""
    with serving_own(pair, "127.0.0.1", 0, at_once) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.port}/v1"
        finally:
            server.should_exit = True
            thread.join()


def ask(url: str, path: str = "completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/{path}", json=fields, timeout=60, trust_env=False)


def chat(url: str, text: str, **fields: Any) -> httpx.Response:
    return ask(url, "chat/completions", messages=[{"role": "user", "content": text}], **fields)


def until(condition: Callable[[], Any]) -> None:
    """Wait for it, but not for ever: a test that hangs says nothing."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.001)
