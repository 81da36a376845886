"""Scoring and answering by a server with an OpenAI-style API: what lm-eval calls local-completions, or -chat-.

Over completions prompts are sent as tokens, made as qspec's own engine makes them; over chat completions as messages,
and the server applies its template.
"""

from collections.abc import Collection, Sequence
import json
from threading import Lock

from qspec.bridges.harness.prompts import CHAT, Prompts
from qspec.bridges.openai_api import Api
from qspec.errors import RecipeError
from qspec.records import Tokenizer


class ServedModel(Prompts):
    """The harness's three questions, answered by `api`, `at_once` of them at a time. context: tokens that it holds."""

    def __init__(
        self, api: Api, tokenizer: Tokenizer, eos_ids: Collection[int], context: int, chat: bool, at_once: int
    ) -> None:
        super().__init__(tokenizer, eos_ids)
        self.api, self.context, self.chat, self.at_once = api, context, chat, at_once
        self._tokenizing = Lock()  # fast tokenizers refuse to be used by two threads

    @property
    def window(self) -> int:
        """One token must follow those that are scored, and the last of them is read too."""
        return self.context - 2

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood (nats) of `continuation` and whether it is the greedy one; cut from the left if too long."""
        if self.chat:
            rule = "tells no probabilities of a given answer, which this task compares"
            raise RecipeError("a chat API", rule, "set evaluation.api.chat: false")
        if not continuation:
            return 0.0, True
        ids = [*context, *continuation][-(self.window + 1) :]
        scored = self.api.score(ids)[-min(len(continuation), len(ids) - 1) :]
        return sum(chosen for chosen, _ in scored), all(chosen >= best for chosen, best in scored)

    def answer(self, context: str, key: str, stops: Sequence[str], max_tokens: int) -> str:
        """Greedy continuation up to a stop string, a stop token or `max_tokens`; `key` names it in `cuts`."""
        with self._tokenizing:
            words, ids = self.split_stops(stops)
            prompt: list[int] | list[dict[str, str]] = self.fit(context, key, max_tokens, self.context)
        if self.chat:
            if not context.startswith(CHAT):
                raise RecipeError("a chat API", "takes conversations", "set chat_template: true in the task")
            prompt = json.loads(context.removeprefix(CHAT))
        completion = self.api.complete(prompt, max_tokens, words, sorted(ids - self.eos_ids))
        if completion.cut:
            self.cuts.answers.add(key)
        return completion.text
