"""Text comes in order, whole, from another thread, and a listener that fails stops the answer."""

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, current_thread, main_thread

import pytest

from qspec.stages.text_stream import TextStream

BYTES = [b"a", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"z"]


def decode(tokens: list[int]) -> str:
    return b"".join(BYTES[t] for t in tokens).decode("utf-8", "replace")


def test_pieces_are_whole_characters_in_order_and_add_up_to_the_text() -> None:
    """Half a character shown as a replacement, or a piece told twice, would garble what a user reads."""
    pieces: list[str] = []
    with ThreadPoolExecutor(1) as worker:
        stream = TextStream(decode, worker, pieces.append)
        for token in range(len(BYTES)):
            stream.add([token])
        assert stream.finish() == "aé€z"
    assert "".join(pieces) == "aé€z"
    assert not any("\ufffd" in piece for piece in pieces)


def test_tokens_are_taken_while_a_slow_listener_is_still_busy() -> None:
    """A listener called in the decoding thread would hold up the next pass: here it waits for tokens still to come."""
    added, heard = Event(), []

    def listen(text: str) -> None:
        assert added.wait(10)
        heard.append((text, current_thread() is main_thread()))

    with ThreadPoolExecutor(1) as worker:
        stream = TextStream(decode, worker, listen)
        stream.add([0])
        stream.add([6])
        added.set()
        stream.finish()
    assert heard == [("a", False), ("z", False)]


def test_what_a_listener_raises_reaches_the_caller() -> None:
    """A closed pipe that goes unseen would let a long answer run on for nobody."""

    def closed(text: str) -> None:
        raise BrokenPipeError(text)

    with ThreadPoolExecutor(1) as worker:
        ended = TextStream(decode, worker, closed)
        ended.add([0])
        with pytest.raises(BrokenPipeError):
            ended.finish()
        going = TextStream(decode, worker, closed)
        going.add([0])
        wait(going._told)
        with pytest.raises(BrokenPipeError):
            going.add([6])


def test_an_unfinished_last_character_is_told_at_the_end() -> None:
    """What the end of an answer holds back for ever would be missing from the stream only."""
    pieces: list[str] = []
    with ThreadPoolExecutor(1) as worker:
        stream = TextStream(decode, worker, pieces.append)
        stream.add([0, 1])
        assert stream.finish() == "a\ufffd"
    assert "".join(pieces) == "a\ufffd"
