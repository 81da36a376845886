"""A pair that answers whoever asks: requests join the running batch between steps and leave it when they are done.

One thread runs the engine. Each place in the batch has a sequence of the target, a drafter and a policy, which go on to
the next request: what a suffix memory holds and a policy has learned stays there.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Lock, Thread
import traceback
from typing import Any, Literal, Self, cast

import torch

from qspec.nn.lm import BatchLM, torch_beside
from qspec.pair.drafters.registry import request_policy
from qspec.pair.open import LoadedPair
from qspec.pair.text_stream import TextStream
from qspec.speculation.batch import Batch, Prompt
from qspec.speculation.request import Request, check_prompt
from qspec.speculation.types import Drafter, DraftLength, Sampling

Reason = Literal["stop", "length"]
STOPPED = "the server was stopped"


class Until:
    """Text up to the first of some strings; what may yet become one of them is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.reached = stops, "", False

    def add(self, piece: str) -> str:
        """What is certain of the text with `piece` behind it."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.reached = bool(found)
        sure = min(found) if found else len(text) - self._open(text)
        self._held = "" if found else text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """What was held back and became nothing."""
        rest, self._held = self._held, ""
        return rest

    def _open(self, text: str) -> int:
        """Characters at the end of `text` that one of the strings begins with."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(most, len(text)), 0, -1)
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


@dataclass
class Answer:
    """A request and what became of it: iterate over its text as it comes; then `reason` and `count` are known.

    seed: of its random numbers. ends: token ids that end it. gone: whether whoever asked has hung up. count: of its
    tokens, none behind a stop string; drafted, accepted: of its drafts.
    """

    prompt: list[int]
    most: int
    sampling: Sampling
    seed: int
    ends: frozenset[int]
    stops: tuple[str, ...] = ()
    gone: Callable[[], bool] = bool
    count: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: Reason = "length"
    unwanted: bool = False
    pieces: Queue[str | BaseException | None] = field(default_factory=Queue)

    def __iter__(self) -> Iterator[str]:
        while (piece := self.pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    @property
    def wanted(self) -> bool:
        return not (self.unwanted or self.gone())


@dataclass(frozen=True)
class _Place:
    """What a place in the batch keeps from request to request."""

    target: BatchLM
    drafter: Drafter | None
    policy: DraftLength


@dataclass
class _Going:
    """A request that goes on."""

    answer: Answer
    until: Until
    stream: TextStream


@dataclass
class Counts:
    """Totals since the start. drafts: steps that drafted; accepted_at[i]: those whose draft token i stood."""

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


class Answers:
    """Runs a pair for at most `at_once` requests together; others wait. A context manager: it answers within."""

    def __init__(self, pair: LoadedPair, at_once: int = 8, speculative: bool = True) -> None:
        self.pair, self.at_once, self._speculative = pair, at_once, speculative
        self.counts, self.tokenizing = Counts(), Lock()  # fast tokenizers refuse to be used by two threads
        self.waiting: Queue[Answer | None] = Queue()
        self._batch = Batch(pair.recipe.speculation.draft_length.by_batch)
        self._going: dict[int, _Going] = {}
        self._places: list[_Place] = []
        self._closed = False
        self._thread = Thread(target=self._run, name="qspec-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Requests that go on are ended."""
        self._closed = True
        self.waiting.put(None)
        self._thread.join()

    @property
    def running(self) -> int:
        return len(self._going)

    def ask(self, answer: Answer) -> Answer:
        """Queue a request. Raises `RecipeError` for a prompt that cannot be continued."""
        check_prompt(answer.prompt, self.pair.target.max_length, self.pair.target.vocab_size)
        if self._closed:
            raise RuntimeError(STOPPED)
        self.waiting.put(answer)
        return answer

    def _run(self) -> None:
        with torch_beside(self.pair.target), ThreadPoolExecutor(1, "qspec-text") as worker:
            while self._admit(worker):
                try:
                    self._batch.step(self._told)
                    self._settle()
                except Exception as error:  # noqa: BLE001 (whoever waits is told, and the next are answered)
                    traceback.print_exc()
                    self._end_all(error)
        self._end_all(RuntimeError(STOPPED))
        while not self.waiting.empty():
            if (answer := self.waiting.get()) is not None:
                answer.pieces.put(RuntimeError(STOPPED))

    def _admit(self, worker: Executor) -> bool:
        """Let requests in while there is room; waits while nothing goes on. False: it is over."""
        while not self._closed and len(self._going) < self.at_once:
            try:
                answer = self.waiting.get(block=not self._going)
            except Empty:
                break
            if answer is None:  # only there to wake this thread
                return False
            if not answer.wanted:
                answer.pieces.put(None)
                continue
            try:
                self._begin(answer, worker)
                self._settle()
            except Exception as error:  # noqa: BLE001 (only whoever asked it is told)
                traceback.print_exc()
                self._drop(answer, error)
        return not self._closed

    def _begin(self, answer: Answer, worker: Executor) -> None:
        number = next(i for i in range(self.at_once) if i not in self._going)
        if number == len(self._places):
            self._places.append(self._place(number))
        place, until = self._places[number], Until(answer.stops)
        told = _Here() if answer.stops else worker
        stream = TextStream(self.pair.model.tokenizer.decode, told, lambda piece: _hand_on(answer, until.add(piece)))
        generator = torch.Generator().manual_seed(answer.seed)
        prompt = Prompt(answer.prompt, answer.most, generator, place.drafter, place.policy)
        self._batch.join(number, place.target, prompt, answer.sampling, answer.ends)
        self._going[number] = _Going(answer, until, stream)
        self._told(number, self._batch.read(number))

    def _place(self, number: int) -> _Place:
        pair = self.pair
        drafter = None
        if self._speculative:
            drafter = pair.drafter if number == 0 else pair.new_drafter()
        policy = request_policy(pair.recipe.speculation.draft_length)
        target = pair.target if number == 0 else pair.target.fork()
        return _Place(cast("BatchLM", target), drafter, policy)

    def _told(self, number: int, tokens: list[int]) -> None:
        going = self._going[number]
        for run in [[token] for token in tokens] if going.answer.stops else [tokens]:
            if not going.until.reached:
                going.answer.count += len(run)
                going.stream.add(run)

    def _settle(self) -> None:
        """Let go of requests that are finished, that have reached a stop string, or that nobody waits for any more."""
        finished = set(self._batch.finished())
        for number, going in list(self._going.items()):
            if number in finished or going.until.reached or not going.answer.wanted:
                del self._going[number]
                try:
                    self._finish(going, self._batch.leave(number))
                except Exception as error:  # noqa: BLE001 (only whoever asked it is told)
                    traceback.print_exc()
                    going.answer.pieces.put(error)

    def _finish(self, going: _Going, request: Request) -> None:
        answer = going.answer
        going.stream.finish()
        _hand_on(answer, going.until.rest())
        answer.reason = "stop" if going.until.reached or request.stopped() == "eos" else "length"
        answer.drafted = sum(step.drafted for step in request.steps)
        answer.accepted = sum(step.accepted for step in request.steps)
        self.counts.add(request)
        answer.pieces.put(None)

    def _drop(self, answer: Answer, error: BaseException) -> None:
        for number in [number for number, going in self._going.items() if going.answer is answer]:
            del self._going[number]
            self._batch.leave(number)
        answer.pieces.put(error)

    def _end_all(self, error: BaseException) -> None:
        for going in list(self._going.values()):
            self._drop(going.answer, error)


class _Here(Executor):
    """Runs at once what a `TextStream` would hand to another thread: a stop string is found before the next pass."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def _hand_on(answer: Answer, text: str) -> None:
    if text:
        answer.pieces.put(text)
