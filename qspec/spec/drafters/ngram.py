"""Prompt lookup: the running text predicts itself."""

from itertools import cycle, islice
from time import perf_counter

import torch

from qspec.spec.types import More, Proposal, Sampling


class NgramDrafter:
    """Continues as the text went on after the most recent occurrence of its last tokens; the longest match wins.

    Between two `reset`s the context only grows, so its n-grams are indexed once. A continuation that reaches the end of
    the text repeats itself: text of period p is drafted beyond p tokens.
    """

    def __init__(self, min_ngram: int = 1, max_ngram: int = 3) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self.reset()

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens, certain (one-hot), of unknown probability; none without a match."""
        start = perf_counter()
        self._index(context)
        at = self._match(context)
        tokens = [] if at is None else list(islice(cycle(context[at : at + k]), k))
        return Proposal(torch.tensor(tokens, dtype=torch.long), None, perf_counter() - start)

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def _index(self, context: list[int]) -> None:
        """Note for every n-gram that has a continuation where its last one starts."""
        for at in range(self._indexed, len(context)):
            for size in self._sizes:
                if size <= at:
                    self._follows[tuple(context[at - size : at])] = at
        self._indexed = max(self._indexed, len(context))

    def _match(self, context: list[int]) -> int | None:
        """Position behind the last earlier occurrence of the longest known suffix."""
        for size in self._sizes:
            at = self._follows.get(tuple(context[-size:]))
            if at is not None:
                return at
        return None
