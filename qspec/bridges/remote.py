"""fsspec: a pair in any folder that it can reach (a local one, s3://, gs://, sftp://, …). What lies there whole has a
manifest; while one is being written there is a marker instead, by which a later attempt knows which files are its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qspec.errors import OutputError, QspecError, SourceError

MARKER, PART = ".qspec-upload", ".qspec-upload.partial"


@dataclass(frozen=True)
class Item:
    """A file to be written: its name below the address, and where its bytes lie, or they themselves."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


class FolderStore:
    """One folder at `address`."""

    def __init__(self, address: str) -> None:
        """Raises `SourceError` for an address that nothing here can reach, or that carries a password."""
        from fsspec.core import url_to_fs

        fix = "give a folder, hf://org/name, or an address of an installed fsspec backend (s3:// needs qspec[s3])"
        if not address.strip():
            raise SourceError(f"address {address!r}", "names no place", fix)
        parts = urlsplit(address)
        if parts.password or (parts.username and parts.scheme in ("http", "https")):
            rule = "carries a password, which logs and shell histories would keep"
            where = f"{parts.scheme}://…@{parts.hostname}{parts.path}"
            raise SourceError(where, rule, "put credentials where the service's own tools look for them")
        self.address = address.rstrip("/") or "/"
        try:
            self._fs: Any
            self._fs, self._root = url_to_fs(self.address, use_listings_cache=False)
            self._fs.invalidate_cache()  # it may be an older store's, from before something was published
        except (ImportError, ValueError) as error:
            raise SourceError(address, f"cannot be reached ({_reason(error)})", fix) from error

    def read(self, name: str, most: int) -> bytes | None:
        """A small file's bytes, None if it is not there; more than `most` are refused."""
        with _explained(self.address, SourceError):
            size = self._size(name)
            if size is None:
                return None
            if size > most:
                raise SourceError(f"{self.address}/{name}", f"is larger than {most:,} bytes", "give a pair")
            return bytes(self._fs.cat_file(self._at(name)))

    def holds_others(self) -> bool:
        """Whether files lie there that no attempt to write a pair has left."""
        with _explained(self.address, OutputError):
            return self._marker() is None and bool(self._sizes().keys() - {PART})

    def fetch(self, name: str, size: int, to: Path) -> None:
        """Copy a file of `size` bytes to `to`; one that is missing, or of another size, is refused unread."""
        with _explained(self.address, SourceError):
            present = self._size(name)
            if present != size:
                rule = "is missing" if present is None else f"has {present} bytes instead of {size}"
                raise SourceError(f"{self.address}/{name}", rule, "publish the pair again")
            self._fs.get_file(self._at(name), str(to))

    def write(self, items: Sequence[Item], identity: str, stale: Sequence[str]) -> Iterator[str]:
        """Put `items` there in order, the last one being what makes the pair whole; yields each name when it is there.

        identity: of this pair; files that an interrupted attempt with the same one has left are not sent again.
        stale: files that are no part of the pair and go first. Whoever reads sees the pair that was there, none, or the
        new one.
        """
        with _explained(self.address, OutputError):
            self._fs.makedirs(self._root, exist_ok=True)
            *content, last = items
            started, left = self._marker() or ("", [])
            kept = self._sizes() if started == identity else {}
            ours = {item.name for item in items}
            self._replace(Item(MARKER, "\n".join([identity, *sorted({*ours, *stale, *left})]).encode()))
            for name in [last.name, *sorted({*stale, *left} - ours)]:
                self._remove(name)
            for item in content:
                if kept.get(item.name) != item.size or isinstance(item.content, bytes):
                    self._put(item)
                yield item.name
            self._replace(last)
            yield last.name
            self._remove(MARKER)

    def finish(self, identity: str) -> None:
        """Remove the marker of an attempt that ended once the pair was whole."""
        with _explained(self.address, OutputError):
            if (self._marker() or ("",))[0] == identity:
                self._remove(MARKER)

    def _replace(self, item: Item) -> None:
        """Put a small file there in one step, where many file systems would show one that is being written."""
        self._put(Item(PART, item.content))
        self._fs.mv(self._at(PART), self._at(item.name))

    def _remove(self, name: str) -> None:
        if self._size(name) is not None:
            self._fs.rm_file(self._at(name))

    def _put(self, item: Item) -> None:
        self._fs.makedirs(self._fs._parent(self._at(item.name)), exist_ok=True)
        if isinstance(item.content, bytes):
            self._fs.pipe_file(self._at(item.name), item.content)
        else:
            self._fs.put_file(str(item.content), self._at(item.name))

    def _marker(self) -> tuple[str, list[str]] | None:
        """Identity and files that an interrupted attempt was to write; None if there was none."""
        if self._size(MARKER) is None:
            return None
        identity, *names = self._fs.cat_file(self._at(MARKER)).decode(errors="replace").split("\n")
        return identity, names

    def _size(self, name: str) -> int | None:
        """Bytes of a file, None if it is not there. A failure is no absence, as it is to fsspec's `exists`."""
        try:
            return int(self._fs.info(self._at(name))["size"])
        except FileNotFoundError:
            return None

    def _sizes(self) -> dict[str, int]:
        entries = self._fs.find(self._root, detail=True)
        start = len(self._root.rstrip("/")) + 1
        return {path[start:]: facts["size"] for path, facts in entries.items()}

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _explained(address: str, kind: type[QspecError]) -> Iterator[None]:
    try:
        yield
    except QspecError:
        raise
    except Exception as error:  # every backend has a family of its own
        raise kind(address, f"failed ({_reason(error)})", "check address, access and room; then try again") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
