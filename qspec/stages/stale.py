"""What of a pair's measurements no longer speaks of the pair as it is, or as it is about to be served."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qspec.schema.manifest import Manifest
from qspec.schema.results import Results

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
