"""Policies for how many tokens to draft next."""

from qspec.errors import RecipeError
from qspec.spec.types import DraftLength


class Fixed:
    """Always the same length."""

    def __init__(self, k: int) -> None:
        self._k = k

    def next(self) -> int:
        return self._k

    def update(self, drafted: int, accepted: int) -> None:
        """A fixed length learns nothing."""

    def reset(self) -> None:
        """A fixed length holds nothing."""


class Heuristic:
    """Two more after a draft that stood whole, one less after a rejection, within `[1, max_k]`."""

    def __init__(self, k: int = 5, max_k: int = 16) -> None:
        self._first, self._max, self._k = k, max_k, k

    def next(self) -> int:
        return self._k

    def update(self, drafted: int, accepted: int) -> None:
        """An empty draft teaches nothing."""
        if drafted:
            self._k = min(self._k + 2, self._max) if accepted == drafted else max(self._k - 1, 1)

    def reset(self) -> None:
        self._k = self._first


def build(policy: str, k: int, max_k: int) -> DraftLength:
    """The policy of that name; raises `RecipeError` for other names and for lengths that do not fit."""
    if k < 1:
        raise RecipeError(f"draft length k={k}", "a draft has at least 1 token", "set draft_length.k to 1 or more")
    if policy == "fixed":
        return Fixed(k)
    if policy != "heuristic":
        raise RecipeError(f"draft length policy {policy!r}", "not a policy", "use fixed or heuristic")
    if k > max_k:
        raise RecipeError(f"draft length k={k}", f"above max_k={max_k}", "lower draft_length.k or raise max_k")
    return Heuristic(k, max_k)
