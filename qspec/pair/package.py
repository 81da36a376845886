"""Write the pair: target and draft in one folder under one manifest, verified before it gets its name."""

from collections.abc import Iterator, Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import torch

from qspec.bridges import compressed
from qspec.bridges.companions import Companions, companions, copy, left_out_notes
from qspec.errors import IntegrityError, OutputError
from qspec.models.load import stored_dtype
from qspec.models.vocab import check_heads, check_tokenizers, real_vocab
from qspec.numerics.quantization.outliers import same_matrix
from qspec.pair.check import changes, check, examine, read_manifest, scheme_counts
from qspec.pair.drafters.registry import kind_of
from qspec.pair.exports import as_made, exports, vllm_command, vllm_speculative_config
from qspec.provenance import (
    add_version,
    atomic_write,
    drop_unnamed,
    environment,
    require_space,
    sha256_file,
    staged_dir,
)
from qspec.records import QuantizedModel
from qspec.schema.devices import read_device
from qspec.schema.manifest import NAME, REPORT, FileEntry, Half, Manifest, TokenizerInfo, Validity
from qspec.schema.recipe import Recipe
from qspec.schema.results import Provenance
from qspec.schemes.footprint import footprint

TARGET, DRAFT = "target", "draft"


_GUESSED = ("eagle-", "eagle3", "dflash", "dspark")  # vLLM takes a draft below such a path for that method


def package(
    target: QuantizedModel,
    draft: QuantizedModel | None,
    recipe: Recipe,
    out: Path,
    head: Path | None = None,
    warnings: Sequence[str] = (),
) -> Path:
    """Write `out/pair` and return it; it appears whole and verified, or not at all.

    `draft` None: a draft without weights (n-gram), or a speculator with a `head`, which is stored in INT8. warnings: of
    the plan, for whoever gets the pair. Raises `PairError` for halves that do not fit together, before anything is
    written, and `OutputError` for a folder that cannot take them.
    """
    pair = out / "pair"
    halves = {TARGET: target} if draft is None else {TARGET: target, DRAFT: draft}
    if draft is not None:
        check_tokenizers(target.tokenizer, draft.tokenizer)
        check_heads(target.arch, draft.arch)
        refuse_guessed(pair)
    require_space(out, sum(stored_bytes(model, stored_dtype(recipe, model)) for model in halves.values()))
    with staged_dir(pair) as part:
        for name, model in halves.items():
            compressed.write(model, part / name, stored_dtype(recipe, model))
        kind_of(recipe.draft).write(part / DRAFT, target, head)
        beside = Companions() if head is None else companions(head)
        copy(beside.files, part / DRAFT)
        manifest = _manifest(target, draft, recipe, part, left_out_notes(beside.left_out))
        (part / NAME).write_bytes(manifest.model_copy(update={"warnings": tuple(warnings)}).dump())
        _, read = examine(part)
        for name, model in halves.items():
            _verify(model, read[name], name)
    return pair


def seal(pair: Path, results: Mapping[str, Any], report: Path) -> None:
    """Add the report folder and the measurements of `results` (a `schema.results.Results` as plain data).

    The pair is the old one until its manifest is replaced, whatever happens. The halves keep the digests that they were
    packaged with: raises `IntegrityError` if a file changed since.
    """
    check(pair)
    results = json.loads(json.dumps(results), parse_constant=str)  # infinity by name, as in results.json
    manifest = read_manifest(pair)
    tidy(pair)
    version = add_version(pair / REPORT, report)
    kept = [entry for entry in manifest.files if not entry.path.startswith(f"{REPORT}/")]
    speed = results.get("speed") or {}
    proven = speed.get("equality") and _speaks_of(speed, manifest)
    sealed = manifest.model_copy(
        update={
            "measurements": tuple(_measurements({k: v for k, v in results.items() if k != "recipe"}, manifest)),
            "lossless": _proof(speed) if proven else None,
            "despite": results.get("despite", ""),
            "files": tuple(sorted([*kept, *_files(pair, version)], key=lambda entry: entry.path)),
        }
    )
    sealed = Manifest.model_validate(sealed.model_dump())
    atomic_write(pair / NAME, sealed.dump(), scratch=pair / REPORT)


def tidy(pair: Path) -> None:
    """Remove reports that the manifest does not list: of earlier measurements, or of a process that was killed."""
    drop_unnamed(pair / REPORT, {pair / entry.path for entry in read_manifest(pair).files})


def _proof(speed: Mapping[str, Any]) -> dict[str, Any]:
    """Findings on the pair's losslessness, the switches that would end it, and the files that were run."""
    files = (speed.get("provenance") or {}).get("files")
    evidence = {"equality": speed["equality"], "marginals": speed.get("marginals"), "seeded": speed.get("seeded")}
    return evidence | {"lossy_switches": SWITCHES, "files": files}


def stored_bytes(model: QuantizedModel, dtype: torch.dtype) -> int:
    """Size of the weights on disk."""
    schemes = model.plan.resolve(model.arch.linears())
    return footprint(model.arch, schemes, model.plan.kv, dtype.itemsize).resident


def refuse_guessed(pair: Path) -> None:
    """Raise `OutputError` for the folder of a pair with a draft model in which vLLM would see another kind of draft."""
    path = str(pair.absolute()).lower()
    for word in _GUESSED:
        if word in path:
            raise OutputError(
                str(pair), f"vLLM reads {word!r} in a path as a kind of draft", "choose another folder name"
            )


def _manifest(
    target: QuantizedModel, draft: QuantizedModel | None, recipe: Recipe, pair: Path, head_notes: Sequence[str]
) -> Manifest:
    made = as_made(recipe, target, draft)
    served = exports(made, read_device(recipe.device), target.arch)
    missing = [f"{part.part}: {part.detail}" for part in served if part.runtime == "vllm" and not part.served]
    return Manifest(
        name=recipe.name,
        target=_half("model", TARGET, target),
        draft=_draft_half(recipe, draft, head_notes),
        tokenizer=TokenizerInfo(
            fingerprint=target.tokenizer.fingerprint(),
            real_vocab=real_vocab(target.tokenizer),
            target_vocab=target.arch.vocab_size,
            draft_vocab=draft.arch.vocab_size if draft else None,
        ),
        served_by=served,
        exportable=not missing,
        reason="; ".join(missing),
        speculation=_speculation(made, target),
        vllm_speculative_config=vllm_speculative_config(made, DRAFT),
        validity=Validity(
            device=recipe.device,
            dtype=str(stored_dtype(recipe, target)).removeprefix("torch."),
            max_length=recipe.speculation.max_length or target.arch.max_positions,
        ),
        recipe=recipe.as_dict(),
        environment=environment(),
        files=_files(pair, pair),
    )


def _half(kind: str, folder: str, model: QuantizedModel) -> Half:
    return Half(
        kind=kind,
        folder=folder,
        source=dict(model.source),
        quantization=compressed.quantization_config(model),
        schemes=scheme_counts(model),
        notes=model.notes,
    )


def _draft_half(recipe: Recipe, draft: QuantizedModel | None, head_notes: Sequence[str]) -> Half:
    spec = recipe.draft
    if draft is not None:
        return _half(spec.kind, DRAFT, draft)
    origin = spec.source
    source = {} if origin is None else {"model": origin.model, "revision": origin.revision or ""}
    return Half(kind=spec.kind, folder=spec.folder, source=source, notes=tuple(head_notes))


def _speculation(recipe: Recipe, target: QuantizedModel) -> dict[str, Any]:
    """Draft length and sampling as the recipe says, a lookup's own settings, and the command that serves the pair."""
    command = vllm_command(recipe, kv=target.plan.kv, float32=stored_dtype(recipe, target) == torch.float32)
    settings = recipe.speculation.model_dump(mode="json") | {"vllm_command": command}
    own: dict[str, Any] = kind_of(recipe.draft).settings()
    return settings | own


def _files(pair: Path, folder: Path) -> tuple[FileEntry, ...]:
    """Entries of all files in a folder of the pair, the manifest left out."""
    paths = {path.relative_to(pair).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return tuple(
        FileEntry(path=name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for name, path in sorted(paths.items())
        if name != NAME
    )


def _verify(model: QuantizedModel, back: QuantizedModel, name: str) -> None:
    """Compare the codes and scales that a reader gets with those that were made; raises `IntegrityError`."""
    for layer, linear in model.linears.items():
        other = back.linears[layer]
        same = torch.equal(linear.weight.codes.view(torch.uint8), other.weight.codes.view(torch.uint8))
        same = same and same_matrix(linear.outliers, other.outliers)
        if not same or not torch.equal(linear.weight.scale, other.weight.scale):
            raise IntegrityError(f"{name}: {layer}", "reads back different from what was written", "check the disk")
    for kind in ("k_scale", "v_scale", "q_scale"):
        made, read = getattr(model, kind), getattr(back, kind)
        if made.keys() != read.keys() or not all(torch.equal(made[layer], read[layer]) for layer in made):
            raise IntegrityError(f"{name}: {kind}", "reads back different from what was written", "check the disk")
    ids = [None if half.head_ids is None else half.head_ids.tolist() for half in (model, back)]
    if ids[0] != ids[1] or back.plan.kv != model.plan.kv or back.tensors.keys() != model.tensors.keys():
        raise IntegrityError(name, "reads back different from what was written", "check the disk")


def _measurements(node: Any, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Every measurement of this pair anywhere in the results, in order."""
    if isinstance(node, Mapping) and _speaks_of(node, manifest):
        if {"metric", "value", "unit", "n"} <= node.keys():
            yield dict(node)
        for child in node.values():
            yield from _measurements(child, manifest)
    elif isinstance(node, list):
        for child in node:
            yield from _measurements(child, manifest)


def _speaks_of(part: Mapping[str, Any], manifest: Manifest) -> bool:
    """Whether a part of the results was measured on the pair as it is now, as far as its provenance says."""
    noted = part.get("provenance")
    return noted is None or not changes(Provenance.model_validate(noted), manifest)


SWITCHES = {
    "tokens accepted by a threshold instead of the rejection rule (typical acceptance)": False,
    "distributions of draft and target mixed (ensembles)": False,
    "acceptance by a given rate (synthetic)": False,
    "another temperature, top-k or top-p for verification than for plain decoding": False,
}
"""Methods that would make speculation lossy, and whether the engine uses them: it has no option for any of them."""
