"""Text of tokens as they come, made in another thread while the next pass runs."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into text, holding back characters whose bytes are not all there.

    decode: tokens to text; further tokens change at most an unfinished last character. worker: of one thread, so that
    pieces keep their order. on_text: told each new piece, from that thread; what it raises is raised by the next `add`,
    or by `finish`. Without it nothing is decoded before the end.

    Each piece is decoded behind the tokens of the piece before, and the text of those is cut off: a decoder may treat
    its first token differently (drop a space), and nothing older is decoded again.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], worker: Executor, on_text: Callable[[str], None] | None
    ) -> None:
        self._decode, self._worker, self._on_text = decode, worker, on_text
        self._tokens: list[int] = []
        self._last = (0, 0)  # where the tokens of the last piece begin and end
        self._shown = 0
        self._pending: deque[Future[None]] = deque()

    def add(self, tokens: list[int]) -> None:
        self._tokens += tokens
        if self._on_text is None:
            return
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        self._pending.append(self._worker.submit(self._show, len(self._tokens)))

    def finish(self) -> str:
        """The whole text, once `on_text` has its last piece."""
        while self._pending:
            self._pending.popleft().result()
        text = self._decode(self._tokens)
        self._tell(text[self._shown :])
        return text

    def _show(self, length: int) -> None:
        begin, end = self._last
        text = self._decode(self._tokens[begin:length])
        piece = text[len(self._decode(self._tokens[begin:end])) :]
        if piece and not piece.endswith(_UNFINISHED):
            self._tell(piece)
            self._last = end, length

    def _tell(self, piece: str) -> None:
        if self._on_text is not None and piece:
            self._on_text(piece)
            self._shown += len(piece)
