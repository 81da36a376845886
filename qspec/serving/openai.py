"""An OpenAI-style API in terms of the engine: requests in, replies and counters out. It knows no network."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
import json
import secrets
import time
from typing import Any

from qspec.errors import RecipeError
from qspec.schema.api import ChatRequest, CompletionRequest, StreamOptions, TextRequest, read_request
from qspec.serving.engine import Scheduler, ServedRequest
from qspec.speculation.types import Sampling

CHAT = "/v1/chat/completions"
REQUESTS: dict[str, type[TextRequest]] = {"/v1/completions": CompletionRequest, CHAT: ChatRequest}
OVERHEAD, BYTES_A_TOKEN = 64 << 10, 16
MOST_MESSAGE = 600
"""Characters of a refusal."""


def most_bytes(scheduler: Scheduler) -> int:
    """Longest body that is read: several times what a prompt that fits can take."""
    return OVERHEAD + BYTES_A_TOKEN * scheduler.pair.target.max_length


def read(path: str, body: bytes) -> TextRequest:
    """The request of a body. Raises `RecipeError`."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RecipeError("request", f"is not JSON ({error})", "send a JSON object") from error
    return read_request(REQUESTS[path], data)


def answer_to(scheduler: Scheduler, request: TextRequest, loop: asyncio.AbstractEventLoop) -> ServedRequest:
    """Tokenize a request and queue it for the engine. Call it on one thread at a time. loop: where the answer is read.

    Raises `QspecError` for a request that cannot be answered.
    """
    pair = scheduler.pair
    prompt, most = _prompt(scheduler, request), request.max_tokens
    if isinstance(request, ChatRequest):
        most = request.max_completion_tokens or most
    room = pair.target.max_length - len(prompt)
    if (most or 1) > room:
        value, rule = f"{len(prompt)} tokens and {most or 1} more", f"the context holds {pair.target.max_length}"
        raise RecipeError(value, rule, "shorten the prompt, or lower max_tokens")
    speculation = pair.recipe.speculation
    sampling = Sampling(
        speculation.temperature if request.temperature is None else request.temperature,
        speculation.top_k if request.top_k is None else max(0, request.top_k),
        speculation.top_p if request.top_p is None else request.top_p,
    )
    ends = frozenset(request.stop_token_ids) | set(() if request.ignore_eos else pair.model.arch.eos_ids)
    return scheduler.ask(ServedRequest(loop, prompt, most or room, sampling, request.seed, ends, request.stop))


def _prompt(scheduler: Scheduler, request: TextRequest) -> list[int]:
    tokenizer = scheduler.pair.model.tokenizer
    if isinstance(request, ChatRequest):
        return tokenizer.chat([{"role": turn.role, "content": turn.text} for turn in request.messages])
    assert isinstance(request, CompletionRequest)
    prompt = request.one
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class Reply:
    """An answer in OpenAI's form, whole or in events."""

    chat: bool
    model: str
    id: str
    created: int

    @classmethod
    def to(cls, path: str, model: str) -> "Reply":
        chat = path == CHAT
        return cls(chat, model, f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time()))

    async def whole(self, answer: ServedRequest) -> dict[str, Any]:
        text = "".join([piece async for piece in answer])
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._of(content, answer.reason), "usage": _usage(answer)}

    async def events(self, answer: ServedRequest, options: StreamOptions | None) -> AsyncIterator[dict[str, Any]]:
        """Events of a stream, in order, as the text comes."""
        if self.chat:
            yield self._of({"delta": {"role": "assistant", "content": ""}})
        async for text in answer:
            yield self._of({"delta": {"content": text}} if self.chat else {"text": text})
        yield self._of({"delta": {}} if self.chat else {"text": ""}, answer.reason)
        if options is not None and options.include_usage:
            yield {**self._of({}), "choices": [], "usage": _usage(answer)}

    def _of(self, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        form = "text_completion"
        if self.chat:
            form = "chat.completion" if "message" in content else "chat.completion.chunk"
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {"id": self.id, "object": form, "created": self.created, "model": self.model, "choices": [choice]}


def _usage(answer: ServedRequest) -> dict[str, Any]:
    """Tokens; those of drafts under the names that OpenAI has for predicted output."""
    read, made = len(answer.prompt), answer.count
    accepted, rejected = answer.accepted, answer.drafted - answer.accepted
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    counts = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return {**counts, "completion_tokens_details": details}


def failure(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = " ".join(message[: 2 * MOST_MESSAGE].split())
    text = text if len(text) <= MOST_MESSAGE else f"{text[:MOST_MESSAGE]} …"
    return {"error": {"message": text, "type": kind, "code": status}}


def models(scheduler: Scheduler) -> dict[str, Any]:
    """The one model, under the pair's name."""
    context = scheduler.pair.target.max_length
    entry = {"id": scheduler.pair.recipe.name, "object": "model", "owned_by": "qspec", "max_model_len": context}
    return {"object": "list", "data": [entry]}


def metrics(scheduler: Scheduler) -> str:
    """Totals in Prometheus' text format; counters of drafts have vLLM's names and count the same."""
    counts = scheduler.counts
    gauges = {"num_requests_running": scheduler.running, "num_requests_waiting": scheduler.waiting.qsize()}
    totals = {
        "request_success_total": counts.requests,
        "prompt_tokens_total": counts.prompt_tokens,
        "generation_tokens_total": counts.tokens,
        "spec_decode_num_drafts_total": counts.drafts,
        "spec_decode_num_draft_tokens_total": counts.drafted,
        "spec_decode_num_accepted_tokens_total": counts.accepted,
    }
    lines = [f"# TYPE qspec:{name} gauge\nqspec:{name} {value}" for name, value in gauges.items()]
    lines += [f"# TYPE qspec:{name} counter\nqspec:{name} {value}" for name, value in totals.items()]
    name = "qspec:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f"# TYPE {name} counter", *(f'{name}{{position="{i}"}} {n}' for i, n in enumerate(counts.accepted_at))]
    return "\n".join(lines) + "\n"
