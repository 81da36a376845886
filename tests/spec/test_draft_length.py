"""Draft-length policies."""

import pytest

from qspec.errors import RecipeError
from qspec.spec.draft_length import Heuristic, build


def test_heuristic_grows_by_two_and_shrinks_by_one() -> None:
    """Catches a window that moves the wrong way, or learns from a step without drafts."""
    policy = Heuristic(5, 16)
    lengths = []
    for drafted, accepted in [(5, 5), (7, 6), (6, 0), (0, 0), (2, 2)]:
        policy.update(drafted, accepted)
        lengths.append(policy.next())
    assert lengths == [7, 6, 5, 5, 7]


def test_heuristic_stays_within_its_bounds() -> None:
    """Catches a window that falls to 0 (speculation would never come back) or passes its maximum."""
    policy = Heuristic(2, 3)
    policy.update(2, 2)
    assert policy.next() == 3
    for _ in range(5):
        policy.update(3, 0)
    assert policy.next() == 1


def test_reset_forgets_the_request() -> None:
    """Catches a window that one request leaves to the next, which would make results depend on order."""
    policy = Heuristic(5, 16)
    policy.update(5, 0)
    policy.reset()
    assert policy.next() == 5


def test_fixed_never_moves() -> None:
    """Catches `build` returning the heuristic for `fixed`."""
    policy = build("fixed", 4, 16)
    policy.update(4, 4)
    policy.update(4, 0)
    policy.reset()
    assert policy.next() == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [(("adaptive", 5, 16), "'adaptive'"), (("heuristic", 9, 8), "k=9"), (("fixed", 0, 8), "k=0")],
)
def test_impossible_policies_are_refused(args: tuple[str, int, int], message: str) -> None:
    """Catches a misspelt policy that silently becomes another one, and lengths clipped in silence."""
    with pytest.raises(RecipeError, match=message):
        build(*args)
