"""Files of others, read whole: what no reader may wait for, or run full of."""

import os
from pathlib import Path

import pytest

from qspec import plain_files
from qspec.errors import IntegrityError, SourceError
from qspec.plain_files import read_bytes, read_json


def test_only_regular_files_are_opened(tmp_path: Path):
    """Would catch a pipe in place of a file, which the reader waits for, a device that never ends, a folder."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(SourceError, match="a pipe or a device"):
            read_bytes(path)
    with pytest.raises(IntegrityError, match="No such file"):
        read_bytes(tmp_path / "absent", IntegrityError)


def test_no_more_is_read_than_a_file_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a sparse file of gigabytes that costs nobody anything but its reader."""
    monkeypatch.setattr(plain_files, "MOST_BYTES", 1000)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match="is larger than 1,000 bytes"):
        read_bytes(path)
    path.write_bytes(bytes(1000))
    assert len(read_bytes(path)) == 1000


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe", "not JSON"),
    ],
    ids=["cut", "deep", "a list", "bytes"],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, raw: bytes, rule: str):
    """Would catch a traceback of the parser, from nesting that it cannot follow too."""
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=rule):
        read_json(path)


def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path):
    """Would catch a config.json that an editor marked as UTF-8, refused."""
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}
