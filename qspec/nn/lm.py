"""The one interface between models and the speculative engine."""

from typing import Protocol

from torch import Tensor


class LM(Protocol):
    """A causal language model over one sequence, with its own KV cache.

    Shape letters: T tokens of this call, V vocabulary.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Positions that the cache can hold."""

    @property
    def length(self) -> int:
        """Positions in the cache."""

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        """Append `tokens_T` (int64) and return float32 logits of the last `last` of them (default: all) `[·, V]`."""

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on (roll-back of rejected drafts)."""
