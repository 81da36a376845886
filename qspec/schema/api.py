"""What an OpenAI-style client may ask of a pair; what would change an answer and is not done here is refused."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from qspec.schema.quantization import Strict

Off = Annotated[float, Field(ge=0, le=0)]
"""Of a switch that is not there: clients send its neutral value."""
MOST_STOPS = 16


class StreamOptions(Strict):
    include_usage: bool = False


class Question(Strict):
    """What both ways of asking share. None: the pair's own setting."""

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="-1 and 0: off")
    seed: int | None = None
    stop: tuple[str, ...] = Field(default=(), max_length=MOST_STOPS)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = None
    presence_penalty: Off | None = None
    frequency_penalty: Off | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        """One text is a list of one; null is none; an empty one would end every answer."""
        given = [value] if isinstance(value, str) else () if value is None else value
        return tuple(text for text in given if text != "") if isinstance(given, list | tuple) else given


class CompletionQuestion(Question):
    """Text, or its tokens, to be continued."""

    prompt: str | tuple[int, ...] | tuple[str] | tuple[tuple[int, ...]]
    echo: Literal[False] | None = None
    logprobs: None = None
    best_of: Literal[1] | None = None
    suffix: None = None

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


class ChatQuestion(Question):
    """A conversation to be answered, through the model's chat template."""

    messages: tuple[Message, ...] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = None
