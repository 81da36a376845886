"""httpx: a model behind an OpenAI-style address (vLLM, SGLang, llama.cpp, …): facts, scores, answers, streams.

`OPENAI_API_KEY` is sent as a bearer token where it is set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
import json
import os
from time import perf_counter, sleep
from typing import Any

from qspec.errors import SourceError

WAITS = (1.0, 2.0, 4.0)
"""Seconds before a question is asked again that the server was too busy for, or that got lost."""
BUSY = (429, 500, 502, 503, 504)
Message = dict[str, str]


@dataclass(frozen=True)
class ModelFacts:
    """A server's facts about its model; context: tokens that it holds (None: unstated); engine: who owns it."""

    name: str
    context: int | None
    engine: str


@dataclass(frozen=True)
class ApiCompletion:
    """An answer; `cut`: it hit the token limit."""

    text: str
    cut: bool


@dataclass(frozen=True)
class Streamed:
    """A timed answer: seconds from the request to each event that brought text, and tokens in all."""

    arrivals: tuple[float, ...]
    tokens: int


class Api:
    """One model of a server. Safe to ask from several threads."""

    def __init__(self, url: str, model: str | None = None) -> None:
        """`url`: up to and with `/v1`; `model`: None: the first that the server names. Asks nothing yet."""
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(headers=headers, timeout=600.0, limits=limits, trust_env=False)
        self.url, self._model, self._lost = url.rstrip("/"), model, httpx.TransportError

    @property
    def model(self) -> str:
        if self._model is None:
            self._model = self.facts().name
        return self._model

    def close(self) -> None:
        self._client.close()

    def facts(self) -> ModelFacts:
        """The chosen model's facts. Raises `SourceError` where the address answers nothing, or has no such model."""
        known = {entry["id"]: entry for entry in self._ask("GET", "models")["data"]}
        name = self._model or next(iter(known), "")
        if name not in known:
            fix = f"name one of: {', '.join(known) or 'none there'}"
            raise SourceError(f"model {name!r}", f"is not served at {self.url}", fix)
        entry = known[name]
        return ModelFacts(name, entry.get("max_model_len"), str(entry.get("owned_by", "")))

    def score(self, ids: Sequence[int]) -> list[tuple[float, float]]:
        """Log-probability of every token but the first, and of the likeliest one in its place."""
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        logprobs = self._ask("POST", "completions", body)["choices"][0].get("logprobs")
        if logprobs is None or len(logprobs["token_logprobs"]) < len(ids):
            raise SourceError(self.url, "tells no probabilities of a prompt (echo, logprobs)", "use another server")
        likeliest = [max(top.values()) if top else None for top in logprobs["top_logprobs"]]
        pairs = zip(logprobs["token_logprobs"][1 : len(ids)], likeliest[1 : len(ids)], strict=True)
        return [(chosen, chosen if best is None else best) for chosen, best in pairs]

    def complete(
        self, prompt: Sequence[int] | Sequence[Message], most: int, stops: Sequence[str], stop_ids: Sequence[int]
    ) -> ApiCompletion:
        """Greedy answer to tokens, or to a conversation. stop_ids: beyond the model's own (not in OpenAI's own API)."""
        own: dict[str, Any] = {"stop": list(stops)} if stops else {}
        own |= {"stop_token_ids": list(stop_ids)} if stop_ids else {}
        path, body = _question(prompt)
        choice = self._ask("POST", path, {**body, "max_tokens": most, "temperature": 0, **own})["choices"][0]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        return ApiCompletion(text or "", choice.get("finish_reason") == "length")

    def stream(self, prompt: Sequence[int], most: int) -> Streamed:
        """Time a greedy answer of exactly `most` tokens (`ignore_eos`, where the server knows it)."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": most, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        begin, arrivals, tokens = perf_counter(), list[float](), None
        with self._client.stream("POST", f"{self.url}/completions", json=body) as reply:
            if reply.is_error:
                reply.read()
            self._raise(reply)
            for event in _events(reply.iter_lines()):
                if any(choice.get("text") for choice in event.get("choices", ())):
                    arrivals.append(perf_counter() - begin)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if not arrivals:
            raise SourceError(self.url, "streamed no text", "check the server's log")
        return Streamed(tuple(arrivals), len(arrivals) if tokens is None else tokens)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content, waits = (None, ()) if body is None else ({"model": self.model, **body}, WAITS)
        for wait in (*waits, None):
            try:
                reply = self._client.request(method, f"{self.url}/{path}", json=content)
            except self._lost as error:
                if wait is None:
                    rule = f"does not answer ({_line(str(error)) or type(error).__name__})"
                    raise SourceError(self.url, rule, "start the server, or check the address") from error
            else:
                if wait is None or reply.status_code not in BUSY:
                    self._raise(reply)
                    return reply.json()
            sleep(wait)
        raise AssertionError

    def _raise(self, reply: Any) -> None:
        if reply.is_error:
            rule = f"answers {reply.status_code} ({_line(reply.text)})"
            raise SourceError(str(reply.url), rule, "check model, context and the server's log")


def _question(prompt: Sequence[int] | Sequence[Message]) -> tuple[str, dict[str, Any]]:
    if prompt and isinstance(prompt[0], dict):
        return "chat/completions", {"messages": list(prompt)}
    return "completions", {"prompt": list(prompt)}


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Data of server-sent events up to `[DONE]`."""
    for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
