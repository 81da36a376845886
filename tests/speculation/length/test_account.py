"""The account that drafting is held to."""

from qspec.speculation.length.cost_aware import ALLOWANCE, Account


def book(account: Account, gain: float, invested: float = 0.0, drafted: bool = True) -> None:
    account.book(gain, invested, 1, drafted)


def test_a_loss_ends_drafts_whatever_the_counts_say() -> None:
    """Catches drafts that go on at a loss because the estimates say otherwise."""
    account = Account()
    book(account, -0.9 * ALLOWANCE / 2)
    assert account.left > 0
    book(account, -0.2 * ALLOWANCE / 2)
    assert account.left <= 0


def test_gains_count_only_so_far() -> None:
    """Catches a good past that pays for an endless bad present."""
    account = Account()
    for _ in range(100):
        book(account, 3.0)
    book(account, -ALLOWANCE)
    assert account.left <= 0


def test_what_a_request_invests_may_be_lost_until_it_ends() -> None:
    """Catches the prefill of a draft taken for a bad step, and one that is never claimed back."""
    account = Account()
    book(account, -20.0, invested=20.0)
    assert account.left > 0
    for _ in range(5):
        book(account, 1.0)
    assert account.gain.value > 0
    account.invested = 0.0  # the request ends
    assert account.left <= 0


def test_a_look_waits_until_its_cost_is_earned() -> None:
    """Catches looks that cost more than the share that they are allowed, and rounding that makes two steps of one."""
    account = Account()
    book(account, -ALLOWANCE)
    account.rest = 0.3
    assert not account.look(0.0, 0.32)
    account.rest = 0.4
    assert account.look(0.0, 0.32)
    assert account.left > 0
    book(account, -0.32)
    assert account.left <= 0
    assert not account.look(0.0, 0.32)


def test_a_look_lasts_until_a_token_is_tested_or_its_cost_is_lost() -> None:
    """Catches a lookup's silence taken for a failed look, and silence that costs and never ends one."""
    account = Account()
    book(account, -ALLOWANCE)
    account.rest = 0.5
    assert account.look(0.0, 0.32)
    book(account, -0.01, drafted=False)
    assert account.looks
    for _ in range(32):
        book(account, -0.01, drafted=False)
    assert not account.looks
    assert account.left <= 0
