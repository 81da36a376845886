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
from qspec.provenance import commit, drop_unnamed, require_space, sha256_file
from qspec.readable import number
from qspec.report.document import Block, Details, Document, Paragraph, Table, compact
from qspec.report.headline import lead, tiles
from qspec.report.render import markdown as report_markdown
from qspec.report.verdict import obstacles
from qspec.schema.manifest import NAME, FileEntry, Half, Manifest
from qspec.schema.results import Results

CARD = "README.md"


MOST_MANIFEST = 64 << 20
"""Bytes of a manifest that are read from elsewhere."""


Report = Callable[[str], object]


def card(
    manifest: Manifest, results: Results | None, address: str, license: str | None, override: str | None, base: str = ""
) -> str:
    """Markdown, about a screen: the rest is behind links to the report and the manifest, which go with it.

    license, base: identifiers of the Hub's, of a licence and of the model that the target was made from. override: why
    the pair is published although something speaks against it.
    """
    known = [base] if base else _base_models(manifest)
    header = card_header(
        manifest.name,
        None if results is None else _score(results),
        base_model=known or None,
        base_model_relation="quantized" if known else None,
        license=license,
        library_name="qspec",
        pipeline_tag="text-generation",
        tags=_tags(manifest),
    )
    warning = f"> **Published although a gate failed:** {override}\n\n" if override else ""
    blocks: list[Block] = [Details("Use", tuple(_use(manifest, address)), code=True), _halves(manifest)]
    if results is not None and (glance := tiles(results)).tiles:
        blocks.append(glance)
    if manifest.warnings:
        blocks.append(Details("Its plan warned of", manifest.warnings))
    answer = "Nothing was measured." if results is None else lead(results)
    page = Document(manifest.name, _introduction(manifest), (*blocks, Paragraph(_served(manifest))), answer)
    return f"{header}\n{warning}{report_markdown.render(page)}\n{_links(manifest)}\n"


@dataclass(frozen=True)
class Publication:
    """Items in the order of writing: the pair's files, its card, and the manifest last."""

    items: tuple[Item, ...]
    card: str
    identity: str

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


def prepare(
    pair: Path, to: str, license: str | None = None, override: str | None = None, base: str = ""
) -> Publication:
    """Check a pair and its gates, and write its card. Raises `IntegrityError` or, for a missed gate, `PairError`.

    override: the reason why a pair is published although a gate failed; the card says it. A pair that was made
    despite its quality has a reason of its own, which does for all but measurements that are out of date. base: Hub
    id of the model that the target was made from, where neither the recipe nor the model's own name is one.
    """
    if base and not _HUB_ID.fullmatch(base):
        raise OutputError(f"--base-model {base}", "is no Hub id", "give org/name")
    if "://" not in to and Path(to).resolve().is_relative_to(pair.resolve()):
        raise OutputError(to, f"lies in the pair, {pair}", "publish it elsewhere")
    check(pair)
    manifest = read_manifest(pair)
    results = measured(pair, manifest)
    override = (override or "").strip()
    against = obstacles(pair)
    if results is not None and not stale(manifest, results):
        override = override or manifest.despite
    if against and not override:
        fix = 'mend it, or publish in spite of it: --despite "the reason", which the card will say'
        raise PairError(str(pair), f"is not ready, and not to be published: {'; '.join(against)}", fix)
    despite = f"{override} ({'; '.join(against)})" if against and override else None
    readme = card(manifest, results, to, license, despite, base)
    items = [Item(entry.path, pair / entry.path) for entry in manifest.files]
    identity = hashlib.sha256((pair / NAME).read_bytes()).hexdigest()
    return Publication((*items, Item(CARD, readme.encode()), Item(NAME, pair / NAME)), readme, identity)


def publish(publication: Publication, to: str, *, replace: bool = False, private: bool = False, report: Report) -> bool:
    """Write it to `to`; an interrupted attempt goes on. False: it was there already.

    replace: whether another pair that lies there may be taken away. report: hears of every file that is there.
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
        report(name)
    return True


def pull(address: str, out: Path, report: Report) -> Path:
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
        report(entry.path)
    (part / NAME).write_bytes(raw)
    check(part)
    commit(part, out)
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
    """Hub ids of the models that the halves were made from, once each; files and packages have none."""
    own = (manifest.recipe.get("target") or {}).get("base_model") or manifest.target.source.get("model", "")
    named = [own, manifest.draft.source.get("model", "")]
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
        f"A speculative pair: {_name(target)} quantized ({_schemes(target)}), with {drafts}. Made by qspec for device "
        f"{where.device}, contexts up to {where.max_length:,} tokens. Drafts change its speed, not the distribution of "
        "its tokens."
    )


def _name(half: Half) -> str:
    """The name of the model that a half was made from, without local folders."""
    model = half.source.get("model", half.kind)
    return model if _HUB_ID.fullmatch(model) or model.startswith("package:") else Path(model).name


def _schemes(half: Half) -> str:
    named = [f"{n} layers {scheme}" for scheme, n in half.schemes.items() if scheme != "none"]
    return ", ".join(named) or "not quantized"


def _use(manifest: Manifest, address: str) -> list[str]:
    """Commands; a folder on the disk of whoever publishes is nobody else's address."""
    there = "://" in address and not address.startswith(("file:", "local:"))
    lines = [
        f"qspec pull {address} pair" if there else "qspec pull FOLDER pair     # FOLDER holds this file",
        'qspec generate pair "Why is the sky blue?"',
        "qspec serve pair --engine qspec",
    ]
    command = manifest.speculation.get("vllm_command")
    return [*lines, str(command)] if manifest.exportable and command else lines


def _halves(manifest: Manifest) -> Table:
    halves = (("target", manifest.target), ("draft", manifest.draft))
    columns = ("", "made from", "revision", "formats", "MB")
    return compact("What is inside", columns, tuple(_half_row(manifest, name, half) for name, half in halves))


def _half_row(manifest: Manifest, name: str, half: Half) -> tuple[str, ...]:
    inside = (entry.bytes for entry in manifest.files if half.folder and entry.path.startswith(f"{half.folder}/"))
    return name, _name(half), half.source.get("revision", ""), _schemes(half), number(sum(inside) / 1e6)


def _served(manifest: Manifest) -> str:
    """Who serves which part, in a sentence; why not stands in the manifest."""
    parts: dict[str, list[str]] = {}
    for served in manifest.served_by:
        parts.setdefault(served.runtime, []).append(f"{served.part} {'yes' if served.served else 'no'}")
    others = "".join(f"; by {runtime}: {', '.join(programs)}" for runtime, programs in parts.items())
    reason = f" vLLM: {manifest.reason}." if manifest.reason else ""
    return f"Served by qspec's own engine{others}.{reason}"


def _links(manifest: Manifest) -> str:
    """To the files that go with the card and hold the rest."""
    more = f"How it was made, every digest, and why a runtime does not serve a part: [{NAME}]({NAME})."
    if manifest.report is None:
        return more
    page = f"{manifest.report}/report.md"
    return f"All measurements, their conditions and what they do not show: [{page}]({page}). {more}"
