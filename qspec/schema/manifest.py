"""The pair's manifest, `pair.json`: what the pair is, where it came from, what it was measured to do, and every file.

Its bytes have one canonical form, and a digest of that form inside: any change of the file itself is seen.
"""

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from qspec.errors import IntegrityError
from qspec.schema.drafts import DRAFTS
from qspec.schema.problems import short, validate
from qspec.schema.quantization import Strict

FORMAT_VERSION: Literal[1] = 1
NAME, REPORT = "pair.json", "report"
BESIDE = ("README.md", ".gitattributes", ".qspec-upload", ".qspec-upload.partial")
"""Files that lie beside a published pair and are not listed: its card, the Hub's settings, marks of an upload."""
MOST_FILES, MOST_BYTES = 10_000, 1 << 44
"""The most files of a pair, and their most bytes; a manifest that claims more is refused."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _inside(path: str) -> str:
    """A relative POSIX path that stays inside the pair and is not the manifest."""
    parts, shown = PurePosixPath(path).parts, short(path)
    if not parts or path.startswith("/") or "\\" in path or ".." in parts or path == NAME:
        raise ValueError(f"{shown} is no path inside the pair; use a relative path such as target/config.json")
    if not path.isprintable():
        raise ValueError(f"{shown} holds characters that do not print; use a plain name")
    if str(PurePosixPath(path)) != path:
        raise ValueError(f"{shown} is not in its shortest form; write {short(str(PurePosixPath(path)))}")
    return path


Inside = Annotated[str, AfterValidator(_inside)]


class FileEntry(Strict):
    """One file of the pair."""

    path: Inside
    bytes: int = Field(ge=0, le=MOST_BYTES)
    sha256: Sha256


class Half(Strict):
    """Target or draft. `source`: model, revision, sha256 of the original; `schemes`: linear layers by scheme name."""

    kind: str
    folder: Inside | None = Field(default=None, description="inside the pair; None for a draft without weights")
    source: dict[str, str] = Field(default_factory=dict)
    quantization: dict[str, Any] | None = None
    schemes: dict[str, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in DRAFTS:
            raise ValueError(f"kind {short(kind)} is none of {', '.join(DRAFTS)}; use one of them")
        return kind


class TokenizerInfo(Strict):
    """The tokenizer both halves share, and the rows of their heads (padding included)."""

    fingerprint: str = Field(min_length=1)
    real_vocab: int = Field(ge=1)
    target_vocab: int = Field(ge=1)
    draft_vocab: int | None = Field(default=None, ge=1)


class Served(Strict):
    """Whether one runtime serves one part of the pair: how, or why not."""

    runtime: str
    part: Literal["target", "kv", "draft"]
    served: bool
    detail: str


class Validity(Strict):
    """Where the measurements hold."""

    device: str
    dtype: str
    max_length: int = Field(ge=1)


class Manifest(Strict):
    """`pair.json`. `exportable` False comes with a `reason`.

    despite: why the pair is to be used although it is not ready, by whoever made it. warnings: of its plan.
    """

    format_version: Literal[1] = FORMAT_VERSION
    name: str
    target: Half
    draft: Half
    tokenizer: TokenizerInfo
    served_by: tuple[Served, ...] = ()
    exportable: bool = True
    reason: str = ""
    speculation: dict[str, Any] = Field(default_factory=dict)
    vllm_speculative_config: dict[str, Any] | None = None
    validity: Validity
    recipe: dict[str, Any]
    environment: dict[str, str] = Field(default_factory=dict)
    measurements: tuple[dict[str, Any], ...] = ()
    lossless: dict[str, Any] | None = None
    despite: str = ""
    warnings: tuple[str, ...] = ()
    files: tuple[FileEntry, ...] = Field(max_length=MOST_FILES)

    @field_validator("files")
    @classmethod
    def _sorted_once(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        paths = [f.path for f in files]
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path, each once; sort them")
        folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        if both := folders.intersection(paths):
            raise ValueError(f"{short(min(both))} is a file and a folder; rename one of them")
        return files

    @property
    def report(self) -> str | None:
        """Folder of the report, inside the pair; None before anything was measured.

        Below `report/` each report has a folder of its own: only the one that is listed counts.
        """
        paths = (entry.path for entry in self.files if entry.path.startswith(f"{REPORT}/"))
        return next((path.rpartition("/")[0] for path in paths), None)

    def dump(self) -> bytes:
        """The canonical bytes with their own digest: sorted keys, two spaces, UTF-8, one newline at the end."""
        data = self.model_dump(mode="json")
        return _canonical({**data, "digest": hashlib.sha256(_canonical(data)).hexdigest()})

    @classmethod
    def parse(cls, raw: bytes) -> "Manifest":
        """The manifest of a `pair.json`'s bytes. Raises `IntegrityError` if they are not exactly what `dump` wrote."""
        rule, fix = "was changed after it was written", "package the pair again, or fetch an intact copy"
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise IntegrityError(NAME, "is not JSON", fix) from None
        if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
            version = data.get("format_version") if isinstance(data, dict) else None
            newer = type(version) is int and version > FORMAT_VERSION
            fix = "it is from a newer qspec: update this one" if newer else fix
            raise IntegrityError(f"{NAME}: format_version {short(version)}", f"must be {FORMAT_VERSION}", fix)
        data.pop("digest", None)
        manifest = validate(cls, data, NAME, IntegrityError)
        try:
            same = manifest.dump() == raw
        except (ValueError, RecursionError):  # numbers and characters that our JSON has not
            same = False
        if not same:
            raise IntegrityError(NAME, rule, fix)
        return manifest


def _canonical(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
