"""Text comes in order, whole, from another thread, and a listener that fails stops the answer."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Event, current_thread, main_thread
from typing import Any

from hypothesis import given, settings, strategies as st
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qspec.bridges.hf import HFTokenizer, load_tokenizer
from qspec.pair.text_stream import TextStream
from tests.tiny import TEXT, VOCAB_SIZE, save_tokenizer

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
        wait(going._pending)
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


Decode = Callable[[list[int]], str]
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
"""Sizes of the steps in which tokens come, in turn."""


def told(decode: Decode, tokens: list[int], cuts: list[int]) -> list[str]:
    """The pieces of a stream whose tokens come in steps."""
    pieces: list[str] = []
    with ThreadPoolExecutor(1) as worker:
        stream, at, step = TextStream(decode, worker, pieces.append), 0, 0
        while at < len(tokens):
            stream.add(tokens[at : at + cuts[step % len(cuts)]])
            at, step = at + cuts[step % len(cuts)], step + 1
        assert stream.finish() == decode(tokens)
    return pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """Byte-level BPE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(folder)


@settings(deadline=None)
@given(st.data(), CUTS)
def test_bytes_add_up_to_the_text_of_all_tokens(tokenizer: HFTokenizer, data: st.DataObject, cuts: list[int]) -> None:
    """Characters of several tokens, special tokens among them, or bytes that are no text would be garbled or lost."""
    tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
    assert "".join(told(tokenizer.decode, tokens, cuts)) == tokenizer.decode(tokens)


def spaced(kind: str) -> tuple[Decode, int]:
    """A tokenizer whose first token loses its space, or whose words are joined and cleaned; and how many ids it has."""
    words = ["\u2581the", "\u2581fox", "\u2581", "s", ".", "\u2581.", "\u2581\u2581", "é", "\u2581!"]
    decoder: Any = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if kind == "metaspace":
        decoder = decoders.Metaspace()
    if kind == "wordpiece":
        words = ["the", "fox", "##s", ".", ",", "'", "n't", "##é", "do", "not", "!"]
        decoder = decoders.WordPiece(cleanup=True)
    if kind == "suffixes":
        words, decoder = ["the</w>", "fox</w>", "fo", "x</w>", ".</w>"], decoders.BPEDecoder()
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    return inner.decode, len(words) + 1


@settings(deadline=None)
@given(st.sampled_from(["sentencepiece", "metaspace", "wordpiece", "suffixes"]), st.data(), CUTS)
def test_spaces_are_those_of_the_text_of_all_tokens(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    """A space that is dropped before a text's first token only would be missing before every piece, or told twice."""
    decode, ids = spaced(kind)
    tokens = data.draw(st.lists(st.integers(0, ids - 1), max_size=40))
    assert "".join(told(decode, tokens, cuts)) == decode(tokens)


@settings(deadline=None)
@given(st.text(max_size=30), CUTS)
def test_characters_in_bytes_of_their_own_come_whole(text: str, cuts: list[int]) -> None:
    """A character that a vocabulary lacks comes byte by byte: told early, it would stay a replacement for ever."""
    inner = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    decode = partial(inner.decode, skip_special_tokens=True)
    tokens = list(text.encode())
    pieces = told(decode, tokens, cuts)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces[:-1] if "\ufffd" not in text)


def test_a_long_answer_is_not_decoded_anew_for_each_piece(tokenizer: HFTokenizer) -> None:
    """Decoding all tokens for every piece costs the square of an answer's length, in the time of the passes."""
    decoded: list[int] = []

    def counted(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > 200
    told(counted, tokens, [1])
    assert sum(decoded) < 8 * len(tokens)  # in its piece, beside the next one, twice at the end; bytes wait a little
