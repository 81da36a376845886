"""Send a pair where others can fetch it, and fetch one: nothing that fails its check, nothing half."""

from collections.abc import Callable
from dataclasses import dataclass
import hashlib
from pathlib import Path
import re
from typing import Any

from qspec.bridges.hub import HubStore, card_header
from qspec.bridges.remote import FolderStore, Item
from qspec.errors import IntegrityError, OutputError, PairError
from qspec.measure.items import task_evidence
from qspec.pair.check import check, measured, read_manifest, stale
from qspec.provenance import drop_unnamed, require_space, sha256_file
from qspec.report.verdict import blockers
from qspec.schema.manifest import NAME, REPORT, FileEntry, Half, Manifest
from qspec.schema.results import Results

CARD = "README.md"


MOST_MANIFEST = 64 << 20
"""Bytes of a manifest that are read from elsewhere."""


Told = Callable[[str], object]


def card(
    manifest: Manifest, results: Results | None, report: str, address: str, license: str | None, override: str | None
) -> str:
    """Markdown. report: of the pair, in Markdown; override: why it is published although something speaks against it.

    license: an identifier of the Hub's; None leaves it out, which the card then says.
    """
    header = card_header(
        manifest.name,
        None if results is None else _score(results),
        base_model=_base_models(manifest) or None,
        base_model_relation="quantized" if _base_models(manifest) else None,
        license=license,
        library_name="qspec",
        pipeline_tag="text-generation",
        tags=_tags(manifest),
    )
    warning = f"> **Published although a gate failed:** {override}\n\n" if override else ""
    parts = [
        f"{header}\n# {manifest.name}\n\n{warning}{_introduction(manifest)}",
        f"## Use\n\n{_use(manifest, address)}",
        f"## What is inside\n\n{_halves(manifest)}",
        _served(manifest),
        _report(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    manifest = read_manifest(pair)
    results = measured(pair, manifest)
    override = (override or "").strip()
    against = ["nothing was measured"] if results is None else [*blockers(results), *stale(manifest, results)]
    if against and not override:
        fix = 'mend it, or publish in spite of it: --despite "the reason", which the card will say'
        raise PairError(str(pair), f"is not to be published: {'; '.join(against)}", fix)
    told = f"{override} ({'; '.join(against)})" if against and override else None
    report = pair / (manifest.report or REPORT) / "report.md"
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
        store.finish(publication.identity)
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

    Raises `SourceError` for what is not there, `IntegrityError` for what is not what its manifest says, `OutputError`
    where `out` is something else than that pair.
    """
    if out.exists() and not (out / NAME).is_file():
        raise OutputError(str(out), "exists", "give another folder, or remove it")
    store = _store(address)
    raw = store.read(NAME, MOST_MANIFEST)
    if raw is None:
        raise IntegrityError(f"{address}/{NAME}", "is missing", "give the address of a published pair")
    if out.exists():
        if (out / NAME).read_bytes() != raw:
            raise OutputError(str(out), "exists, and is another pair", "give another folder, or remove it")
        check(out)
        return out
    manifest, part = Manifest.parse(raw), out.with_name(f".{out.name}.pulled")
    require_space(part, sum(entry.bytes for entry in manifest.files))
    drop_unnamed(part, {part / entry.path for entry in manifest.files})  # of an earlier attempt, at another pair
    for entry in manifest.files:
        _fetch(store, entry, part / entry.path)
        told(entry.path)
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


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


_DATASETS = {"mmlu_pro": ("TIGER-Lab/MMLU-Pro", "MMLU-Pro"), "gsm8k": ("openai/gsm8k", "GSM8K")}


def _base_models(manifest: Manifest) -> list[str]:
    """Sources that the Hub knows, once each; a file or a package is none."""
    named = [half.source.get("model", "") for half in (manifest.target, manifest.draft)]
    return list(dict.fromkeys(name for name in named if _HUB_ID.fullmatch(name)))


def _tags(manifest: Manifest) -> list[str]:
    schemes = {s.lower() for half in (manifest.target, manifest.draft) for s in half.schemes if s != "none"}
    return ["qspec", "speculative-decoding", "quantized", "compressed-tensors", *sorted(schemes)]


def _score(results: Results) -> dict[str, Any] | None:
    """The quantized target's first task result that says something; guesses are no score to list a model by."""
    for task in (task for task in results.accuracy.tasks if not task_evidence(task).open):
        dataset = _DATASETS.get(task.task, (task.task, task.task))
        return {
            "dataset_type": dataset[0],
            "dataset_name": dataset[1],
            "metric_type": "exact_match",
            "metric_name": f"{task.quantized.metric}, {task.quantized.n} questions",
            "metric_value": round(task.quantized.value, 4),
        }
    return None


def _introduction(manifest: Manifest) -> str:
    target, draft = manifest.target, manifest.draft
    drafts = f"a draft ({_schemes(draft)})" if draft.folder else f"drafts by {draft.kind} lookup"
    where = manifest.validity
    return (
        f"A speculative pair: {target.source.get('model', 'a model')} quantized ({_schemes(target)}), with {drafts}. "
        f"Made by qspec for device `{where.device}`, contexts up to {where.max_length:,} tokens. Drafting changes the "
        f"speed, not the law that tokens follow."
    )


def _schemes(half: Half) -> str:
    named = [f"{n} layers {scheme}" for scheme, n in half.schemes.items() if scheme != "none"]
    return ", ".join(named) or "not quantized"


def _use(manifest: Manifest, address: str) -> str:
    lines = [
        f"qspec pull {address} pair",
        "qspec check pair",
        'qspec generate pair "Why is the sky blue?"',
        "qspec serve pair --engine qspec",
    ]
    command = manifest.speculation.get("vllm_command")
    if manifest.exportable and command:
        lines.append(str(command))
    return "```bash\n" + "\n".join(lines) + "\n```" + (f"\n\nvLLM: {manifest.reason}" if manifest.reason else "")


def _halves(manifest: Manifest) -> str:
    rows = ["| part | source | revision | formats | MB |", "|---|---|---|---|---|"]
    for name, half in (("target", manifest.target), ("draft", manifest.draft)):
        size = sum(entry.bytes for entry in manifest.files if half.folder and entry.path.startswith(f"{half.folder}/"))
        source, revision = half.source.get("model", half.kind), half.source.get("revision", "")
        rows.append(f"| {name} | {source} | {revision} | {_schemes(half)} | {size / 1e6:,.1f} |")
    return "\n".join(rows)


def _served(manifest: Manifest) -> str:
    if not manifest.served_by:
        return ""
    rows = ["| runtime | part | served | how, or why not |", "|---|---|---|---|"]
    rows += [f"| {s.runtime} | {s.part} | {'yes' if s.served else 'no'} | {s.detail} |" for s in manifest.served_by]
    return "## Who serves it\n\n" + "\n".join(rows)


def _report(report: str) -> str:
    """The report with its headings one level lower, so that the card keeps one title."""
    lowered = re.sub(r"^(#+ )", r"#\1", report.strip(), flags=re.MULTILINE)
    return lowered or "Nothing was measured."
