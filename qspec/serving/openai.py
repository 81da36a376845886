"""An OpenAI-style API in terms of the engine: questions in, replies and counters out. It knows no network."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
import json
import secrets
import time
from typing import Any

from qspec.errors import RecipeError
from qspec.schema.api import ApiRequest, ChatRequest, CompletionRequest, StreamOptions, read_question
from qspec.serving.engine import Answer, Answers
from qspec.speculation.types import Sampling

CHAT = "/v1/chat/completions"
QUESTIONS: dict[str, type[ApiRequest]] = {"/v1/completions": CompletionRequest, CHAT: ChatRequest}
OVERHEAD, BYTES_A_TOKEN = 64 << 10, 16
MOST_MESSAGE = 600
"""Characters of a refusal."""


def most_bytes(answers: Answers) -> int:
    """Longest body that is read: what has more cannot be a prompt that fits, by several times."""
    return OVERHEAD + BYTES_A_TOKEN * answers.pair.target.max_length


def read(path: str, body: bytes) -> ApiRequest:
    """The question of a body. Raises `RecipeError`."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RecipeError("request", f"is not JSON ({error})", "send a JSON object") from error
    return read_question(QUESTIONS[path], data)


def answer_to(answers: Answers, question: ApiRequest, loop: asyncio.AbstractEventLoop) -> Answer:
    """A question as the engine takes it, queued. loop: where the answer is read. Tokenizes: one thread at a time.

    Raises `QspecError` for what has no answer.
    """
    pair = answers.pair
    prompt, most = _prompt(answers, question), question.max_tokens
    if isinstance(question, ChatRequest):
        most = question.max_completion_tokens or most
    room = pair.target.max_length - len(prompt)
    if (most or 1) > room:
        value, rule = f"{len(prompt)} tokens and {most or 1} more", f"the context holds {pair.target.max_length}"
        raise RecipeError(value, rule, "shorten the prompt, or lower max_tokens")
    speculation = pair.recipe.speculation
    sampling = Sampling(
        speculation.temperature if question.temperature is None else question.temperature,
        speculation.top_k if question.top_k is None else max(0, question.top_k),
        speculation.top_p if question.top_p is None else question.top_p,
    )
    ends = frozenset(question.stop_token_ids) | set(() if question.ignore_eos else pair.model.arch.eos_ids)
    return answers.ask(Answer(loop, prompt, most or room, sampling, question.seed, ends, question.stop))


def _prompt(answers: Answers, question: ApiRequest) -> list[int]:
    tokenizer = answers.pair.model.tokenizer
    if isinstance(question, ChatRequest):
        return tokenizer.chat([{"role": turn.role, "content": turn.text} for turn in question.messages])
    assert isinstance(question, CompletionRequest)
    prompt = question.one
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class Reply:
    """How an answer is written down, whole or in events."""

    chat: bool
    model: str
    id: str
    created: int

    @classmethod
    def to(cls, path: str, model: str) -> "Reply":
        chat = path == CHAT
        return cls(chat, model, f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time()))

    async def whole(self, answer: Answer) -> dict[str, Any]:
        text = "".join([piece async for piece in answer])
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._of(content, answer.reason), "usage": _usage(answer)}

    async def events(self, answer: Answer, options: StreamOptions | None) -> AsyncIterator[dict[str, Any]]:
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


def _usage(answer: Answer) -> dict[str, Any]:
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


def models(answers: Answers) -> dict[str, Any]:
    """The one model, under the pair's name."""
    context = answers.pair.target.max_length
    entry = {"id": answers.pair.recipe.name, "object": "model", "owned_by": "qspec", "max_model_len": context}
    return {"object": "list", "data": [entry]}


def metrics(answers: Answers) -> str:
    """Totals in Prometheus' text format; those of drafts count what vLLM's of the same names count."""
    counts = answers.counts
    gauges = {"num_requests_running": answers.running, "num_requests_waiting": answers.waiting.qsize()}
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
