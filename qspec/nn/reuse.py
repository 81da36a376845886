"""A cache that survives between requests: prompts that begin alike are computed once."""

from torch import Tensor

from qspec.nn.lm import LM, ThreadedLM


class PrefixReuse:
    """An `LM` around another one that keeps what `truncate` forgets until a different token takes its place.

    Tokens fed again where they already stand are skipped, except those whose logits are asked for. Worth it where many
    requests share their beginning (few-shot examples). Rows may then be computed in other groups than without it, so
    logits can differ in their last bits.
    """

    def __init__(self, lm: LM) -> None:
        self._lm, self._held, self._length = lm, list[int](), 0
        if isinstance(lm, ThreadedLM):
            self.threads = lm.threads
        lm.truncate(0)

    @property
    def vocab_size(self) -> int:
        return self._lm.vocab_size

    @property
    def max_length(self) -> int:
        return self._lm.max_length

    @property
    def length(self) -> int:
        return self._length

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        tokens = tokens_T.tolist()
        skipped = self._already_held(tokens[: len(tokens) - (len(tokens) if last is None else last)])
        kept = self._length + skipped
        self._lm.truncate(kept)
        self._held[kept:] = tokens[skipped:]
        self._length += len(tokens)
        return self._lm.forward(tokens_T[skipped:], last=last)

    def _already_held(self, tokens: list[int]) -> int:
        """How many leading `tokens` the cache holds at the current position."""
        held = self._held[self._length : self._length + len(tokens)]
        return next((i for i, (a, b) in enumerate(zip(tokens, held, strict=False)) if a != b), len(held))
