"""Send a pair where others can fetch it, and fetch one: nothing that fails its check, nothing half."""

from collections.abc import Callable
from dataclasses import dataclass
import hashlib
from pathlib import Path

from qspec.bridges.hub import HubStore
from qspec.bridges.remote import FolderStore, Item
from qspec.errors import IntegrityError, OutputError, PairError
from qspec.provenance import require_space, sha256_file
from qspec.schema.manifest import NAME, FileEntry, Manifest
from qspec.stages.card import card
from qspec.stages.check import check, read_manifest
from qspec.stages.stale import measured, stale
from qspec.stages.verdict import blockers

CARD = "README.md"
MOST_MANIFEST = 64 << 20
"""Bytes of a manifest that are read from elsewhere."""
Told = Callable[[str], object]


@dataclass(frozen=True)
class Publication:
    """What is written: the pair's files, its card, and the manifest last."""

    items: tuple[Item, ...]
    card: str
    identity: str

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


def prepare(pair: Path, to: str, license: str | None = None, override: str | None = None) -> Publication:
    """Check a pair and its gates, and write its card. Raises `IntegrityError` or, for a missed gate, `PairError`.

    override: the reason why a pair is published although a gate failed; the card says it.
    """
    if "://" not in to and Path(to).resolve().is_relative_to(pair.resolve()):
        raise OutputError(to, f"lies in the pair, {pair}", "publish it elsewhere")
    check(pair)
    manifest, results = read_manifest(pair), measured(pair)
    override = (override or "").strip()
    against = ["nothing was measured"] if results is None else [*blockers(results), *stale(manifest, results)]
    if against and not override:
        fix = 'mend it, or publish in spite of it: --despite "the reason", which the card will say'
        raise PairError(str(pair), f"is not to be published: {'; '.join(against)}", fix)
    told = f"{override} ({'; '.join(against)})" if against and override else None
    report = pair / "report" / "report.md"
    text = report.read_text(encoding="utf-8") if report.exists() else ""
    readme = card(manifest, results, text, to, license, told)
    items = [Item(entry.path, pair / entry.path) for entry in manifest.files]
    identity = hashlib.sha256((pair / NAME).read_bytes()).hexdigest()
    return Publication((*items, Item(CARD, readme.encode()), Item(NAME, pair / NAME)), readme, identity)


def publish(publication: Publication, to: str, *, replace: bool = False, private: bool = False, told: Told) -> bool:
    """Write it to `to`; an interrupted attempt goes on. False: it was there already.

    replace: whether another pair that lies there may be taken away. told: hears of every file that is there.
    """
    store = _store(to, private)
    raw, ours = store.read(NAME, MOST_MANIFEST), publication.items[-1].content
    assert isinstance(ours, Path)
    if raw == ours.read_bytes():
        return False
    if raw is not None and not replace:
        raise OutputError(to, "holds another pair", "publish to another address, or take its place with --replace")
    if raw is None and store.holds_others():
        rule = "holds other files, among which a pair would be lost and its card would be the README.md"
        raise OutputError(to, rule, "publish to a folder of its own")
    stale = _listed(raw or b"") - {item.name for item in publication.items}
    for name in store.write(publication.items, publication.identity, sorted(stale)):
        told(name)
    return True


def pull(address: str, out: Path, told: Told) -> Path:
    """Fetch a pair to the folder `out`, which appears whole and checked, or not at all; an interrupted pull goes on.

    Raises `SourceError` for what is not there, `IntegrityError` for what is not what its manifest says.
    """
    if out.exists():
        raise OutputError(str(out), "exists", "give another folder, or remove it")
    store = _store(address)
    raw = store.read(NAME, MOST_MANIFEST)
    if raw is None:
        raise IntegrityError(f"{address}/{NAME}", "is missing", "give the address of a published pair")
    manifest, part = Manifest.parse(raw), out.with_name(f".{out.name}.pulled")
    require_space(part, sum(entry.bytes for entry in manifest.files))
    for entry in manifest.files:
        _fetch(store, entry, part / entry.path)
        told(entry.path)
    _drop_others(part, {entry.path for entry in manifest.files})
    (part / NAME).write_bytes(raw)
    check(part)
    part.rename(out)
    return out


def _store(address: str, private: bool = False) -> FolderStore:
    return HubStore(address, private) if address.startswith("hf://") else FolderStore(address)


def _listed(raw: bytes) -> set[str]:
    """Files of a manifest, none if it is not one."""
    try:
        return {entry.path for entry in Manifest.parse(raw).files}
    except IntegrityError:
        return set()


def _fetch(store: FolderStore, entry: FileEntry, to: Path) -> None:
    """One file, verified before it gets its name; kept if it is there already."""
    if to.is_file() and to.stat().st_size == entry.bytes and sha256_file(to) == entry.sha256:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f"{to.name}.partial")
    store.fetch(entry.path, entry.bytes, partial)
    if sha256_file(partial) != entry.sha256:
        partial.unlink()
        raise IntegrityError(entry.path, "was changed: its sha256 differs", "fetch an intact copy")
    partial.replace(to)


def _drop_others(folder: Path, names: set[str]) -> None:
    """Files that an earlier attempt, at another pair, left."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()
