"""Text of tokens as they come, made in another thread while the next pass runs."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into text, holding back characters whose bytes are not all there.

    decode: all tokens so far to text. worker: of one thread, so that pieces keep their order. on_text: told each new
    piece, from that thread; what it raises is raised by the next `add`, or by `finish`. Without it nothing is decoded
    before the end.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], worker: Executor, on_text: Callable[[str], None] | None
    ) -> None:
        self._decode, self._worker, self._on_text = decode, worker, on_text
        self._tokens: list[int] = []
        self._shown = 0
        self._told: deque[Future[None]] = deque()

    def add(self, tokens: list[int]) -> None:
        self._tokens += tokens
        if self._on_text is None:
            return
        while self._told and self._told[0].done():
            self._told.popleft().result()
        self._told.append(self._worker.submit(self._show, len(self._tokens)))

    def finish(self) -> str:
        """All of the text, after its last piece was told."""
        while self._told:
            self._told.popleft().result()
        text = self._decode(self._tokens)
        self._emit(text)
        return text

    def _show(self, length: int) -> None:
        if not (text := self._decode(self._tokens[:length])).endswith(_UNFINISHED):
            self._emit(text)

    def _emit(self, text: str) -> None:
        if self._on_text is not None and len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
