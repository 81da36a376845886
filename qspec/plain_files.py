"""Files that others may have written, read whole: regular ones, up to a size, so that no reader waits or runs full."""

import json
import os
from pathlib import Path
import stat
from typing import Any

from qspec.errors import QspecError, SourceError

MOST_BYTES = 64 << 20
"""Bytes of a file that is no weights: the largest, a tokenizer of 256,000 tokens, has half of that."""
_FIX = "give an intact copy"


def read_bytes(path: Path, error: type[QspecError] = SourceError, fix: str = _FIX) -> bytes:
    """The bytes of a regular file. Raises `error` for one that is missing, too large, a pipe, a device or a folder."""
    require_regular(path, error, fix)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as failure:
        raise error(str(path), f"cannot be read ({failure.strerror})", fix) from failure
    if len(content) > MOST_BYTES:
        raise error(str(path), f"is larger than {MOST_BYTES:,} bytes", fix)
    return content


def require_regular(path: Path, error: type[QspecError] = SourceError, fix: str = _FIX) -> None:
    """Refuse what `open` would wait for or never reach the end of; a link counts as what it leads to."""
    try:
        mode = path.stat().st_mode
    except OSError as failure:
        raise error(str(path), f"cannot be read ({failure.strerror})", fix) from failure
    if not stat.S_ISREG(mode):
        raise error(str(path), "is a folder, a pipe or a device, and no file", fix)


def read_json(path: Path, error: type[QspecError] = SourceError, fix: str = _FIX) -> dict[str, Any]:
    """The JSON object in a file, a byte order mark aside. Raises `error` as `read_bytes`, and for what is no object."""
    return parse_json(read_bytes(path, error, fix), str(path), error, fix)


def parse_json(raw: bytes, where: str, error: type[QspecError] = SourceError, fix: str = _FIX) -> dict[str, Any]:
    """The JSON object that `raw` holds; raises `error` about `where`."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise error(where, f"is not JSON ({' '.join(str(failure).split())[:120]})", fix) from failure
    if not isinstance(content, dict):
        raise error(where, "must hold a JSON object", fix)
    return content
