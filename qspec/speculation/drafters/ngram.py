"""Prompt lookup: the running text predicts itself."""

from itertools import cycle, islice
from time import perf_counter

from qspec.numerics.speculation.trees import merged_chains
from qspec.speculation.types import More, Proposal, Randomness, Sampling


class NgramDrafter:
    """Continues as the text went on after the most recent occurrence of its last tokens; the longest match wins.

    Between two `reset`s the context only grows, so its n-grams are indexed once. A continuation that reaches the end of
    the text repeats itself: text of period p is drafted beyond p tokens. branches: as many continuations of the longest
    match at once, the most recent ones, as a tree.
    """

    def __init__(self, min_ngram: int = 1, max_ngram: int = 3, branches: int = 1) -> None:
        self._sizes, self._branches = range(max_ngram, min_ngram - 1, -1), branches
        self.reset()

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens, certain (one-hot), of unknown probability; none without a match."""
        start = perf_counter()
        self._index(context)
        tree = merged_chains(islice(cycle(context[at : at + k]), k) for at in reversed(self._matches(context)))
        return Proposal.certain(tree, perf_counter() - start)

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""
        self._follows: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 1

    def _index(self, context: list[int]) -> None:
        """Note for every n-gram that has a continuation where its last ones start."""
        for at in range(self._indexed, len(context)):
            for size in self._sizes:
                if size <= at:
                    places = self._follows.setdefault(tuple(context[at - size : at]), [])
                    places.append(at)
                    del places[: -self._branches]
        self._indexed = max(self._indexed, len(context))

    def _matches(self, context: list[int]) -> list[int]:
        """Positions behind the last earlier occurrences of the longest known suffix, oldest first."""
        for size in self._sizes:
            if (places := self._follows.get(tuple(context[-size:]))) is not None:
                return places
        return []
