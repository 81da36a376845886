"""Several requests at once: every step is one pass of the target over the rows of all.

Weights are read once per step for everybody, so drafts pay less the more requests there are (`Schedule`). Requests know
nothing of each other: each has its own cache, drafter, policy and randomness.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from qspec.nn.lm import BatchLM, GreedyLM, torch_beside
from qspec.numerics.speculation.trees import Parents
from qspec.speculation.length.policies import BatchLimited, Heuristic, Schedule
from qspec.speculation.request import Request, check_prompt, drafts
from qspec.speculation.types import Drafter, DraftLength, Generation, Proposal, Sampling, Verdict


@dataclass(frozen=True)
class Prompt:
    """What one request of a batch brings; fields as in `engine.generate`. No two share a drafter or a policy."""

    tokens: list[int]
    max_new_tokens: int
    generator: torch.Generator
    drafter: Drafter | None = None
    policy: DraftLength | None = None
    domain: str = ""


@torch.no_grad()
def generate_batch(
    target: BatchLM,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    eos_ids: Collection[int],
    schedule: Schedule = (),
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Generation]:
    """Continue all prompts together, each on a fork of `target`; results in their order.

    Tokens are bit for bit those of `engine.generate` where rows are computed as if alone (`attention.EXACT_ROWS`).
    A request leaves the batch when it is finished; prompts are read one after the other. schedule: most drafts by the
    number of requests that go on. on_tokens: called with a request's number and its tokens as they are committed.
    A step's seconds are shared out (a pass's by `PassShares`), so the steps of all requests add up to wall-clock time.
    Raises `RecipeError` as `engine.generate` does.
    """
    for prompt in prompts:
        check_prompt(prompt.tokens, target.max_length, target.vocab_size)
    emit = on_tokens or (lambda _, __: None)
    batch, done = Batch(schedule), dict[int, Generation]()
    asked = [(i, prompt) for i, prompt in enumerate(prompts) if prompt.max_new_tokens > 0]
    for i, prompt in asked:
        batch.join(i, target.fork(), prompt, sampling, eos_ids)
    with torch_beside(target):
        for i, prompt in asked:
            emit(i, batch.read(i, prompt.domain))
        while len(batch):
            for i in batch.finished():
                done[i] = batch.leave(i).result()
            if len(batch):
                batch.step(emit)
    return [done.get(i, Generation([])) for i in range(len(prompts))]


class Batch:
    """Requests that go on together, by numbers of the caller's; between steps some may join and others leave.

    schedule: most drafts by how many there are.
    """

    def __init__(self, schedule: Schedule = ()) -> None:
        self._schedule = schedule
        self._active: dict[int, Request] = {}
        self._targets: dict[int, BatchLM] = {}
        self._shares = PassShares()

    def __len__(self) -> int:
        return len(self._active)

    def join(self, number: int, target: BatchLM, prompt: Prompt, sampling: Sampling, eos_ids: Collection[int]) -> None:
        """A request on `target`, a sequence of its own; `read` comes before its first step."""
        request = _request(target, prompt, self._schedule, lambda: len(self._active), sampling, eos_ids)
        self._active[number], self._targets[number] = request, target

    @torch.no_grad()
    def read(self, number: int, domain: str = "") -> list[int]:
        """Read a request's prompt; its first token."""
        return self._active[number].prefill(domain)

    @torch.no_grad()
    def step(self, emit: Callable[[int, list[int]], None]) -> None:
        """One pass of the target for all, none of them finished; `emit` is told the tokens of each by its number."""
        _step(self._active, self._targets, self._shares, emit)

    def finished(self) -> list[int]:
        return [number for number, request in self._active.items() if request.stopped() is not None]

    def leave(self, number: int) -> Request:
        """The request, finished or not; its target is free again."""
        del self._targets[number]
        return self._active.pop(number)


def _request(
    target: BatchLM,
    prompt: Prompt,
    schedule: Schedule,
    batch: Callable[[], int],
    sampling: Sampling,
    eos_ids: Collection[int],
) -> Request:
    policy = prompt.policy or Heuristic()
    policy = BatchLimited(policy, schedule, batch) if schedule else policy
    end = len(prompt.tokens) + prompt.max_new_tokens
    return Request(target, prompt.drafter, policy, prompt.tokens, end, sampling, eos_ids, prompt.generator)


class PassShares:
    """Splits passes over the rows of several requests: what drafts add is theirs who drafted, the rest is everyone's.

    Shared out evenly, a draft would cost its request one n-th of what it costs the batch, and each would draft at the
    others' expense. What a row adds is the slope of a line through recent passes: at least nothing, at most the mean of
    a pass's rows; nothing before passes differ in rows.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def of(self, seconds: float, rows: Sequence[int]) -> list[float]:
        """Seconds of each request, by its rows in a pass; they add up."""
        total, requests = sum(rows), len(rows)
        self._passes.append((total, seconds))
        row = min(max(0.0, self._slope()), seconds / total)
        everyones = (seconds - row * (total - requests)) / requests
        return [everyones + row * (own - 1) for own in rows]

    def _slope(self) -> float:
        rows, seconds = zip(*self._passes, strict=True)
        mean_rows, mean_seconds = fmean(rows), fmean(seconds)
        over = sum((r - mean_rows) * (s - mean_seconds) for r, s in self._passes)
        under = sum((r - mean_rows) ** 2 for r in rows)
        return over / under if under else 0.0


def _step(
    active: dict[int, Request],
    forks: dict[int, BatchLM],
    shares: PassShares,
    emit: Callable[[int, list[int]], None],
) -> None:
    """One pass for all requests that go on."""
    begin, requests = perf_counter(), list(active.values())
    proposals = drafts(requests)
    fed = perf_counter()
    tokens, parents = zip(*map(Request.rows, requests, proposals), strict=True)
    sequences = [forks[i] for i in active]
    verdicts = _verify(requests, proposals, sequences, tokens, parents)
    verifying = perf_counter() - fed
    t_verify = shares.of(verifying, list(map(len, tokens)))
    counts: list[tuple[int, int]] = []
    for i, proposal, verdict, seconds in zip(active, proposals, verdicts, t_verify, strict=True):
        drafted, committed = active[i].commit(proposal, verdict)
        counts.append((drafted, len(committed) - 1))
        active[i].policy.update(*counts[-1], proposal.seconds, seconds)
        emit(i, committed)
    drafting = sum(proposal.seconds for proposal in proposals)
    t_other = (perf_counter() - begin - drafting - verifying) / len(requests)
    for request, proposal, (drafted, accepted), seconds in zip(requests, proposals, counts, t_verify, strict=True):
        request.book(drafted, accepted, proposal, seconds, t_other)


def _verify(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    sequences: Sequence[BatchLM],
    tokens: Sequence[Tensor],
    parents: Sequence[Parents | None],
) -> list[Verdict]:
    first = sequences[0]
    if isinstance(first, GreedyLM) and all(request.sampling.greedy for request in requests):
        best = first.greedy_many(cast("Sequence[GreedyLM]", sequences), tokens, parents)  # forks of one model
        return list(map(Request.verify_best, requests, proposals, best))
    return list(map(Request.verify, requests, proposals, first.forward_many(sequences, tokens, parents)))


RECENT = 32
"""Passes that the seconds of a further row are estimated from."""
