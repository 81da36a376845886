"""Pairs that were damaged, by accident or by somebody who knows the format: found, or harmless, and never a crash."""

from collections.abc import Callable
from contextlib import suppress
import json
from pathlib import Path
import random
import shutil
from typing import Any

import pytest

from qspec.errors import QspecError
from qspec.pair.check import check, read_manifest
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.provenance import sha256_file
from qspec.schema.manifest import NAME, FileEntry, Manifest
from tests.pairs import halves, recipe

ACCIDENTS, FORGERIES = 60, 240
STRANGE: list[Any] = [None, True, -1, 0, 1, 7, 2**31, 2**70, 1e308, -0.5, "", "../../x", "W8A8", "é\x00", [], [[]], {}]
Change = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return package(*halves(folder / "source"), recipe(), folder)


def _flip(raw: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << dice.randrange(8))]) + raw[at + 1 :]


def _cut(raw: bytes, dice: random.Random) -> bytes:
    return raw[: dice.randrange(len(raw))]


def _repeat(raw: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(raw))
    return raw[:at] + raw[at : at + 1 + dice.randrange(64)] + raw[at:]


@pytest.mark.parametrize("seed", range(ACCIDENTS))
def test_accidents_are_found(pair: Path, tmp_path: Path, seed: int) -> None:
    """Would catch any file whose damage nobody looks at."""
    dice, copy = random.Random(seed), tmp_path / "pair"
    shutil.copytree(pair, copy)
    path = dice.choice(sorted(p for p in copy.rglob("*") if p.is_file()))
    raw, change = path.read_bytes(), dice.choice([_flip, _cut, _repeat])
    path.write_bytes(change(raw, dice))
    if path.read_bytes() == raw:
        return
    with pytest.raises(QspecError):
        check(copy)


def _forge_json(raw: bytes, dice: random.Random) -> bytes:
    """One value somewhere inside is another one, or gone."""
    data = json.loads(raw)
    node: Any = data
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return raw
        key = dice.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or dice.random() < 0.2:
            break
        node = node[key]
    if dice.random() < 0.2:
        del node[key]
    else:
        node[key] = dice.choice(STRANGE)
    return json.dumps(data).encode()


def _forge_tensors(raw: bytes, dice: random.Random) -> bytes:
    """The header of a safetensors file says something else, or the numbers behind it are others."""
    size = int.from_bytes(raw[:8], "little")
    if dice.random() < 0.6:
        header = _forge_json(raw[8 : 8 + size], dice)
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]
    at = 8 + size + dice.randrange(len(raw) - 8 - size)
    return raw[:at] + bytes(dice.randrange(256) for _ in range(8)) + raw[at + 8 :]


def _forge(copy: Path, dice: random.Random) -> None:
    """Change something and make every digest right again, as somebody who knows the format can."""
    manifest = read_manifest(copy)
    names = [p for p in sorted(copy.rglob("*")) if p.suffix in (".json", ".safetensors")]
    path = dice.choice(names)
    if path.name == NAME:
        data = json.loads(_forge_json(path.read_bytes(), dice))
        data.pop("digest", None)
        try:
            path.write_bytes(Manifest.model_validate(data).dump())
        except ValueError:
            path.write_bytes(json.dumps(data).encode())
        return
    change = _forge_tensors if path.suffix == ".safetensors" else _forge_json
    path.write_bytes(change(path.read_bytes(), dice))
    name = path.relative_to(copy).as_posix()
    entry = FileEntry(path=name, bytes=path.stat().st_size, sha256=sha256_file(path))
    files = tuple(entry if old.path == name else old for old in manifest.files)
    (copy / NAME).write_bytes(manifest.model_copy(update={"files": files}).dump())


@pytest.mark.parametrize("seed", range(FORGERIES))
def test_forgeries_are_refused_or_harmless(pair: Path, tmp_path: Path, seed: int) -> None:
    """Would catch a crash deep in a library, a file outside of the pair, or a loop without end."""
    dice, copy = random.Random(seed), tmp_path / "pair"
    shutil.copytree(pair, copy)
    _forge(copy, dice)
    with suppress(QspecError):
        check(copy)
        open_pair(copy).generate("ab", max_new_tokens=2)
