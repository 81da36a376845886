"""A pair behind a queue: requests join the running batch between steps and leave it when they are done.

One thread runs the engine. Each place in the batch has a sequence of the target, a drafter and a policy, which serve
one request after the other, so that a suffix memory and all that a policy has learned outlive a request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Lock, Thread
import traceback
from typing import Any, Literal, Self, cast

from qspec.nn.lm import BatchLM, torch_beside
from qspec.pair.drafters.registry import request_policy
from qspec.pair.open import LoadedPair
from qspec.pair.text_stream import TextStream
from qspec.speculation.batch import Batch, GenerationRequest
from qspec.speculation.request import Request, check_prompt
from qspec.speculation.types import Drafter, DraftLength, Sampling, randomness

Reason = Literal["stop", "length"]


class Failed(Exception):
    """An answer that could not be finished; why is on standard error too, with its traceback."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")


class Stopped(Failed):
    """The scheduler was closed before the answer was complete."""

    def __init__(self) -> None:
        Exception.__init__(self, "the server was stopped")


class Until:
    """Text up to the first of some strings; what may yet become one of them is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.reached = stops, "", False

    def add(self, piece: str) -> str:
        """Add `piece`; returns the text that is certain now."""
        if self.reached:
            return ""
        text = self._held + piece
        positions = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.reached = bool(positions)
        sure = min(positions) if positions else len(text) - self._open(text)
        self._held = "" if positions else text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """The text that was held back and became no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _open(self, text: str) -> int:
        """Characters at the end of `text` that one of the strings begins with."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(most, len(text)), 0, -1)
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


@dataclass
class ServedRequest:
    """A request and its answer: iterate over the text as it comes; then `reason` and `count` are known.

    loop: the event loop that iterates; the engine's thread puts the pieces there. seed: as for `randomness`. ends:
    token ids that end the answer. count: its tokens, without those behind a stop string; drafted, accepted: its draft
    tokens. unwanted: the client has gone.
    """

    loop: asyncio.AbstractEventLoop

    prompt: list[int]
    most: int
    sampling: Sampling
    seed: int | None
    ends: frozenset[int]
    stops: tuple[str, ...] = ()
    count: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: Reason = "length"
    unwanted: bool = False
    _pieces: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)

    def fail(self, error: Exception) -> None:
        """End it with `Failed`."""
        if not isinstance(error, Stopped):
            traceback.print_exception(error)
        self.put(error if isinstance(error, Stopped) else Failed(error))

    def drop(self) -> None:
        """Mark as unwanted: the client has gone."""
        self.unwanted = True

    def put(self, piece: str | Exception | None) -> None:
        """Hand over a piece of text, the error that ended the answer, or None at its end."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


@dataclass(frozen=True)
class _Place:
    """The part of a place in the batch that stays from request to request."""

    target: BatchLM
    drafter: Drafter | None
    policy: DraftLength


@dataclass
class _Going:
    """A running request, in its place."""

    answer: ServedRequest
    until: Until
    stream: TextStream


@dataclass
class Totals:
    """Totals since the start. drafts: steps that drafted; accepted_at[i]: those that accepted draft token i."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, request: Request) -> None:
        self.requests += 1
        self.prompt_tokens += len(request.prompt)
        self.tokens += len(request.context) - len(request.prompt)
        for step in (step for step in request.steps if step.drafted):
            self.drafts += 1
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.accepted_at += [0] * (step.accepted - len(self.accepted_at))
            for i in range(step.accepted):
                self.accepted_at[i] += 1


class Scheduler:
    """Runs a pair for at most `at_once` requests together; others wait. It answers while its context is entered.

    reader: the one thread that tokenizes for the server. Fast tokenizers refuse to be used by two threads at once.
    """

    def __init__(self, pair: LoadedPair, at_once: int = 8, speculative: bool = True) -> None:
        self.pair, self.at_once, self._speculative = pair, at_once, speculative
        self.counts, self.reader = Totals(), ThreadPoolExecutor(1, "qspec-reader")
        self.waiting: Queue[ServedRequest | None] = Queue()
        self._batch = Batch(pair.recipe.speculation.draft_length.by_batch)
        self._going: dict[int, _Going] = {}
        self._places: dict[int, _Place] = {}
        self._lent = self._closed = False
        self._closing = Lock()
        self._thread = Thread(target=self._run, name="qspec-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End requests that go on, and those that wait, with `Stopped`."""
        with self._closing:
            self._closed = True
            self.waiting.put(None)
        self._thread.join()
        self.reader.shutdown()

    @property
    def running(self) -> int:
        return len(self._going)

    def ask(self, answer: ServedRequest) -> ServedRequest:
        """Queue a request. Raises `RecipeError` for a prompt that cannot be continued, and `Stopped`."""
        check_prompt(answer.prompt, self.pair.target.max_length, self.pair.target.vocab_size)
        with self._closing:  # whatever is queued before the end gets `Stopped`
            if self._closed:
                raise Stopped
            self.waiting.put(answer)
        return answer

    def _run(self) -> None:
        with torch_beside(self.pair.target), ThreadPoolExecutor(1, "qspec-text") as worker:
            while self._admit(worker):
                try:
                    for number, error in self._batch.step(self._take).items():
                        self._drop(number, error)
                    self._settle()
                except Exception as error:  # noqa: BLE001 (whoever waits is told, and the next are answered)
                    self._end_all(error)
        self._end_all(Stopped())
        while not self.waiting.empty():
            if (answer := self.waiting.get()) is not None:
                answer.fail(Stopped())

    def _admit(self, worker: Executor) -> bool:
        """Admit queued requests while there is room, and wait while none runs; False: the scheduler is closed."""
        while not self._closed and len(self._going) < self.at_once:
            try:
                answer = self.waiting.get(block=not self._going)
            except Empty:
                break
            if answer is None:  # only there to wake this thread
                return False
            if answer.unwanted:
                continue
            number = next(i for i in range(self.at_once) if i not in self._going)
            try:
                self._begin(number, answer, worker)
                self._settle()
            except Exception as error:  # noqa: BLE001 (only whoever asked it is told)
                self._drop(number, error)
        return not self._closed

    def _begin(self, number: int, answer: ServedRequest, worker: Executor) -> None:
        until, runs = Until(answer.stops), _Here() if answer.stops else worker
        stream = TextStream(self.pair.model.tokenizer.decode, runs, lambda piece: _hand_on(answer, until.add(piece)))
        self._going[number] = _Going(answer, until, stream)
        if number not in self._places:
            self._places[number] = self._place()
        place = self._places[number]
        prompt = GenerationRequest(answer.prompt, answer.most, randomness(answer.seed), place.drafter, place.policy)
        self._batch.join(number, place.target, prompt, answer.sampling, answer.ends)
        self._take(number, self._batch.read(number))

    def _place(self) -> _Place:
        """A place on sequences of its own; the first one takes those that the pair has."""
        pair, own, self._lent = self.pair, not self._lent, True
        drafter = None
        if self._speculative:
            drafter = pair.drafter if own else pair.new_drafter()
        policy = request_policy(pair.recipe.speculation.draft_length)
        return _Place(cast("BatchLM", pair.target if own else pair.target.fork()), drafter, policy)

    def _take(self, number: int, tokens: list[int]) -> None:
        going = self._going[number]
        for run in [[token] for token in tokens] if going.answer.stops else [tokens]:
            if not going.until.reached:
                going.answer.count += len(run)
                going.stream.add(run)

    def _settle(self) -> None:
        """Let go of requests that are finished, that have reached a stop string, or that nobody waits for any more."""
        finished = set(self._batch.finished())
        for number, going in list(self._going.items()):
            if number in finished or going.until.reached or going.answer.unwanted:
                del self._going[number]
                try:
                    self._finish(going, self._batch.leave(number))
                except Exception as error:  # noqa: BLE001 (only whoever asked it is told)
                    going.answer.fail(error)

    def _finish(self, going: _Going, request: Request) -> None:
        answer = going.answer
        going.stream.finish()
        _hand_on(answer, going.until.rest())
        answer.reason = "stop" if going.until.reached or request.stopped() == "eos" else "length"
        answer.drafted = sum(step.drafted for step in request.steps)
        answer.accepted = sum(step.accepted for step in request.steps)
        self.counts.add(request)
        answer.put(None)

    def _drop(self, number: int, error: Exception) -> None:
        """End a request that failed, and drop its place, the state of which is unknown."""
        self._places.pop(number, None)
        if number in self._batch:
            self._batch.leave(number)
        if (going := self._going.pop(number, None)) is not None:
            going.answer.fail(error)

    def _end_all(self, error: Exception) -> None:
        for number in list(self._going):
            self._drop(number, error)


class _Here(Executor):
    """Runs at once what a `TextStream` would hand to another thread: a stop string is found before the next pass."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def _hand_on(answer: ServedRequest, text: str) -> None:
    if text:
        answer.put(text)
