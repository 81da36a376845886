"""The account that drafting is held to."""

from qspec.speculation.length.source import FIRST_WAIT, LONGEST_WAIT, MOST_LOST, MOST_SAVED, Account


def book(account: Account, gain: float, pays: bool = True, invested: float = 0.0, silent: bool = False) -> None:
    account.book(gain, invested, pays, silent)


def test_a_loss_ends_drafts_whatever_is_expected() -> None:
    """Catches drafts that go on at a loss because the estimates say otherwise."""
    account = Account()
    book(account, -MOST_LOST)
    assert account.on
    book(account, -0.1)
    assert not account.on
    assert account.left == FIRST_WAIT


def test_gains_count_only_so_far() -> None:
    """Catches a good past that pays for an endless bad present."""
    account = Account()
    for _ in range(100):
        book(account, 3.0)
    book(account, -(MOST_SAVED + MOST_LOST) - 0.1)
    assert not account.on


def test_what_a_request_invests_may_be_lost_until_it_ends() -> None:
    """Catches the prefill of a draft taken for a bad step, and one that is never asked back."""
    account = Account()
    book(account, -20.0, invested=20.0)
    assert account.on
    for _ in range(5):
        book(account, 1.0)
    account.end_request(pays=True)
    assert not account.on


def test_waits_double_until_a_look_gains() -> None:
    """Catches looks as frequent as ever at a draft that never pays, and waits that a gain does not end."""
    account, waits = Account(), []
    book(account, -3.0)
    for _ in range(10):
        waits.append(account.left)
        account.start_look(0.8)
        book(account, -0.5)
        book(account, -0.5)
        assert not account.on
    assert waits[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert waits[-1] == LONGEST_WAIT
    account.start_look(0.8)
    book(account, 0.5)
    assert account.on
    assert account.wait == FIRST_WAIT


def test_silence_decides_nothing() -> None:
    """Catches a lookup that finds nothing taken for one that fails, and silence that costs and never ends a look."""
    account = Account()
    book(account, -3.0)
    account.start_look(0.8)
    for pays in (True, False) * 15:
        book(account, -1e-4, pays, silent=True)
    assert account.look
    assert account.spoken < 0.5
    book(account, 1.0)
    assert account.on
    for _ in range(61):
        book(account, -0.05, silent=True)
    assert not account.on
