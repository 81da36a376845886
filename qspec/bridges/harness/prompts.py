"""Prompts of the harness as the tokens that a model is asked with: one way for every engine that answers them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
import json
from typing import Protocol

from qspec.errors import RecipeError
from qspec.records import Tokenizer

CHAT = "\0chat\0"
"""Marks a prompt that is a conversation (as JSON): it becomes tokens through `Tokenizer.chat`, as it is served."""


@dataclass
class Cuts:
    """Prompts (by the harness's hash) whose answer hit the token limit, and prompts that did not fit."""

    answers: set[str] = field(default_factory=set)
    prompts: set[str] = field(default_factory=set)


class Prompts:
    """Texts and conversations to tokens, and what was cut."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.cuts = Cuts()

    @property
    def prefix_id(self) -> int:
        """Token in front of a text without context, as for lm-eval's own models: BOS, where there is none a stop token.

        A tokenizer may have a BOS without adding it to what it encodes.
        """
        if added := self.tokenizer.encode(""):
            return added[0]
        bos = self.tokenizer.parts().get("special tokens", {}).get("bos_token")
        return self.tokenizer.vocabulary()[bos] if bos else min(self.eos_ids, default=0)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt; a text that already begins with BOS gets no second one."""
        if text.startswith(CHAT):
            return self._encode_chat(json.loads(text.removeprefix(CHAT)))
        ids, bare = self.tokenizer.encode(text, special=special), self.tokenizer.encode(text, special=False)
        return bare if special and bare[:1] == self.tokenizer.encode("") else ids

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation; one that ends in the assistant's words continues them."""
        if messages[-1]["role"] != "assistant":
            return self.tokenizer.chat(messages)
        return self.tokenizer.chat(messages[:-1]) + self.tokenizer.encode(messages[-1]["content"], special=False)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both parts' ids, split where the context ends; its trailing spaces belong to the continuation."""
        if context.startswith(CHAT):
            return self.encode(context), self.tokenizer.encode(continuation, special=False)
        text = context.rstrip()
        ids = self.encode(text)
        return ids, self.encode(context + continuation)[len(ids) :]

    def fit(self, context: str, key: str, max_tokens: int, length: int) -> list[int]:
        """Ids of a prompt that leave `max_tokens` of `length` for its answer; it loses its beginning if it must."""
        room, prompt = require_room(max_tokens, length), self.encode(context)
        if len(prompt) > room:
            self.cuts.prompts.add(key)
        return prompt[-room:] or [self.prefix_id]

    def split_stops(self, stops: Sequence[str]) -> tuple[list[str], set[int]]:
        """Stop strings to watch for in the text, and stop tokens: those of the model and special ones in `stops`."""
        ids = {stop: self.tokenizer.encode(stop, special=False) for stop in stops if stop}
        special = {stop for stop, tokens in ids.items() if len(tokens) == 1 and not self.tokenizer.decode(tokens)}
        return [stop for stop in ids if stop not in special], {ids[stop][0] for stop in special} | self.eos_ids


class Answerer(Protocol):
    """A model that answers the harness's questions, `at_once` of them at a time."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    cuts: Cuts
    at_once: int

    @property
    def prefix_id(self) -> int: ...

    @property
    def window(self) -> int:
        """Most tokens that a pass reads while it scores."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]: ...

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]: ...

    def answer(self, context: str, key: str, stops: Sequence[str], max_tokens: int) -> str: ...


def require_room(max_tokens: int, context: int) -> int:
    """Tokens that an answer leaves for its prompt; raises `RecipeError` if none."""
    if context - max_tokens < 1:
        rule = f"leave no room for a prompt in a context of {context} tokens"
        raise RecipeError(f"answers of {max_tokens} tokens", rule, "set max_gen_toks of the task lower")
    return context - max_tokens
