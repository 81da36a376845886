"""How much memory this process may still take, whether a job fits, and which errors mean that it ran out.

The kernel has several limits at once: the machine's memory, the control groups of this process and those above them
(containers, batch systems), and `ulimit`. The tightest one decides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
import errno
from pathlib import Path, PurePosixPath
import resource
from typing import Literal

from qspec.errors import OutOfMemory
from qspec.readable import size

_HINTS = (
    "not enough memory",
    "cannot allocate memory",
    "can't allocate memory",
    "defaultcpuallocator",
    "out of memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
)
"""Phrases of libraries for memory that ran out: torch, safetensors, the C++ runtime, threads, the loader."""
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Need:
    """Bytes that a job takes at once, at least. held: of memory that it writes to; reserved: of memory that it asks for
    and may never write to, as room for KV.
    """

    held: int
    reserved: int = 0

    def __add__(self, other: "Need") -> "Need":
        return Need(self.held + other.held, self.reserved + other.reserved)


@dataclass(frozen=True)
class Room:
    """Bytes that a limit still allows. reserves: it counts memory that is asked for, not only what is written to."""

    left: int
    limit: str
    reserves: bool = False

    def counted(self, need: Need) -> int:
        """Bytes of a need that this limit counts."""
        return need.held + need.reserved * self.reserves


def require_memory(what: str, need: Need, fix: str) -> None:
    """Refuse a job whose least need exceeds a limit of this process; raises `OutOfMemory`."""
    room = max(rooms(), key=lambda room: room.counted(need) - room.left, default=None)
    if room is not None and room.counted(need) > room.left:
        least, left = size(room.counted(need)), size(max(0, room.left))
        raise OutOfMemory(what, f"takes at least {least} of memory, and {room.limit} leaves {left}", fix)


def rooms(proc: Path = Path("/proc")) -> list[Room]:
    """Every limit that is known here; none on systems without `/proc` or `ulimit`."""
    return [*_machine(proc), *_groups(proc), *_own(proc)]


def tightest(proc: Path = Path("/proc")) -> str:
    """The limit that leaves least, for a message about memory that ran out; empty where none is known."""
    room = min(rooms(proc), key=lambda room: room.left, default=None)
    return "" if room is None else f"{room.limit} leaves {size(max(0, room.left))} now"


def ran_out(error: BaseException) -> str | None:
    """One line on memory that ran out, from an error or one of its causes; None for any other error."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        text = " ".join(str(cause).split())
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return text[:160] or "an allocation failed"
        if isinstance(cause, RuntimeError | ImportError | OSError) and any(hint in text.lower() for hint in _HINTS):
            return text[:160]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _machine(proc: Path) -> Iterator[Room]:
    facts = _kilobytes(proc / "meminfo")
    if "MemAvailable" in facts:
        yield Room(facts["MemAvailable"] + facts.get("SwapFree", 0), "this machine's memory")


def _own(proc: Path) -> Iterator[Room]:
    taken = _kilobytes(proc / "self" / "status")
    limits = (
        (resource.RLIMIT_AS, "VmSize", "RLIMIT_AS (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData", "RLIMIT_DATA (ulimit -d)"),
    )
    for number, field, name in limits:
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and field in taken:
            yield Room(limit - taken[field], f"{name} of {size(limit)}", reserves=True)


def _groups(proc: Path) -> Iterator[Room]:
    """Limits of the control groups, of both versions, that this process is in, from its own up to the outermost."""
    swap = _kilobytes(proc / "meminfo").get("SwapFree", 0)
    for folder, top, version in _hierarchies(proc):
        for group in (folder, *folder.parents):
            room = _unified(group, swap) if version == 2 else _legacy(group, swap)
            if room is not None:
                yield room
            if group == top:
                break


def _unified(group: Path, swap: int) -> Room | None:
    """Version 2. Cached files count as taken, but go when memory is asked for."""
    limit, taken = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or taken is None:
        return None
    cached = _cached(group, "inactive_file", "active_file")
    most, used = _number(group / "memory.swap.max"), _number(group / "memory.swap.current") or 0
    swap = swap if most is None else min(swap, max(0, most - used))
    return Room(limit - taken + cached + swap, f"memory.max {size(limit)} of control group {group}")


def _legacy(group: Path, swap: int) -> Room | None:
    limit, taken = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or taken is None or limit > _UNLIMITED:
        return None
    cached = _cached(group, "total_inactive_file", "total_active_file")
    name = f"memory.limit_in_bytes {size(limit)} of control group {group}"
    return Room(limit - taken + cached + swap, name)


def _cached(group: Path, *fields: str) -> int:
    pairs = (line.split() for line in _text(group / "memory.stat").splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in fields and pair[1].isdigit())


def _hierarchies(proc: Path) -> Iterator[tuple[Path, Path, Literal[1, 2]]]:
    """Folder of this process's group, and the topmost that is visible, of each hierarchy that limits memory."""
    lines = [line.split(":", 2) for line in _text(proc / "self" / "cgroup").splitlines()]
    paths = {controllers: path for number, controllers, path in (line for line in lines if len(line) == 3)}
    for line in _text(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        root, top = PurePosixPath(mount[3]), Path(mount[4])
        if kind[0] == "cgroup2" and "" in paths:
            yield _below(top, root, paths[""]), top, 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            own = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
            if own is not None:
                yield _below(top, root, own), top, 1


def _below(top: Path, root: PurePosixPath, path: str) -> Path:
    """A group's folder; the mount itself where the group lies outside of what is mounted (containers)."""
    group = PurePosixPath(path)
    folder = top / group.relative_to(root) if group.is_relative_to(root) else top
    return folder if folder.is_dir() else top


def _kilobytes(path: Path) -> dict[str, int]:
    """Bytes by name of the lines `Name: 12 kB` of a file."""
    parts = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {part[0]: int(part[1]) << 10 for part in parts if len(part) == 3 and part[2] == "kB" and part[1].isdigit()}


def _number(path: Path) -> int | None:
    """A file's number; None where there is no file, or no limit (`max`)."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
