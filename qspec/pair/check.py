"""Is a pair what its manifest says, and do its halves belong together? Nothing is run, nothing is changed."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import stat
from typing import Any, Literal

import torch

from qspec.bridges.compressed import lint_scale, read
from qspec.errors import IntegrityError, QspecError
from qspec.models.vocab import check_heads, check_tokenizers, differing_parts, real_vocab
from qspec.pair.drafters.registry import kind_of
from qspec.pair.head import check_floats, check_scales
from qspec.plain_files import MOST_BYTES, read_bytes
from qspec.provenance import environment, sha256_file
from qspec.records import QuantizedModel, layer_number
from qspec.schema.drafts import USES
from qspec.schema.manifest import BESIDE, NAME, REPORT, FileEntry, Manifest
from qspec.schema.problems import short, validate
from qspec.schema.recipe import Recipe
from qspec.schema.results import Provenance, Results

_FETCH = "package the pair again, or fetch an intact copy"


@dataclass(frozen=True)
class PairContent:
    """A pair as its files say. halves: `target` and, if it is a transformer, `draft`; tensors are read when used."""

    manifest: Manifest
    recipe: Recipe
    halves: dict[str, QuantizedModel]


def check(pair: Path) -> list[str]:
    """A sentence for each part that is in order. Raises `IntegrityError` naming the first file that is not.

    Looks at the manifest's own digest, at every file (path, size, sha256; none missing, none extra, no links), at
    every scale and float tensor, and at tokenizer and vocabulary of both halves.
    """
    return examine(pair)[0]


def examine(pair: Path) -> tuple[list[str], dict[str, QuantizedModel]]:
    """`check`'s findings, and the halves that it has read, `target` and (if it is a transformer) `draft`."""
    content = read_pair(pair, whole=True)
    manifest, halves = content.manifest, content.halves
    size = sum(entry.bytes for entry in manifest.files)
    findings = [f"{len(manifest.files)} files, {size / 1e6:.1f} MB: sizes and sha256 match {NAME}"]
    for name, model in halves.items():
        with _of_half(name):
            check_scales(pair / name)
            lint(model)
        counts = ", ".join(f"{n} x {scheme}" for scheme, n in scheme_counts(model).items())
        findings.append(f"{name}: {counts}; every number is usable")
    with _of_half("draft"):
        finding = kind_of(content.recipe.draft).check(pair / "draft", halves["target"])
    findings += [] if finding is None else [finding]
    findings += _compare_tokenizers(manifest, halves["target"], halves.get("draft"))
    return findings, halves


def read_pair(pair: Path, whole: bool = False) -> PairContent:
    """A pair from its folder: the one way in, for whoever checks, runs, serves or looks at it.

    Takes bounded time and memory, whatever the files say: sizes are compared with the manifest before a file is opened,
    texts are tried out in a process with limits, shapes are read before numbers. Codes are not read, and the halves'
    files are compared with their digests only if `whole`. Raises `IntegrityError` for what cannot be run.
    """
    manifest = read_manifest(pair)
    recipe = recipe_of(manifest)
    _check_files(pair, {entry.path: entry for entry in manifest.files}, whole)
    halves: dict[str, QuantizedModel] = {}
    for name, half in (("target", manifest.target), ("draft", manifest.draft)):
        if name == "draft" and recipe.draft.quantized is None:  # no transformer
            continue
        with _of_half(name):
            halves[name] = read(pair / name)
        if (counts := scheme_counts(halves[name])) != half.schemes:
            raise IntegrityError(f"{name}/config.json", f"has layers {counts}, {NAME} says {half.schemes}", _FETCH)
    with _of_half("draft"):
        kind_of(recipe.draft).require_fit(pair / "draft", halves["target"].arch)
    target, draft = halves["target"], halves.get("draft")
    if target.arch.vocab_size != manifest.tokenizer.target_vocab:
        raise IntegrityError("target/config.json", f"has another vocabulary than {NAME} says", _FETCH)
    if draft is not None:
        check_heads(target.arch, draft.arch)
    length, most = recipe.speculation.max_length or 0, target.arch.max_positions
    if length > most:
        raise IntegrityError(f"{NAME}: recipe: max_length {length}", f"the target knows {most} positions", _FETCH)
    return PairContent(manifest, recipe, halves)


@contextmanager
def _of_half(name: str) -> Iterator[None]:
    """Raise an error of a half as an error of the pair."""
    try:
        yield
    except QspecError as error:
        value = error.value if error.value.startswith(f"{name}: ") else f"{name}/: {error.value}"
        raise IntegrityError(value, error.rule, error.fix) from error


def recipe_of(manifest: Manifest) -> Recipe:
    """The manifest's recipe; raises `IntegrityError` unless it is valid and describes the halves in the manifest."""
    recipe = validate(Recipe, manifest.recipe, f"{NAME}: recipe", IntegrityError)
    if recipe.name != manifest.name:
        raise IntegrityError(f"{NAME}: name {short(manifest.name)}", f"but the recipe's is {recipe.name!r}", _FETCH)
    if recipe.draft.kind != manifest.draft.kind:
        rule = f"is listed, but the recipe says {recipe.draft.kind!r}"
        raise IntegrityError(f"{NAME}: draft kind {manifest.draft.kind!r}", rule, _FETCH)
    folders = (manifest.target.folder, manifest.draft.folder)
    if folders != ("target", recipe.draft.folder):
        raise IntegrityError(f"{NAME}: folders {folders}", "a pair's halves lie in target and draft", _FETCH)
    return recipe


def read_manifest(pair: Path) -> Manifest:
    """`pair.json`, intact; raises `IntegrityError`."""
    path, fix = pair / NAME, "give the folder that holds pair.json"
    if path.is_symlink() or not path.is_file():
        raise IntegrityError(str(path), "is missing", fix)
    return Manifest.parse(read_bytes(path, IntegrityError, fix))


def _check_files(pair: Path, listed: Mapping[str, FileEntry], whole: bool) -> None:
    """Compare names and sizes of the halves' files with the list; with `whole` those of all files, and digests."""
    sizes = {name: size for name, size in _sizes(pair).items() if whole or _in_half(name)}
    for name in sorted(sizes.keys() - listed.keys() - {NAME, *BESIDE}):
        if name.startswith(f"{REPORT}/"):  # a replaced report, or one that a killed process left
            continue
        raise IntegrityError(name, f"is not listed in {NAME}", "remove it from the pair")
    for name, entry in listed.items():
        if not (whole or _in_half(name)):
            continue
        if name not in sizes:
            raise IntegrityError(name, "is missing", _FETCH)
        if sizes[name] != entry.bytes:
            raise IntegrityError(name, f"has {sizes[name]} bytes instead of {entry.bytes}", _FETCH)
        if _in_half(name) and not name.endswith(".safetensors") and entry.bytes > MOST_BYTES:
            raise IntegrityError(name, f"is no weights and larger than {MOST_BYTES:,} bytes", _FETCH)
        if whole and sha256_file(pair / name) != entry.sha256:
            raise IntegrityError(name, "was changed: its sha256 differs", _FETCH)


def _in_half(name: str) -> bool:
    return name.startswith(("target/", "draft/"))


def _sizes(pair: Path) -> dict[str, int]:
    """Bytes of every file by its path; links are refused, because they lead out of the pair, and so are pipes."""
    sizes = {}
    for folder, folders, files in os.walk(pair):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            name, facts = path.relative_to(pair).as_posix(), path.lstat()
            if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
                kind = "a link" if stat.S_ISLNK(facts.st_mode) else "a pipe or a device"
                raise IntegrityError(name, f"is {kind}, a pair holds plain files", "copy the file into the pair")
            if stat.S_ISREG(facts.st_mode):
                sizes[name] = facts.st_size
    return sizes


def scheme_counts(model: QuantizedModel) -> dict[str, int]:
    """Linear layers by scheme name, `none` for those in float."""
    resolved = model.plan.resolve(model.arch.linears())
    return dict(Counter(scheme.name if scheme else "none" for scheme in resolved.values()))


def lint(model: QuantizedModel) -> None:
    """Scales finite and large enough, calibrated KV scales not left at 1, floats finite. Raises a `QspecError`."""
    for layer, linear in model.linears.items():
        lint_scale(f"{layer}.weight_scale", linear.weight.scale)
        if linear.input_scale is not None:
            lint_scale(f"{layer}.input_scale", linear.input_scale)
        if linear.weight.fmt.is_float and not bool(torch.isfinite(linear.weight.codes.float()).all()):
            raise IntegrityError(f"{layer}.weight", "holds NaN", _FETCH)
        if linear.outliers is not None:
            check_floats(f"{layer}.weight_outlier_values", linear.outliers.values)
        if linear.bias is not None:
            check_floats(f"{layer}.bias", linear.bias)
    for name, tensor in model.tensors.items():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            check_floats(name, tensor)
    kinds = (("k_scale", model.k_scale), ("v_scale", model.v_scale), ("q_scale", model.q_scale))
    for kind, scales in kinds:
        for layer, scale in scales.items():
            lint_scale(f"{layer}.{kind}", scale)
    kv = model.plan.kv
    if kv is None or not kv.calibrated:
        return
    for kind, scales in kinds:
        measured = [scale for layer, scale in scales.items() if layer_number(layer) not in kv.cast_layers]
        if measured and all(bool((scale == 1).all()) for scale in measured):
            rule = "are all 1.0, so they were never calibrated"
            raise IntegrityError(kind, rule, "calibrate, or scales: cast")


def _compare_tokenizers(manifest: Manifest, target: QuantizedModel, draft: QuantizedModel | None) -> list[str]:
    """Findings on the tokenizers of both halves, which must agree with the manifest and with one another."""
    recorded, findings = manifest.tokenizer, list[str]()
    if target.tokenizer.fingerprint() != recorded.fingerprint:
        raise IntegrityError("target/tokenizer.json", f"is not the tokenizer that {NAME} describes", _FETCH)
    if real_vocab(target.tokenizer) != recorded.real_vocab:
        raise IntegrityError("target/config.json", f"has another vocabulary than {NAME} says", _FETCH)
    if draft is not None:
        check_tokenizers(target.tokenizer, draft.tokenizer)
        if parts := differing_parts(target.tokenizer, draft.tokenizer):
            rule = "is not as the target's, which is used: expect fewer accepted tokens"
            findings.append(f"warning: the draft's tokenizer ({', '.join(parts)}) {rule}")
    real, rows = recorded.real_vocab, recorded.target_vocab
    return [*findings, f"tokenizer: {real} tokens in heads of {rows} rows, the same for both halves"]


_DECIDES = ("--kv-cache-dtype", "--speculative-config", "--quantization", "--dtype", "--hf-overrides")
"""Arguments of vLLM that change what a half computes, and with it how often its drafts are accepted."""


Subject = Literal["target", "draft", "pair"]
"""Subject of a measurement: the target alone, the draft's distributions beside the target's, or both halves at work."""
_ORIGIN = {"model", "revision", "base_model", "training"}
"""Fields about the origin of a half; a measurement is of its files, wherever they came from."""


def provenance(manifest: Manifest, recipe: Recipe, of: Subject, **facts: str) -> Provenance:
    """Where a measurement comes from: the files that were read, and the settings that decide what those compute.

    facts: of the environment, beside versions and machine.
    """
    settings: dict[str, Any] = {"target": recipe.target.model_dump(mode="json", exclude=_ORIGIN), "dtype": recipe.dtype}
    if of != "target":
        others = _ORIGIN | (USES if of == "draft" else set())
        settings["draft"] = recipe.draft.model_dump(mode="json", exclude=others)
    if of == "pair":
        speculation = recipe.speculation.model_dump(mode="json", exclude={"temperature"})  # the benchmark has its own
        settings |= {"speculation": speculation, "device": recipe.device}
    files = half_digests(manifest, ("target",) if of == "target" else ("target", "draft"))
    return Provenance(files=files, settings=settings, environment={**environment(), **facts})


def half_digests(manifest: Manifest, halves: Collection[str] = ("target", "draft")) -> dict[str, str]:
    """sha256 of every file of a pair's halves, by path."""
    return {entry.path: entry.sha256 for entry in manifest.files if entry.path.partition("/")[0] in halves}


def stale(manifest: Manifest, results: Results) -> list[str]:
    """Which measurements have to be made again, and why: halves or settings that changed since, each by its own."""
    names: dict[str, list[str]] = {}
    for name, part in results.parts():
        for reason in changes(part.provenance, manifest):
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(measured)}: {reason}" for reason, measured in names.items()]


def changes(measured: Provenance | None, manifest: Manifest) -> list[str]:
    """Files and settings of a pair that are not those of a measurement."""
    if measured is None:
        return ["nothing says which files were measured"]
    now = half_digests(manifest, {path.partition("/")[0] for path in measured.files})
    changed = [path for path in sorted(now.keys() | measured.files) if now.get(path) != measured.files.get(path)]
    settings = _differing(measured.settings, manifest.recipe)
    return [
        *(f"{path} is not the file that was measured" for path in changed),
        *(f"{setting} is not what was measured" for setting in settings),
    ]


def overridden(arguments: Sequence[str]) -> list[str]:
    """Arguments of the caller's own that make a served pair another one than was measured."""
    names = [argument.partition("=")[0] for argument in arguments]
    return [f"{name} is given by hand: what was measured does not hold for it" for name in names if name in _DECIDES]


def measured(pair: Path, manifest: Manifest) -> Results | None:
    """The results that a pair carries, None before anything was measured."""
    path = pair / (manifest.report or "") / "results.json"
    return Results.read(path) if manifest.report is not None and path.is_file() else None


def _differing(noted: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ from those noted with a measurement."""
    different: list[str] = []
    for key in sorted(noted):
        one, other = noted[key], now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            different += _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            different.append(prefix + key)
    return different
