"""Scoring and answering for lm-evaluation-harness by qspec's own engine; knows text, not the harness."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
import json

import torch

from qspec.errors import RecipeError
from qspec.nn.lm import LM
from qspec.nn.reuse import PrefixReuse
from qspec.records import Tokenizer
from qspec.spec.engine import generate
from qspec.spec.types import Sampling

CHAT = "\0chat\0"
"""Marks a prompt that is a conversation (as JSON): it becomes tokens through `Tokenizer.chat`, as it is served."""


@dataclass
class Cuts:
    """Prompts (by the harness's hash) whose answer hit the token limit, and prompts that did not fit."""

    answers: set[str] = field(default_factory=set)
    prompts: set[str] = field(default_factory=set)


class Engine:
    """The harness's three questions, answered by an `LM`. Prompts that share a beginning share its computation."""

    def __init__(self, lm: LM, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self.lm, self.tokenizer, self.eos_ids = PrefixReuse(lm), tokenizer, frozenset(eos_ids)
        self.cuts = Cuts()

    @property
    def prefix_id(self) -> int:
        """Token in front of a text without context: BOS where the tokenizer adds one, else a stop token."""
        return next(iter([*self.tokenizer.encode(""), *sorted(self.eos_ids)]), 0)

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

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood (nats) of `continuation` and whether it is the greedy one; cut from the left if too long."""
        if not continuation:
            return 0.0, True
        ids = [*context, *continuation][-(self.lm.max_length + 1) :]
        count = min(len(continuation), len(ids) - 1)
        self.lm.truncate(0)
        with torch.no_grad():
            logits_CV = self.lm.forward(torch.tensor(ids[:-1]), last=count)
        targets_C = torch.tensor(ids[-count:], device=logits_CV.device)
        chosen_C = logits_CV.log_softmax(-1).gather(-1, targets_C.unsqueeze(-1))
        return float(chosen_C.sum()), bool((logits_CV.argmax(-1) == targets_C).all())

    def answer(self, context: str, key: str, stops: Sequence[str], max_tokens: int) -> str:
        """Greedy continuation up to a stop string, a stop token or `max_tokens`; `key` names it in `cuts`."""
        room = require_room(max_tokens, self.lm.max_length)
        prompt = self.encode(context)
        if len(prompt) > room:
            self.cuts.prompts.add(key)
        text, finished = self._generate(prompt[-room:] or [self.prefix_id], stops, max_tokens)
        if not finished:
            self.cuts.answers.add(key)
        return text

    def _generate(self, prompt: list[int], stops: Sequence[str], max_tokens: int) -> tuple[str, bool]:
        words, ids = self._split_stops(stops)
        found: list[int] = []
        reach = max((len(word.encode()) for word in words), default=0)

        def watch(tokens: list[int]) -> None:
            found.extend(tokens)
            tail = self.tokenizer.decode(found[-(reach + len(tokens)) :])
            if any(word in tail for word in words):
                raise _StopFound

        stopped = "stop"
        try:
            greedy, unused = Sampling(), torch.Generator()
            stopped = generate(self.lm, None, None, prompt, max_tokens, greedy, ids, unused, watch).stopped
        except _StopFound:
            pass
        text = self.tokenizer.decode(found)
        for word in words:
            text = text.split(word)[0]
        return text, stopped in ("stop", "eos")

    def _split_stops(self, stops: Sequence[str]) -> tuple[list[str], set[int]]:
        """Stop strings to watch for in the text, and stop tokens: those of the model and special ones in `stops`."""
        ids = {stop: self.tokenizer.encode(stop, special=False) for stop in stops if stop}
        special = {stop for stop, tokens in ids.items() if len(tokens) == 1 and not self.tokenizer.decode(tokens)}
        return [stop for stop in ids if stop not in special], {ids[stop][0] for stop in special} | self.eos_ids


def require_room(max_tokens: int, context: int) -> int:
    """Tokens that an answer leaves for its prompt; raises `RecipeError` if none."""
    if context - max_tokens < 1:
        rule = f"leave no room for a prompt in a context of {context} tokens"
        raise RecipeError(f"answers of {max_tokens} tokens", rule, "set max_gen_toks of the task lower")
    return context - max_tokens


class _StopFound(Exception):
    """A stop string has appeared: unwinds the engine's loop."""
