"""Memory of policies, by kind of request."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class History(Generic[T]):
    """One memory per domain, made when it is first asked for; the `most` recently used ones are kept."""

    def __init__(self, make: Callable[[], T], most: int = 64) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[str, T] = OrderedDict()

    def of(self, domain: str) -> T:
        if domain not in self._kept:
            self._kept[domain] = self._make()
        self._kept.move_to_end(domain)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return self._kept[domain]

    def __len__(self) -> int:
        return len(self._kept)
