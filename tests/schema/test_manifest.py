"""pair.json: one canonical form, and no byte of it can change unseen."""

import json
from pathlib import Path

from hypothesis import given, strategies as st
from pydantic import ValidationError
import pytest

from qspec.errors import IntegrityError
from qspec.schema.manifest import FileEntry, Half, Manifest, Served, TokenizerInfo, Validity

SHA = "0" * 64


def manifest(**changes: object) -> Manifest:
    fields = {
        "name": "pair-é",
        "target": Half(kind="model", folder="target", source={"model": "org/m"}, schemes={"W8A8": 7, "none": 1}),
        "draft": Half(kind="ngram"),
        "tokenizer": TokenizerInfo(fingerprint="ab", real_vocab=500, target_vocab=512),
        "served_by": (Served(runtime="vllm", part="kv", served=False, detail="serve flag"),),
        "validity": Validity(device="cpu", dtype="float32", max_length=64),
        "recipe": {"name": "pair", "seed": 0, "budget": {"max_kl": 1e-05}},
        "measurements": ({"metric": "kl", "value": 0.1, "n": 3},),
        "files": (FileEntry(path="target/config.json", bytes=2, sha256=SHA),),
    }
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


def test_parse_of_dump_is_equal_and_stable():
    """Would catch a field that is written and not read, or bytes that depend on the order of construction."""
    raw = manifest().dump()
    assert Manifest.parse(raw) == manifest()
    assert Manifest.parse(raw).dump() == raw
    assert list(json.loads(raw)) == sorted(json.loads(raw))


def test_every_flipped_bit_is_seen():
    """Would catch a byte outside the digest's reach: white space, key order, the digest itself, escapes."""
    raw = manifest().dump()
    for index in range(len(raw)):
        damaged = bytearray(raw)
        damaged[index] ^= 1 << (index % 8)
        with pytest.raises(IntegrityError):
            Manifest.parse(bytes(damaged))


@given(cut=st.integers(0, 400), tail=st.binary(max_size=8))
def test_cut_or_lengthened_files_are_refused(cut: int, tail: bytes):
    """Would catch a truncated download, or text after the end, that still parses."""
    raw = manifest().dump()
    damaged = raw[: len(raw) - cut] + tail
    if damaged != raw:
        with pytest.raises(IntegrityError):
            Manifest.parse(damaged)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"[" * 100_000, b"null", b"\xff", b'{"format_version": 2}', b'{"format_version": 1}']
)
def test_other_files_are_refused_in_one_line(raw: bytes):
    """Would catch a traceback for a file that is no manifest, or one of a later version read as this one."""
    with pytest.raises(IntegrityError) as caught:
        Manifest.parse(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../../x", "a\\b", "", ".", "a//b", "./a", "a/", "pair.json", "a\0b", "a\x1b[2J", "a\nb"],
)
def test_paths_stay_inside_the_pair(path: str):
    """Would catch a manifest that makes `check` read, or a download write, outside the pair's folder."""
    with pytest.raises(ValidationError):
        FileEntry(path=path, bytes=1, sha256=SHA)


def test_files_are_listed_once_in_order():
    """Would catch two entries for one path, of which only one would be verified."""
    entry = FileEntry(path="b", bytes=1, sha256=SHA)
    for files in ((entry, entry), (entry, FileEntry(path="a", bytes=1, sha256=SHA))):
        with pytest.raises(ValidationError, match="sorted by path"):
            manifest(files=files)


def test_no_file_is_a_folder_of_another():
    """Would catch a download that stops half-way because a folder cannot be made where a file lies."""
    names = ("target", "target/config.json")
    with pytest.raises(ValidationError, match="is a file and a folder"):
        manifest(files=tuple(FileEntry(path=path, bytes=1, sha256=SHA) for path in names))


def test_written_file_survives_the_disk(tmp_path: Path):
    """Would catch bytes that a text-mode write would change (line ends, encoding)."""
    path = tmp_path / "pair.json"
    path.write_bytes(manifest().dump())
    assert Manifest.parse(path.read_bytes()).name == "pair-é"
