"""Requests whose whole loop runs on a device (`nn.cuda.loop`): the host admits them, and reads every few steps.

Lengths of drafts are fixed by how many requests go on; drafters that are no model, trees, and policies that learn from
single steps stay with `batch`.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from qspec.errors import RecipeError
from qspec.nn.cuda.loop import CudaLoop, Greedy, Rule, Sampled
from qspec.speculation.batch import Prompt
from qspec.speculation.length.policies import Schedule, limit_at
from qspec.speculation.request import check_prompt
from qspec.speculation.types import Generation, Sampling, StepRecord, Stop, draw_uniforms


def rule_of(sampling: Sampling) -> Rule:
    """How the loop draws tokens under these settings."""
    return Greedy() if sampling.greedy else Sampled(sampling.law)


@dataclass
class _Running:
    number: int
    prompt: Prompt
    eos_ids: Collection[int]
    tokens: list[int]
    ttft: float
    first: float
    newest: float
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.tokens[-1] in self.eos_ids else self.prompt.max_new_tokens - len(self.tokens)

    def take(self, tokens: list[int], drafts: int, stood: int, seconds: float) -> None:
        """A step's outcome; drafts behind a stop token or the end were not tested (`StepRecord`)."""
        accepted = len(tokens) - 1
        self.tokens += tokens
        self.steps.append(StepRecord(drafts if accepted == stood else accepted, accepted, 0.0, seconds, 0.0, drafts))
        self.newest = perf_counter()

    def result(self) -> Generation:
        stopped: Stop = "eos" if self.tokens[-1] in self.eos_ids else "length"
        return Generation(self.tokens, self.steps, self.ttft, self.newest - self.first, stopped)


@torch.no_grad()
def generate_on_device(
    loop: CudaLoop,
    prompts: Sequence[Prompt],
    schedule: Schedule,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Generation]:
    """Continue all prompts, as many at once as the loop has slots; results in their order.

    schedule: drafts by the number of requests that go on, at most the loop's. Tokens are those of
    `batch.generate_batch` with a `ModelDrafter` of that length each; sampled ones until the end is near, where that one
    draws fewer. A request's numbers come from its own generator, which cannot be `Repeatable`. The seconds of a step
    are its share of the interval between two readings, and count as verification.
    Raises `RecipeError` for prompts that are empty, have no room, or want a text that repeats.
    """
    for prompt in prompts:
        check_prompt(prompt.tokens, loop.room, loop.target.model.arch.vocab_size)
        loop.check(len(prompt.tokens), prompt.max_new_tokens)
        _generator(prompt)
    emit = on_tokens or (lambda _, __: None)
    waiting = deque((i, prompt) for i, prompt in enumerate(prompts) if prompt.max_new_tokens > 0)
    running: dict[int, _Running] = {}
    done: dict[int, Generation] = {}
    begin = perf_counter()
    while waiting or running:
        for slot in [slot for slot in range(loop.sequences) if slot not in running][: len(waiting)]:
            running[slot] = _admitted(loop, slot, *waiting.popleft(), begin)
            emit(running[slot].number, list(running[slot].tokens))
        going = {slot: request for slot, request in running.items() if request.left}
        if going:
            _interval(loop, going, min(limit_at(schedule, len(going)), loop.drafts), emit)
        for slot in [slot for slot, request in running.items() if not request.left]:
            request = running.pop(slot)
            done[request.number] = request.result()
    return [done.get(i, Generation([])) for i in range(len(prompts))]


def _admitted(loop: CudaLoop, slot: int, number: int, prompt: Prompt, asked: float) -> _Running:
    uniform_1 = draw_uniforms(1 if loop.rule.draws else 0, _generator(prompt))
    first = loop.begin(slot, torch.tensor(prompt.tokens), prompt.max_new_tokens, uniform_1)
    now = perf_counter()
    return _Running(number, prompt, loop.eos_ids, [first], now - asked, now, now)


def _generator(prompt: Prompt) -> torch.Generator:
    if isinstance(prompt.generator, torch.Generator):
        return prompt.generator
    rule = "depends on how many run beside it here, where every step draws for all"
    raise RecipeError("a text that repeats", rule, "give a torch.Generator, or use batch.generate_batch")


def _interval(loop: CudaLoop, going: dict[int, _Running], drafts: int, emit: Callable[[int, list[int]], None]) -> None:
    """Steps up to the next reading."""
    begin, batch = perf_counter(), max(going) + 1
    steps = min(loop.steps, max(request.left for request in going.values()))
    if loop.rule.draws:
        uniforms_SBU = torch.zeros(steps, batch, 2 * drafts + 1, dtype=torch.float64)
        for slot, request in going.items():
            uniforms_N = draw_uniforms(uniforms_SBU[:, slot].numel(), _generator(request.prompt))
            uniforms_SBU[:, slot] = uniforms_N.view(steps, -1)
        loop.feed(uniforms_SBU)
    loop.run(drafts, batch, steps)
    tokens, stood = loop.read(batch, steps)
    seconds = (perf_counter() - begin) / steps / len(going)
    for slot, request in going.items():
        for committed, count in zip(tokens[slot], stood[slot], strict=True):
            if committed:
                request.take(committed, drafts, count, seconds)
                emit(request.number, committed)
