"""Draft-length policies."""

import pytest

from qspec.errors import RecipeError
from qspec.speculation.length.policies import POLICIES, BatchLimited, Confidence, Fixed, Heuristic, build, limit_at


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
    [
        (("adaptive", 5, 16), "'adaptive'"),
        (("heuristic", 9, 8), "k=9"),
        (("optimal", 9, 8), "k=9"),
        (("fixed", 0, 8), "k=0"),
    ],
)
def test_impossible_policies_are_refused(args: tuple[str, int, int], message: str) -> None:
    """Catches a misspelt policy that silently becomes another one, and lengths clipped in silence."""
    with pytest.raises(RecipeError, match=message):
        build(*args)


def draft(policy: Confidence, confidences: list[float], accepted: int) -> int:
    """One step of a drafter with these confidences; how many tokens it drafted."""
    k, more, drafted = policy.next(), policy.judge(), 0
    for confidence in confidences[:k]:
        if not more(confidence):
            break
        drafted += 1
    policy.update(drafted, min(accepted, drafted))
    return drafted


def test_drafting_stops_behind_an_unsure_token() -> None:
    """Catches a threshold that is turned round, and a token dropped for its confidence (a biased distribution)."""
    policy = Confidence(3, 8, threshold=0.5)
    assert draft(policy, [0.9, 0.8, 0.7, 0.6], 3) == 3  # k, until a drafter is known to state confidences
    assert draft(policy, [0.9, 0.6, 0.4, 0.9], 3) == 3
    assert draft(policy, [0.9] * 12, 8) == 8


def test_threshold_moves_to_where_acceptance_ends() -> None:
    """Catches a threshold that never adapts, or that learns from tokens that nobody tested."""
    policy = Confidence(4, 8, threshold=0.4)
    for _ in range(20):
        draft(policy, [0.9, 0.8, 0.7, 0.99], 2)  # .7 falls, .99 is not tested
    assert policy.threshold == 0.8
    for _ in range(60):
        draft(policy, [0.3, 0.2, 0.1, 0.99], 2 if policy.threshold <= 0.3 else 1)
    assert 0.1 < policy.threshold <= 0.3


def test_of_several_drafters_each_has_a_length_of_its_own() -> None:
    """Catches a lookup that drafts the longest length because the model behind it states its confidence."""
    policy = Confidence(3, 8)
    for _ in range(2):
        more = policy.judge()
        assert more.begins("lookup") == 3
        most = more.begins("model")
        more(0.9)
        policy.update(1, 1)
    assert most == 8


def test_thresholds_are_kept_by_domain() -> None:
    """Catches one kind of request that sets the threshold of another, or a threshold lost between requests."""
    policy = Confidence(4, 8, threshold=0.4)
    policy.reset("code")
    draft(policy, [0.9, 0.8], 1)
    policy.reset("chat")
    assert policy.threshold == 0.4
    policy.reset("code")
    assert policy.threshold == 0.9


def test_batch_size_caps_the_length() -> None:
    """Catches ranges read as half open, a gap without a limit, and a 0 that still drafts."""
    schedule = ((1, 4, 5), (5, 8, 2), (16, 32, 0))
    assert [limit_at(schedule, n) for n in (1, 4, 5, 8, 12, 16, 99)] == [5, 5, 2, 2, 2, 0, 0]
    batch = 3
    policy = BatchLimited(Fixed(4), schedule, lambda: batch)
    assert policy.next() == 4
    batch = 6
    assert policy.next() == 2
    batch = 20
    assert policy.next() == 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_limited(name: str) -> None:
    """Catches a policy that `build` does not know, and a schedule that it forgets."""
    policy = build(name, 5, 16, by_batch=((1, 8, 1),))
    policy.reset("chat")
    for _ in range(3):  # `optimal` times plain steps first
        policy.update(0, 0, 0.0, 1.0)
    assert policy.next() == 1
