"""Suffix lookup: the running text and earlier requests predict what comes next, by the longest match and by votes."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from time import perf_counter

import torch

from qspec.numerics.speculation.trees import merged_chains
from qspec.speculation.types import More, Proposal, Randomness, Sampling

BYTES_PER_TOKEN = 640
"""Memory of one token at most: an entry of the index for each match size, and the token itself."""
OCCURRENCES = 32
"""Places that are kept of any one match; the newest."""
LONG_MATCH = 8
"""Second size that texts are indexed by, so that a long match is found behind many newer short ones."""
_SHIFT = 32


class SuffixDrafter:
    """Continues as texts went on behind the longest occurrence of the last tokens; the most frequent continuation wins.

    A bounded equivalent of a suffix trie with counts: places are indexed by matches of two sizes, extended backwards to
    their full length (at most `max_match`), and vote token by token; of equal votes the newest wins. A token's
    confidence is its share of the votes, one vote being kept for what was never seen. Votes that run off the end of the
    running text go on in the draft, so text of period p is drafted beyond p tokens.

    across_requests: finished requests are remembered too, at most `memory_mb` (10^6 bytes) with the running one; those
    that have not voted for longest are forgotten first. A request is remembered up to the last context that a draft was
    asked for. branches: continuations that are drafted at once, each with another first token, those of most votes;
    `more` is asked about a single one only.
    """

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 32,
        memory_mb: float = 64,
        across_requests: bool = True,
        branches: int = 1,
    ) -> None:
        self._sizes = sorted({min_match, max(min_match, LONG_MATCH)}, reverse=True)
        self._min, self._max, self._across, self._branches = min_match, max_match, across_requests, branches
        self._most = int(memory_mb * 1e6 / BYTES_PER_TOKEN)
        self.forget()

    @property
    def remembered(self) -> int:
        """Tokens of earlier requests and of the running one that can be matched."""
        return self._held

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens, certain (one-hot), with a confidence each for `more`; none without a match."""
        start = perf_counter()
        self._follow(context)
        places = self._places()
        if self._branches == 1:
            tokens = self._walk(places, k, [], more)
            return Proposal(torch.tensor(tokens, dtype=torch.long), None, perf_counter() - start)
        ranked = self._ranked(self._votes(places, []))[: self._branches]
        tree = merged_chains(self._walk(places, k, [token]) for token, _ in ranked)
        return Proposal.certain(tree, perf_counter() - start)

    def reset(self) -> None:
        """A new request starts: the last one joins the memory, or everything is forgotten."""
        if not self._across:
            self.forget()
        elif self._known:
            self._earlier[self._now] = self._text[: self._known]
            self._now += 1
            self._begin()

    def forget(self) -> None:
        """Forget this request and all earlier ones."""
        self._index: dict[int, list[int]] = {}
        self._earlier: OrderedDict[int, list[int]] = OrderedDict()
        self._now, self._held = 0, 0
        self._begin()

    def _begin(self) -> None:
        self._text: list[int] = []
        self._known = 0

    def _follow(self, context: list[int]) -> None:
        """Index the part of the running text that is new, as far as memory goes."""
        self._text += context[len(self._text) :]
        while self._known < len(self._text):
            while self._held >= self._most and self._earlier:
                self._forget(*self._earlier.popitem(last=False))
            if self._held >= self._most:
                return
            for key in self._keys(self._text, self._known):
                places = self._index.setdefault(key, [])
                places.append(self._now << _SHIFT | self._known)
                del places[:-OCCURRENCES]
            self._known += 1
            self._held += 1

    def _forget(self, request: int, text: list[int]) -> None:
        for at in range(len(text)):
            for key in self._keys(text, at):
                kept = [place for place in self._index.get(key, ()) if place >> _SHIFT != request]
                if kept:
                    self._index[key] = kept
                else:
                    self._index.pop(key, None)
        self._held -= len(text)

    def _keys(self, text: list[int], at: int) -> Iterator[int]:
        """Index keys of the matches that end in front of position `at`; different matches may share one."""
        return (hash(tuple(text[at - size : at])) for size in self._sizes if size <= at)

    def _places(self) -> list[int]:
        """Where the longest match of the text's end was continued, oldest first."""
        for key in self._keys(self._text, len(self._text)):
            matched = {place: self._match(place) for place in self._index.get(key, ())}
            longest = max(matched.values(), default=0)
            if longest >= self._min:
                return [place for place, length in matched.items() if length == longest]
        return []

    def _match(self, place: int) -> int:
        """Tokens in front of a place that equal the end of the text, at most `max_match`."""
        text, at = self._text_of(place), place & (1 << _SHIFT) - 1
        most, n = min(at, len(self._text), self._max), 0
        while n < most and text[at - 1 - n] == self._text[-1 - n]:
            n += 1
        return n

    def _walk(self, places: list[int], k: int, drafted: list[int], more: More | None = None) -> list[int]:
        """`drafted`, continued to at most `k` tokens."""
        for n, token in enumerate(drafted):
            places = [place for place, voted in self._votes(places, drafted[:n]) if voted == token]
        while len(drafted) < k:
            votes = self._votes(places, drafted)
            if not votes:
                break
            token, count = self._ranked(votes)[0]
            if more is not None and not more(count / (len(votes) + 1)):
                break
            drafted.append(token)
            places = [place for place, voted in votes if voted == token]
        for place in places if drafted else ():
            if place >> _SHIFT in self._earlier:
                self._earlier.move_to_end(place >> _SHIFT)
        return drafted

    def _votes(self, places: list[int], drafted: list[int]) -> list[tuple[int, int]]:
        """Places and their tokens behind what is drafted, of those that have one."""
        return [(place, token) for place in places if (token := self._vote(place, drafted)) is not None]

    def _ranked(self, votes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Tokens and their counts, most votes first, then the newest."""
        return Counter(token for _, token in reversed(votes)).most_common()

    def _vote(self, place: int, drafted: list[int]) -> int | None:
        """The token behind `place` and as many more as are drafted; None where an earlier request ends."""
        text, at = self._text_of(place), (place & (1 << _SHIFT) - 1) + len(drafted)
        if at < len(text):
            return text[at]
        return drafted[at - len(text)] if text is self._text else None

    def _text_of(self, place: int) -> list[int]:
        request = place >> _SHIFT
        return self._text if request == self._now else self._earlier[request]
