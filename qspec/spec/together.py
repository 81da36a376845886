"""Drafts of several requests: drafters that are alike share the passes of their model."""

from collections.abc import Hashable, Sequence
from typing import cast

from qspec.spec.types import Ask, BatchDrafter, Drafter, Proposal


def propose_together(asked: Sequence[tuple[Drafter, Ask]]) -> list[Proposal]:
    """What each drafter proposes when it is asked so, as it would alone."""
    groups: dict[Hashable, list[int]] = {}
    for i, (drafter, _) in enumerate(asked):
        key = (type(drafter), drafter.group()) if isinstance(drafter, BatchDrafter) else i
        groups.setdefault(key, []).append(i)
    found: dict[int, Proposal] = {}
    for members in groups.values():
        found |= zip(members, _of_group([asked[i] for i in members]), strict=True)
    return [found[i] for i in range(len(asked))]


def _of_group(asked: Sequence[tuple[Drafter, Ask]]) -> list[Proposal]:
    first, ask = asked[0]
    if not isinstance(first, BatchDrafter):
        return [first.propose(*ask)]
    drafters = cast("list[BatchDrafter]", [drafter for drafter, _ in asked])
    return first.propose_many(drafters, [ask for _, ask in asked])
