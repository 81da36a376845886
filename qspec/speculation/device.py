"""Requests whose whole loop runs on a device (`nn.cuda.loop`): the host admits them, and reads every few steps.

`engine.generate` and `batch.generate_batch` try `on_device` first, so every verb runs this loop on a GPU. Requests that
have an `obstacle` are stepped by the host instead, on the same CUDA engine.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
import logging
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.cuda.decoder import CudaDecoder, Pool
from qspec.nn.cuda.loop import CudaLoop, DraftRule, Greedy, Sampled
from qspec.nn.cuda.passes import NODES
from qspec.nn.lm import LM
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.length.policies import Schedule, constant, limit_at
from qspec.speculation.request import GenerationRequest, check_prompt
from qspec.speculation.types import Drafter, Generation, Sampling, StepRecord, Stop, draw_uniforms


def rule_of(sampling: Sampling) -> DraftRule:
    """How the loop draws tokens under these settings."""
    return Greedy() if sampling.greedy else Sampled(sampling.probs)


@torch.no_grad()
def on_device(
    target: LM,
    prompts: Sequence[GenerationRequest],
    sampling: Sampling,
    eos_ids: Collection[int],
    schedule: Schedule = (),
    on_tokens: Callable[[int, list[int]], None] | None = None,
    fork: bool = True,
) -> list[Generation] | None:
    """Generations as of `batch.generate_batch`, by the loop of a target on a device; None where the host has to step.

    on_tokens: called every few steps. fork: give each prompt a fork of `target`; otherwise a single prompt runs on
    `target` itself, which ends behind all tokens but the newest, as after `engine.generate`.
    """
    if not isinstance(target, CudaDecoder) or not prompts:
        return None
    reason = obstacle(target, prompts, sampling)
    if reason is not None:
        _warn_once(reason)
        return None
    sequences = [target.fork() if fork else target for _ in prompts]
    slots = [sequence.slot for sequence in sequences]
    length, drafter, tokens = _length(prompts[0]) or 0, prompts[0].drafter, None
    if isinstance(drafter, ModelDrafter):
        tokens = drafter.tokens
    loop = target.weights.loop(
        _draft(drafter),
        (sampling, length, frozenset(eos_ids), tokens),
        lambda target, draft: CudaLoop(target, draft, rule_of(sampling), length, eos_ids, tokens=tokens),
    )
    generations = generate_on_device(loop, prompts, schedule or ((1, 1, length),), on_tokens, slots)
    if not fork:
        target.hold(len(prompts[0].tokens) + len(generations[0].tokens) - 1)
    return generations


def obstacle(target: CudaDecoder, prompts: Sequence[GenerationRequest], sampling: Sampling) -> str | None:
    """Why the loop does not run these requests together, in words; None when it does."""
    lengths, room = [_length(prompt) for prompt in prompts], target.max_length
    for prompt, length in zip(prompts, lengths, strict=True):
        draft = _draft(prompt.drafter)
        if prompt.drafter is not None and draft is None:
            return f"drafts of {type(prompt.drafter).__name__}, where it takes chains of a draft model on the GPU"
        if length is None:
            return "a draft length that learns from every step (draft_length.policy: fixed does not)"
        if not (sampling.greedy or isinstance(prompt.generator, torch.Generator)):
            return "sampled texts that a seed repeats, whose numbers go by position"
        if draft is not _draft(prompts[0].drafter) or length != lengths[0]:
            return "requests that draft differently"
        if length >= NODES:
            return f"{length} drafts, where a pass holds {NODES} rows"
        room = room if draft is None else min(room, draft.passes.cache.length)
        if len(prompt.tokens) + prompt.max_new_tokens > room - length:
            return f"an answer that may reach the end of the cache ({room} positions, {length} drafts)"
    return None


def _length(prompt: GenerationRequest) -> int | None:
    """Drafts of every step; None where a policy learns."""
    return 0 if prompt.drafter is None else constant(prompt.policy)


def _draft(drafter: Drafter | None) -> Pool | None:
    """The weights of a draft model on a device."""
    lm = drafter.lm if isinstance(drafter, ModelDrafter) else None
    return lm.weights if isinstance(lm, CudaDecoder) else None


@lru_cache
def _warn_once(reason: str) -> None:
    logging.getLogger(__name__).warning("the host runs every step, not the loop on the GPU: %s", reason)


@dataclass
class _Running:
    number: int
    prompt: GenerationRequest
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

    def take(self, tokens: list[int], drafts: int, kept: int, seconds: float) -> None:
        """A step's outcome; drafts behind a stop token or the end were not tested (`StepRecord`)."""
        accepted = len(tokens) - 1
        self.tokens += tokens
        self.steps.append(StepRecord(drafts if accepted == kept else accepted, accepted, 0.0, seconds, 0.0, drafts))
        self.newest = perf_counter()

    def result(self) -> Generation:
        stopped: Stop = "eos" if self.tokens[-1] in self.eos_ids else "length"
        return Generation(self.tokens, self.steps, self.ttft, self.newest - self.first, stopped)


@torch.no_grad()
def generate_on_device(
    loop: CudaLoop,
    prompts: Sequence[GenerationRequest],
    schedule: Schedule,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    slots: Sequence[int] | None = None,
) -> list[Generation]:
    """Continue all prompts, as many at once as there are `slots` (default: all of the loop); results in their order.

    schedule: drafts by the number of requests that go on, at most the loop's. Tokens are those of
    `batch.generate_batch` with a `ModelDrafter` of that length each; sampled ones until the end is near, where that one
    draws fewer. A request's numbers come from its own `torch.Generator`. The seconds between two readings are shared
    out among the steps that committed something, and count as verification; what captures a graph is not among them.
    Raises `RecipeError` for prompts that are empty or have no room.
    """
    for prompt in prompts:
        check_prompt(prompt.tokens, loop.room, loop.target.model.arch.vocab_size)
        loop.check(len(prompt.tokens), prompt.max_new_tokens)
        _uniforms(loop, prompt, 0)
    emit = on_tokens or (lambda _, __: None)
    waiting = deque((i, prompt) for i, prompt in enumerate(prompts) if prompt.max_new_tokens > 0)
    running: dict[int, _Running] = {}
    done: dict[int, Generation] = {}
    places, begin = range(loop.sequences) if slots is None else slots, perf_counter()
    loop.rest()
    while waiting or running:
        for slot in [slot for slot in places if slot not in running][: len(waiting)]:
            running[slot] = _admitted(loop, slot, *waiting.popleft(), begin)
            emit(running[slot].number, list(running[slot].tokens))
        going = {slot: request for slot, request in running.items() if request.left}
        if going:
            _interval(loop, going, min(limit_at(schedule, len(going)), loop.drafts), emit)
        for slot in [slot for slot, request in running.items() if not request.left]:
            request = running.pop(slot)
            done[request.number] = request.result()
    return [done.get(i, Generation([])) for i in range(len(prompts))]


def _admitted(loop: CudaLoop, slot: int, number: int, prompt: GenerationRequest, start: float) -> _Running:
    first = loop.begin(slot, torch.tensor(prompt.tokens), prompt.max_new_tokens, _uniforms(loop, prompt, 1))
    now = perf_counter()
    return _Running(number, prompt, loop.eos_ids, [first], now - start, now, now)


def _uniforms(loop: CudaLoop, prompt: GenerationRequest, count: int) -> Tensor:
    """Uniform numbers from the request's own generator; empty where the loop draws none. Raises `RecipeError` for a
    text that repeats.
    """
    if not loop.rule.draws:
        return torch.empty(0, dtype=torch.float64)
    if isinstance(prompt.generator, torch.Generator):
        return draw_uniforms(count, prompt.generator)
    rule = "depends on how many run beside it here, where every step draws for all"
    raise RecipeError("a text that repeats", rule, "give a torch.Generator, or use batch.generate_batch")


def _interval(loop: CudaLoop, going: dict[int, _Running], drafts: int, emit: Callable[[int, list[int]], None]) -> None:
    """Steps until the host reads again."""
    batch = max(going) + 1
    loop.capture(drafts, batch)
    begin = perf_counter()
    steps = min(loop.steps, max(request.left for request in going.values()))
    if loop.rule.draws:
        uniforms_SBU = torch.zeros(steps, batch, 2 * drafts + 1, dtype=torch.float64)
        for slot, request in going.items():
            uniforms_SBU[:, slot] = _uniforms(loop, request.prompt, uniforms_SBU[:, slot].numel()).view(steps, -1)
        loop.feed(uniforms_SBU)
    loop.run(drafts, batch, steps)
    tokens, accepted = loop.read(batch, steps)
    seconds = (perf_counter() - begin) / max(1, sum(bool(step) for slot in going for step in tokens[slot]))
    for slot, request in going.items():
        for committed, count in zip(tokens[slot], accepted[slot], strict=True):
            if committed:
                request.take(committed, drafts, count, seconds)
                emit(request.number, committed)
