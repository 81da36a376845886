"""Is a pair what its manifest says, and do its halves belong together? Nothing is run, nothing is changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qspec.bridges.compressed import lint_scale, read
from qspec.errors import IntegrityError, QspecError
from qspec.models.vocab import check_heads, check_tokenizers, differing_parts, real_vocab
from qspec.pair.drafters.registry import kind_of
from qspec.provenance import sha256_file
from qspec.records import QuantizedModel, layer_number
from qspec.schema.manifest import NAME, FileEntry, Half, Manifest
from qspec.schema.problems import short, validate
from qspec.schema.recipe import Recipe
from qspec.schema.results import Results

_FETCH = "package the pair again, or fetch an intact copy"


def check(pair: Path) -> list[str]:
    """What was found in order, a sentence each. Raises `IntegrityError` naming the first file that is not.

    Looks at the manifest's own digest, at every file (path, size, sha256; none missing, none extra, no links), at
    every scale and float tensor, and at tokenizer and vocabulary of both halves.
    """
    return examine(pair)[0]


def examine(pair: Path) -> tuple[list[str], dict[str, QuantizedModel]]:
    """`check`'s findings, and the halves that it has read, `target` and (if it has weights) `draft`."""
    manifest = read_manifest(pair)
    recipe = _check_recipe(manifest)
    _check_files(pair, {entry.path: entry for entry in manifest.files})
    size = sum(entry.bytes for entry in manifest.files)
    findings = [f"{len(manifest.files)} files, {size / 1e6:.1f} MB: sizes and sha256 match {NAME}"]
    halves: dict[str, QuantizedModel] = {}
    for name, half in (("target", manifest.target), ("draft", manifest.draft)):
        if name == "draft" and (found := kind_of(recipe.draft).check(pair / "draft", halves["target"])) is not None:
            findings.append(found)
        elif half.folder is not None:
            halves[name] = _check_half(pair / half.folder, half, findings)
    _check_vocabulary(manifest, halves["target"], halves.get("draft"), findings)
    length, most = recipe.speculation.max_length or 0, halves["target"].arch.max_positions
    if length > most:
        raise IntegrityError(f"{NAME}: recipe: max_length {length}", f"the target knows {most} positions", _FETCH)
    results = measured(pair)
    findings += [f"stale, measure again: {reason}" for reason in (stale(manifest, results) if results else ())]
    return findings, halves


def _check_recipe(manifest: Manifest) -> Recipe:
    """The recipe, if it is one and tells of the halves that the manifest lists."""
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
    path = pair / NAME
    if path.is_symlink() or not path.is_file():
        raise IntegrityError(str(path), "is missing", "give the folder that holds pair.json")
    return Manifest.parse(path.read_bytes())


def weight_digests(manifest: Manifest) -> dict[str, str]:
    """sha256 of both halves' weights, by path: what measurements are of."""
    return {f"pair/{entry.path}": entry.sha256 for entry in manifest.files if entry.path.endswith("safetensors")}


def _check_files(pair: Path, listed: Mapping[str, FileEntry]) -> None:
    found = {name: path for name, path in _entries(pair) if _is_content(name, path)}
    for name in sorted(found.keys() - listed.keys() - {NAME}):
        raise IntegrityError(name, f"is not listed in {NAME}", "remove it from the pair")
    for name, entry in listed.items():
        if name not in found:
            raise IntegrityError(name, "is missing", _FETCH)
        size = found[name].stat().st_size
        if size != entry.bytes:
            raise IntegrityError(name, f"has {size} bytes instead of {entry.bytes}", _FETCH)
        if sha256_file(found[name]) != entry.sha256:
            raise IntegrityError(name, "was changed: its sha256 differs", _FETCH)


def _entries(pair: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(pair).as_posix(), path) for path in sorted(pair.rglob("*"))]


def _is_content(name: str, path: Path) -> bool:
    """Whether an entry is a file; links are refused, because they lead out of the pair."""
    if path.is_symlink():
        raise IntegrityError(name, "is a link, a pair holds plain files", "copy the file into the pair")
    return not path.is_dir()


def _check_half(folder: Path, half: Half, findings: list[str]) -> QuantizedModel:
    """Read one half and look at every number in it."""
    try:
        model = read(folder)
        lint(model)
    except IntegrityError:
        raise
    except QspecError as error:
        raise IntegrityError(f"{half.folder}/: {error.value}", error.rule, error.fix) from error
    counts = scheme_counts(model)
    if counts != half.schemes:
        raise IntegrityError(f"{half.folder}/config.json", f"has layers {counts}, {NAME} says {half.schemes}", _FETCH)
    findings.append(
        f"{half.folder}: {', '.join(f'{n} x {scheme}' for scheme, n in counts.items())}; every number is usable"
    )
    return model


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
        if linear.outliers is not None and not bool(torch.isfinite(linear.outliers.values).all()):
            raise IntegrityError(f"{layer}.weight_outlier_values", "holds NaN or infinity", _FETCH)
    for name, tensor in model.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(name, "holds NaN or infinity", "use an intact checkpoint of the model")
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


def _check_vocabulary(
    manifest: Manifest, target: QuantizedModel, draft: QuantizedModel | None, findings: list[str]
) -> None:
    said = manifest.tokenizer
    if target.tokenizer.fingerprint() != said.fingerprint:
        raise IntegrityError("target/tokenizer.json", f"is not the tokenizer that {NAME} describes", _FETCH)
    if target.arch.vocab_size != said.target_vocab or real_vocab(target.tokenizer) != said.real_vocab:
        raise IntegrityError("target/config.json", f"has another vocabulary than {NAME} says", _FETCH)
    if draft is not None:
        check_tokenizers(target.tokenizer, draft.tokenizer)
        check_heads(target.arch, draft.arch)
        if parts := differing_parts(target.tokenizer, draft.tokenizer):
            rule = "is not as the target's, which is used: expect fewer accepted tokens"
            findings.append(f"warning: the draft's tokenizer ({', '.join(parts)}) {rule}")
    findings.append(
        f"tokenizer: {said.real_vocab} tokens in heads of {said.target_vocab} rows, the same for both halves"
    )


_DECIDES = ("--kv-cache-dtype", "--speculative-config", "--quantization", "--dtype", "--hf-overrides")
"""Arguments of vLLM that change what a half computes, and with it how often its drafts are accepted."""


def stale(manifest: Manifest, results: Results) -> list[str]:
    """Why acceptance, proof and accuracy have to be measured again: halves or settings that changed since."""
    now = {f"pair/{entry.path}": entry.sha256 for entry in manifest.files}
    changed = [path for path, digest in results.digests.items() if now.get(path) != digest]
    found = [f"{path.removeprefix('pair/')} is not the file that was measured" for path in changed]
    for half in ("target", "draft"):
        for field in _differing(results.recipe.get(half) or {}, manifest.recipe.get(half) or {}):
            found.append(f"{half}.{field} is not what was measured")
    return found


def overridden(arguments: Sequence[str]) -> list[str]:
    """Arguments of the caller's own that make a served pair another one than was measured."""
    names = [argument.partition("=")[0] for argument in arguments]
    return [f"{name} is given by hand: what was measured does not hold for it" for name in names if name in _DECIDES]


def measured(pair: Path) -> Results | None:
    """The results that a pair carries."""
    path = pair / "report" / "results.json"
    return Results.read(path) if path.is_file() else None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted(a.keys() | b.keys()):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(prefix + key)
    return found
