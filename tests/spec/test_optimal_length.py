"""The cost-optimal draft length in a world whose acceptance and costs are known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
import sys

import pytest

from qspec.numerics.speedup import optimal_gamma
from qspec.spec.optimal_length import SHARE, Optimal


@dataclass
class World:
    """Steps on a made-up clock: plain passes take 1 s, draft tokens `c`, verification `1 + slope` per further row."""

    c: float
    slope: float
    alpha: float
    states: bool = False
    """Whether the drafter states its confidence: .95 where a token will stand, .05 where it will not."""
    catch_up: float = 0.0
    """Seconds that a draft takes longer behind a plain step."""
    source: Random = field(default_factory=lambda: Random(0))
    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    cold: bool = True

    def step(self, policy: Optimal) -> None:
        k = policy.next()
        more = policy.judge() if k else None
        stands: list[bool] = []
        while len(stands) < k:
            stands.append(self.source.random() < self.alpha)
            if self.states and more is not None and not more(0.95 if stands[-1] else 0.05):
                break
        accepted = ([*stands, False]).index(False)
        t_draft = len(stands) * self.c + (self.catch_up if k and self.cold else 0.0)
        t_verify = 1 + self.slope * len(stands)
        self.cold = not k
        self.seconds += t_draft + t_verify
        self.tokens += accepted + 1
        self.lengths.append(len(stands))
        policy.update(len(stands), accepted, t_draft, t_verify)

    def run(self, policy: Optimal, steps: int) -> "World":
        for _ in range(steps):
            self.step(policy)
        return self


@pytest.mark.parametrize(("c", "slope", "alpha"), [(0.1, 0.02, 0.8), (0.02, 0.0, 0.9), (0.3, 0.1, 0.8)])
def test_length_goes_to_the_optimum(c: float, slope: float, alpha: float) -> None:
    """Catches costs or acceptance estimated with a bias: the chosen length would settle elsewhere."""
    world = World(c, slope, alpha).run(Optimal(5, 16), 400)
    best = optimal_gamma(alpha, c, 16, lambda rows: 1 + slope * (rows - 1))
    late = [n for n in world.lengths[200:] if n]
    # Acceptance is known from about 33 steps, so the length wanders about the flat top of the curve.
    assert abs(sum(late) / len(late) - best) < 0.35 * best + 1
    plain = world.lengths[20:].count(0)
    assert plain <= 4  # a plain pass is timed again now and then


@pytest.mark.parametrize(
    ("c", "alpha", "catch_up"), [(0.5, 0.4, 0.0), (0.9, 0.8, 0.0), (0.3, 0.0, 0.0), (0.5, 0.3, 20.0)]
)
def test_where_nothing_pays_little_is_lost(c: float, alpha: float, catch_up: float) -> None:
    """Catches a policy that keeps drafting at a loss, or probes on a schedule that costs more than it says."""
    world = World(c, 0.2, alpha, catch_up=catch_up)
    policy = Optimal(5, 16)
    world.run(policy, 20)
    seconds, tokens = world.seconds, world.tokens
    world.run(policy, 3000)
    plain = float(world.tokens - tokens)
    # One look of two steps at the longest length is what may be overdrawn before it is known to lose.
    assert world.seconds - seconds <= plain * (1 + SHARE) + 2 * (1 + 0.2 * 5 + 5 * c) + catch_up
    assert world.lengths[20:].count(0) > 2700
    assert any(world.lengths[500:]), "it never looks again"


def test_speculation_comes_back_when_it_pays_again() -> None:
    """Catches a policy that stays at 0 for good: a look that gains must go on."""
    world, policy = World(0.1, 0.02, 0.0), Optimal(5, 16)
    world.run(policy, 300)
    assert world.lengths[-50:].count(0) >= 45
    world.alpha, seconds, tokens = 0.9, world.seconds, world.tokens
    world.run(policy, 400)
    assert (world.tokens - tokens) / (world.seconds - seconds) > 2
    assert world.lengths[-50:].count(0) <= 1


def test_drafts_stop_where_the_next_token_is_a_loss() -> None:
    """Catches confidences that are ignored, or drafts that a doubtful token does not end."""
    sure = World(0.2, 0.05, 0.7, states=True).run(Optimal(5, 16), 400)
    blind = World(0.2, 0.05, 0.7).run(Optimal(5, 16), 400)
    assert sure.tokens / sure.seconds > 1.15 * blind.tokens / blind.seconds
    assert max(sure.lengths[50:]) > 6  # and go on where every token is sure


def test_kinds_of_request_are_remembered_apart() -> None:
    """Catches one acceptance for all: a domain that pays would be given up for one that does not."""
    policy, good, bad = Optimal(5, 16), World(0.3, 0.05, 0.95), World(0.3, 0.05, 0.1)
    for _ in range(6):
        for name, world in (("copy", good), ("chat", bad)):
            policy.reset(name)
            world.cold = True
            world.run(policy, 40)
    assert good.lengths[-40:].count(0) <= 2
    assert bad.lengths[-40:].count(0) >= 30


def test_plain_decoding_costs_almost_nothing() -> None:
    """Catches a policy that plans, takes medians or walks its history though it drafts nothing."""
    world, policy, calls = World(0.9, 0.2, 0.1), Optimal(5, 16), 0
    world.run(policy, 200)

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    steps, before = 0, sys.getprofile()
    for _ in range(300):
        if policy.next():  # a look
            policy.update(1, 0, 0.9, 1.2)
            continue
        steps += 1
        sys.setprofile(count)
        policy.next()
        policy.update(0, 0, 0.0, 1.0)
        sys.setprofile(before)
    assert steps > 250
    assert calls / steps <= 10  # next, update, one timing: no loop, no sort (and the call that stops counting)


def test_a_drafter_that_finds_nothing_is_no_rejection() -> None:
    """Catches silence of a lookup counted as failure: it would be switched off though it costs nothing."""
    policy = Optimal(5, 16)
    for _ in range(100):
        policy.update(0, 0, 1e-6, 1.0)
    assert policy.next() == 5


def test_seconds_decide_and_not_the_number_of_steps() -> None:
    """Catches a choice that does not see the machine: the same acceptance pays on one and not on the other."""

    def longest(world: World) -> int:
        return max(world.run(Optimal(5, 16), 300).lengths[100:])

    cheap: Callable[[], World] = lambda: World(0.02, 0.0, 0.6)  # noqa: E731
    assert longest(cheap()) > 3
    assert longest(World(0.02, 1.0, 0.6)) <= 1  # each further row costs a whole pass: only looks are left
