"""Requests of OpenAI-style clients. Fields that would change an answer and are not supported are refused."""

from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from qspec.errors import RecipeError
from qspec.schema.problems import short, validate
from qspec.schema.quantization import Strict

Q = TypeVar("Q", bound="TextRequest")
MOST_STOPS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "echo", "use_beam_search", "include_stop_str_in_output", "store"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("logit_bias", "tools", "functions", "suffix"), ({}, [], "")),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Values that ask for nothing: clients send them for features that are not here."""
NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "priority", "request_id")
"""Fields that change no answer, whatever they hold."""


class StreamOptions(Strict):
    include_usage: bool = False


class TextRequest(Strict):
    """Fields of both kinds of requests. None: the pair's own setting."""

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="-1 and 0: off")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = Field(default=(), max_length=MOST_STOPS)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        """One text is a list of one; an empty one would end every answer."""
        given = [value] if isinstance(value, str) else value
        return tuple(text for text in given if text != "") if isinstance(given, list | tuple) else given


class CompletionRequest(TextRequest):
    """Text, or its tokens, to be continued."""

    prompt: str | tuple[int, ...] | tuple[str] | tuple[tuple[int, ...]]

    @property
    def one(self) -> str | list[int]:
        """The prompt, also where it came as a list of one."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0] if self.prompt else 0
        if isinstance(first, int):
            return [token for token in self.prompt if isinstance(token, int)]
        return first if isinstance(first, str) else list(first)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: str
    content: str | tuple[TextPart, ...]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(TextRequest):
    """A conversation to be answered, through the model's chat template."""

    messages: tuple[Message, ...] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


def read_request(kind: type[Q], data: Any) -> Q:
    """A client's JSON as a request, without what asks for nothing. Raises `RecipeError`."""
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if value is not None and not _idle(kind, name, value)}
    return validate(kind, data, "request")


def _idle(kind: type[TextRequest], name: str, value: Any) -> bool:
    """Whether a field asks for nothing; one that does, and is not here, is refused."""
    if name in NOTES:
        return True
    if name not in NEUTRAL or name in kind.model_fields:
        return False
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
        fix = f"leave it out, or send {short(NEUTRAL[name][0])}"
        raise RecipeError(f"request: {name} {short(value)}", "is not done here", fix)
    return True
