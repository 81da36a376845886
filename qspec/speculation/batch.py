"""Several requests at once: every step is one pass of the target over the rows of all.

Weights are read once per step for everybody, so drafts pay less the more requests there are (`Schedule`). Requests know
nothing of each other: each has its own cache, drafter, policy and randomness. What fails at one of them ends that one.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import TypeVar, cast
import warnings

import torch
from torch import Tensor

from qspec.nn.lm import BatchLM, GreedyLM, torch_beside
from qspec.speculation.device import on_device
from qspec.speculation.length.policies import BatchLimited, Heuristic, Schedule
from qspec.speculation.request import GenerationRequest, Request, check_prompt, drafts
from qspec.speculation.types import Generation, Proposal, Sampling, Verdict

__all__ = ["Batch", "GenerationRequest", "generate_batch"]

T = TypeVar("T")


@torch.no_grad()
def generate_batch(
    target: BatchLM,
    prompts: Sequence[GenerationRequest],
    sampling: Sampling,
    eos_ids: Collection[int],
    schedule: Schedule = (),
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Generation]:
    """Continue all prompts together, each on a fork of `target`; results in their order.

    Tokens are bit for bit those of `engine.generate` where rows are computed as if alone (`attention.EXACT_ROWS`). A
    request leaves the batch when it is finished; prompts are read one after the other. schedule: the most drafts, by
    the number of requests that still run. on_tokens: called with a request's number and its tokens as they are
    committed. A step's seconds are shared out (a pass's by `PassShares`), so the steps of all requests add up to
    wall-clock time. Raises `RecipeError` as `engine.generate` does, and whatever fails at one of the requests.
    """
    for prompt in prompts:
        check_prompt(prompt.tokens, target.max_length, target.vocab_size)
    generations = on_device(target, prompts, sampling, eos_ids, schedule, on_tokens)
    if generations is not None:
        return generations
    emit = on_tokens or (lambda _, __: None)
    batch, done = Batch(schedule), dict[int, Generation]()
    pending = [(i, prompt) for i, prompt in enumerate(prompts) if prompt.max_new_tokens > 0]
    for i, prompt in pending:
        batch.join(i, target.fork(), prompt, sampling, eos_ids)
    with torch_beside(target):
        for i, prompt in pending:
            emit(i, batch.read(i, prompt.domain))
        while len(batch):
            for i in batch.finished():
                done[i] = batch.leave(i).result()
            if len(batch):
                for error in batch.step(emit).values():
                    raise error
    return [done.get(i, Generation([])) for i in range(len(prompts))]


class Batch:
    """Requests that run together, each under a number of the caller's; between steps some join and others leave.

    schedule: the most drafts, by the number of requests.
    """

    def __init__(self, schedule: Schedule = ()) -> None:
        self._schedule = schedule
        self._active: dict[int, Request] = {}
        self._targets: dict[int, BatchLM] = {}
        self._shares = PassShares()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, number: int) -> bool:
        return number in self._active

    def join(
        self, number: int, target: BatchLM, prompt: GenerationRequest, sampling: Sampling, eos_ids: Collection[int]
    ) -> None:
        """Add a request, on a sequence `target` of its own; call `read` before its first step."""
        request = _request(target, prompt, self._schedule, lambda: len(self._active), sampling, eos_ids)
        self._active[number], self._targets[number] = request, target

    @torch.no_grad()
    def read(self, number: int, domain: str = "") -> list[int]:
        """Read a request's prompt and return its first token."""
        return self._active[number].prefill(domain)

    @torch.no_grad()
    def step(self, emit: Callable[[int, list[int]], None]) -> dict[int, Exception]:
        """Advance all requests, none of them finished, by one pass of the target; `emit` gets numbers and their tokens.

        Returns the failures by request number. A request that failed cannot go on: call `leave` for it.
        """
        return _step(self._active, self._targets, self._shares, emit)

    def finished(self) -> list[int]:
        return [number for number, request in self._active.items() if request.stopped() is not None]

    def leave(self, number: int) -> Request:
        """Take a request out, finished or not; its target is free again."""
        del self._targets[number]
        return self._active.pop(number)


def _request(
    target: BatchLM,
    prompt: GenerationRequest,
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
    """Splits a pass's seconds among its requests: each pays for the rows of its own drafts, and all share the rest.

    An even split would charge a request one n-th of what its draft costs the batch, so that each would draft at the
    others' expense. The price of a row is the slope of a line through recent passes: not below 0, not above the mean
    price of a row, and 0 until passes differ in rows.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def of(self, seconds: float, rows: Sequence[int]) -> list[float]:
        """Seconds of each request, by its rows in a pass; their sum is the pass's."""
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
) -> dict[int, Exception]:
    """One pass for all requests that run; returns errors by request number."""
    begin, faults = perf_counter(), dict[int, Exception]()
    lengths = {i: fork.length for i, fork in forks.items()}

    def drafted(numbers: Sequence[int]) -> list[Proposal]:
        return drafts([active[i] for i in numbers])

    def passed(numbers: Sequence[int]) -> list[Callable[[], Verdict]]:
        for i in numbers:
            forks[i].truncate(lengths[i])  # undo what a failed pass of all has added
        return _pass([active[i] for i in numbers], [proposals[i] for i in numbers], [forks[i] for i in numbers])

    def committed(i: int) -> tuple[int, int]:
        drafted, tokens = active[i].commit(proposals[i], verdicts[i])
        active[i].policy.update(drafted, len(tokens) - 1, proposals[i].seconds, seconds[i])
        emit(i, tokens)
        return drafted, len(tokens) - 1

    proposals = _together(drafted, list(active), faults)
    fed = perf_counter()
    judges = _together(passed, list(proposals), faults)
    verdicts = _each(lambda i: judges[i](), judges, faults)
    verifying = perf_counter() - fed
    rows = [len(proposals[i].tokens_K) + 1 for i in judges]
    seconds = dict(zip(judges, shares.of(verifying, rows) if rows else (), strict=True))
    counts = _each(committed, verdicts, faults)
    drafting = sum(proposal.seconds for proposal in proposals.values())
    t_other = (perf_counter() - begin - drafting - verifying) / len(active)
    _each(lambda i: active[i].book(*counts[i], proposals[i], seconds[i], t_other), counts, faults)
    return faults


def _together(
    call: Callable[[Sequence[int]], Sequence[T]], numbers: Sequence[int], faults: dict[int, Exception]
) -> dict[int, T]:
    """Call once for all requests and, if that fails, once for each, so that a fault hits its own request only."""
    try:
        return dict(zip(numbers, call(numbers) if numbers else (), strict=True))
    except Exception as error:  # noqa: BLE001 (whoever caused it fails again)
        results = _each(lambda i: call([i])[0], numbers, faults)
        if len(results) == len(numbers):
            warnings.warn(f"what {len(results)} requests shared was done for each: {error!r}", RuntimeWarning, 2)
        return results


def _each(call: Callable[[int], T], numbers: Iterable[int], faults: dict[int, Exception]) -> dict[int, T]:
    """Call for each request, and note what it raises as that request's fault."""
    results: dict[int, T] = {}
    for i in numbers:
        try:
            results[i] = call(i)
        except Exception as error:  # noqa: BLE001 (it is told to whoever made this request)
            faults[i] = error
    return results


def _pass(
    requests: Sequence[Request], proposals: Sequence[Proposal], sequences: Sequence[BatchLM]
) -> list[Callable[[], Verdict]]:
    """One pass of the target, and for each request how its rows are judged."""
    first, (tokens, parents) = sequences[0], zip(*map(Request.rows, requests, proposals), strict=True)
    judge: Callable[[Request, Proposal, Tensor], Verdict] = Request.verify
    if isinstance(first, GreedyLM) and all(request.sampling.greedy for request in requests):
        judge, rows = Request.verify_best, first.greedy_many(cast("Sequence[GreedyLM]", sequences), tokens, parents)
    else:
        rows = first.forward_many(sequences, tokens, parents)
    return [partial(judge, *one) for one in zip(requests, proposals, rows, strict=True)]


RECENT = 32
"""Passes that the seconds of a further row are estimated from."""
