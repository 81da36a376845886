"""Scoring and answering by qspec's own engine."""

from collections.abc import Collection, Sequence

import torch

from qspec.bridges.harness.prompts import Prompts
from qspec.nn.lm import LM
from qspec.nn.reuse import PrefixReuse
from qspec.records import Tokenizer
from qspec.speculation.engine import generate
from qspec.speculation.types import Sampling


class Engine(Prompts):
    """The harness's three questions, answered by an `LM`. Prompts that share a beginning share its computation."""

    at_once = 1

    def __init__(self, lm: LM, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        super().__init__(tokenizer, eos_ids)
        self.lm = PrefixReuse(lm)

    @property
    def window(self) -> int:
        return self.lm.max_length

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
        prompt = self.fit(context, key, max_tokens, self.lm.max_length)
        text, finished = self._generate(prompt, stops, max_tokens)
        if not finished:
            self.cuts.answers.add(key)
        return text

    def _generate(self, prompt: list[int], stops: Sequence[str], max_tokens: int) -> tuple[str, bool]:
        words, ids = self.split_stops(stops)
        answer: list[int] = []
        reach = max((len(word.encode()) for word in words), default=0)

        def watch(tokens: list[int]) -> None:
            answer.extend(tokens)
            tail = self.tokenizer.decode(answer[-(reach + len(tokens)) :])
            if any(word in tail for word in words):
                raise _StopFound

        stopped = "stop"
        try:
            greedy, unused = Sampling(), torch.Generator()
            stopped = generate(self.lm, None, None, prompt, max_tokens, greedy, ids, unused, watch).stopped
        except _StopFound:
            pass
        text = self.tokenizer.decode(answer)
        for word in words:
            text = text.split(word)[0]
        return text, stopped in ("stop", "eos")


class _StopFound(Exception):
    """A stop string has appeared: unwinds the engine's loop."""
