"""Whose seconds a shared pass is, and what policies make of it."""

from random import Random

import pytest

from qspec.speculation.batch import PassShares
from qspec.speculation.length.cost_aware import CostAware


def test_drafts_are_charged_to_those_who_made_them() -> None:
    """Catches a draft that its neighbours pay for, and shares that do not add up to the pass."""
    shares = PassShares()
    assert shares.of(8.0, [1, 1, 1, 1]) == [2.0] * 4
    assert shares.of(14.0, [3, 1, 1, 2]) == [6.0, 2.0, 2.0, 4.0]
    for rows, seconds in (([1, 2], 8.0), ([4], 9.0), ([1], 3.0)):
        assert sum(shares.of(seconds, rows)) == pytest.approx(seconds)
    assert shares.of(10.0, [1, 3]) == pytest.approx([3.0, 7.0], abs=0.5)  # 2 s a row, in batches of any size


def test_noise_charges_nobody_less_than_nothing() -> None:
    """Catches a slope from passes that machines held up: a row that gives seconds back, or takes all of a pass."""
    shares = PassShares()
    shares.of(50.0, [1, 1])
    assert shares.of(4.0, [1, 3]) == [2.0, 2.0]
    shares.of(1000.0, [1, 5])
    assert shares.of(4.0, [1, 3]) == [1.0, 3.0]


@pytest.mark.parametrize(("fixed", "row"), [(9.0, 2.2), (20.0, 0.1)], ids=["rows cost", "rows are free"])
def test_a_batch_drafts_where_all_gain(fixed: float, row: float) -> None:
    """Catches requests that draft at the others' expense, and ones that leave free rows of a large model unused."""
    source, policies = Random(0), [CostAware(8) for _ in range(4)]
    early = speedup(policies, source, fixed, row, 4)
    late = speedup(policies, source, fixed, row, 8)
    if row > 1:  # a row is nearly worth what it takes: the rest are first looks, and costs that change as requests end
        assert min(early, late) > 0.9
    else:
        assert min(early, late) > 1.3


def speedup(policies: list[CostAware], source: Random, fixed: float, row: float, batches: int) -> float:
    """Of drafts that stand in half of all cases, beside plain decoding, over batches of answers of 64 tokens."""
    taken = 0.0
    for _ in range(batches):
        shares, left = PassShares(), dict.fromkeys(range(len(policies)), 63)
        for policy in policies:
            policy.reset("", 0, 64)
        while left:
            drafted = {i: draft(policies[i], source, most - 1) for i, most in left.items()}
            rows = [1 + len(stands) for stands in drafted.values()]
            seconds = fixed + row * sum(rows)
            taken += seconds
            for (i, stands), share in zip(drafted.items(), shares.of(seconds, rows), strict=True):
                accepted = ([*stands, False]).index(False)
                policies[i].update(len(stands), accepted, 0.01, share)
                left[i] -= accepted + 1
            left = {i: most for i, most in left.items() if most > 0}
    return batches * 63 * (fixed + row * len(policies)) / taken


def draft(policy: CostAware, source: Random, room: int) -> list[bool]:
    """Whether each token stands, of a drafter that says how often such tokens do."""
    k, stands = min(policy.next(), room), list[bool]()
    more = policy.judge()
    while len(stands) < k and more(confidence := source.choice([0.2, 0.4, 0.6, 0.8])):
        stands.append(source.random() < confidence)
    return stands
