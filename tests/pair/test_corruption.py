"""Pairs that were damaged, by accident or by somebody who knows the format: found, or harmless, and never a crash.

QSPEC_LONG=1 tries a thousand forgeries instead of a few.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
import json
import os
from pathlib import Path
import random
import shutil
import signal
from typing import Any

import pytest
import torch

from qspec import limited
from qspec.bridges.heads import speculator
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import QspecError
from qspec.models.layers import truncate_layers
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, swap_linears
from qspec.pair.check import check, read_manifest
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.provenance import sha256_file
from qspec.quantization.rtn import quantize
from qspec.schema.manifest import NAME, FileEntry, Manifest
from qspec.schema.quantization import KVSpec, OutlierSpec, QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.pair.test_eagle3_kind import write_head
from tests.pairs import halves, recipe
from tests.tiny import tiny_model

ACCIDENTS, FORGERIES = 60, 1000 if os.environ.get("QSPEC_LONG") == "1" else 40
PATIENCE = 60
"""Seconds after which an answer counts as none."""
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 7, 300, 4096, 2**31 - 1, 2**31, 2**40, 2**70),
    *(1e308, -0.5, 1e-46, 3e38, float("nan"), float("inf")),
    *("", "../../x", "W8A8", "int8", "é\x00", "re:(.*)*(.*)*(.*)*(.*)*x", "re:(", "{{ messages }}"),
    *([], [[]], [0], [7, 3], [-1], {}, {"a": 1}),
)
TEMPLATES = ("content|upper", "content * 3", "content.x.y", "content|list", "role", "content|reverse|first")
FLOATS = (float("nan"), float("inf"), 0.0, -1.0, 3e38, 1e-46, 1e6, 65504.0)
TYPES = (torch.int64, torch.float32, torch.uint8, torch.bool, torch.float64)
STRANGERS = ("bias", "weight_scale", "weight_outlier_indptr", "k_scale", "weight_g_idx", "weight_zero_point")
Change = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return package(*halves(folder / "source"), recipe(), folder)


@pytest.fixture(scope="module")
def pairs(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pairs that together hold every kind of tensor that indexes or scales something."""
    folder = tmp_path_factory.mktemp("kinds")
    model, stats = load(tiny_model("qwen3_moe", folder / "moe")), observe(folder / "moe")
    kv = KVSpec(format="int8", granularity="token_head")
    sparse = QuantSpec(scheme="W8A8", outliers=OutlierSpec(share=1.0), kv=kv)
    grouped = QuantSpec(scheme="W4A16", group_size=32, symmetric=False)
    target = quantize(model, stats, build_plan(sparse))
    draft = quantize(truncate_layers(model, 1), stats, build_plan(grouped))
    draft = replace(draft, head_ids=torch.arange(5, 300, 3))
    own = {"kind": "self", "layers": 1, "draft_vocab": 99, "quantization": grouped.model_dump(mode="json")}
    ids_D = torch.arange(5, 300, 5)
    head = MLPSpeculator(SpeculatorShape(64, 300, 2, 32, draft_vocab=len(ids_D)), ids_D)
    initialize(head, torch.Generator().manual_seed(0))
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    speculator.write(head, folder / "head")
    whole = halves(folder / "llama")[0]
    write_head(whole, folder / "eagle", draft_vocab=99)
    eagle = {"kind": "eagle3", "model": "eagle"}
    heads = {"kind": "mlp_speculator", "model": "head", "n_predict": 2, "inner_dim": 32, "draft_vocab": len(ids_D)}
    return [
        pair,
        package(target, draft, _recipe(own, quantization=sparse.model_dump(mode="json")), folder / "mixed"),
        package(whole, None, _recipe(heads), folder / "heads", folder / "head"),
        package(whole, None, _recipe(eagle), folder / "eagles", folder / "eagle"),
    ]


def _recipe(draft: dict[str, Any], **target: Any) -> Recipe:
    made = recipe().as_dict()
    return Recipe.model_validate({**made, "draft": draft, "target": made["target"] | target})


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


def _forge_header(raw: bytes, dice: random.Random) -> bytes:
    """The header of a safetensors file says something else."""
    size = int.from_bytes(raw[:8], "little")
    header = _forge_json(raw[8 : 8 + size], dice)
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


def _forge_tensor(path: Path, dice: random.Random) -> None:
    """One tensor has another number, order, shape or type, or a stranger beside it; every kind is as likely."""
    tensors = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
    kind = dice.choice(sorted({name.rpartition(".")[2] for name in tensors}))
    name = dice.choice([name for name in tensors if name.rpartition(".")[2] == kind])
    tensor = tensors[name]
    match dice.randrange(8):
        case 0 | 1 | 2 if tensor.element_size() > 1 and tensor.numel():
            value = dice.choice(FLOATS)
            if not tensor.is_floating_point():
                limits = torch.iinfo(tensor.dtype)
                value = dice.choice([-1, 0, min(tensor.numel(), limits.max), limits.max, limits.min])
            tensor.view(-1)[dice.randrange(tensor.numel())] = value
        case 3:
            order = list(range(tensor.numel()))
            dice.shuffle(order)
            tensors[name] = tensor.flatten()[order].view(tensor.shape)
        case 4:
            tensors[name] = tensor[: dice.choice([0, -1])] if tensor.dim() else tensor.view(1)
        case 5:
            tensors[name] = torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)
        case 6:
            tensors[name] = tensor.to(dice.choice(TYPES))
        case _:
            tensors[f"{name.rpartition('.')[0]}.{dice.choice(STRANGERS)}"] = torch.ones(dice.choice([1, 3, 64]))
    write_tensors(path, tensors)


def _forge(copy: Path, dice: random.Random) -> None:
    """Change something and make every digest right again, as somebody who knows the format can."""
    path = dice.choice([p for p in sorted(copy.rglob("*")) if p.suffix in (".json", ".safetensors", ".jinja")])
    if path.name == NAME:
        data = json.loads(_forge_json(path.read_bytes(), dice))
        data.pop("digest", None)
        try:
            path.write_bytes(Manifest.model_validate(data).dump())
        except ValueError:
            path.write_bytes(json.dumps(data).encode())
        return
    if path.suffix == ".safetensors" and dice.random() < 0.7:
        _forge_tensor(path, dice)
    elif path.suffix == ".safetensors":
        path.write_bytes(_forge_header(path.read_bytes(), dice))
    elif path.suffix == ".jinja":
        path.write_text(path.read_text(encoding="utf-8").replace("content", dice.choice(TEMPLATES)), encoding="utf-8")
    else:
        path.write_bytes(_forge_json(path.read_bytes(), dice))
    _sealed(path)


def _sealed(path: Path) -> None:
    """Put size and digest of a half's file into the manifest."""
    copy = path.parents[1]
    manifest, name = read_manifest(copy), path.relative_to(copy).as_posix()
    entry = FileEntry(path=name, bytes=path.stat().st_size, sha256=sha256_file(path))
    files = tuple(entry if old.path == name else old for old in manifest.files)
    (copy / NAME).write_bytes(manifest.model_copy(update={"files": files}).dump())


def _rewritten(path: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    """Change one tensor of a half and make the digests of its pair right again."""
    tensors = {key: tensor.clone() for key, tensor in read_tensors(path).items()}
    write_tensors(path, tensors | {name: change(tensors[name])})
    _sealed(path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda ids: -torch.arange(len(ids)).int() - 1, "reaches from -59 to -1"),
        (lambda ids: ids.index_fill(0, torch.tensor([len(ids) - 1]), 60_000), "reaches from 5 to 60000"),
        (lambda ids: ids.index_fill(0, torch.tensor([1]), 5), "must rise"),
        (lambda ids: ids.flip(0), "must rise"),
    ],
    ids=["negative", "beyond", "twice", "in another order"],
)
def test_ids_of_a_head_index_its_rows(pairs: list[Path], tmp_path: Path, change: Any, part: str) -> None:
    """Would catch drafts that end the process, or of which none is ever accepted, in a pair that counts as intact."""
    copy = Path(shutil.copytree(pairs[2], tmp_path / "pair"))
    _rewritten(copy / "draft" / "model.safetensors", change, "speculator.ids")
    for use in (check, open_pair):
        assert part in _refusal(use, copy)


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Whatever takes longer is a failure."""

    def end(*_: object) -> None:
        pytest.fail(f"no answer within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _refusal(use: Callable[[Path], Any], pair: Path) -> str:
    """The message of our own error; empty where there was none."""
    try:
        use(pair)
    except QspecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(FORGERIES))
def test_forgeries_are_refused_or_harmless(
    pairs: list[Path], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a crash deep in a library, a file outside of the pair, a loop without end: in `check`, `generate`."""
    monkeypatch.setattr(limited, "SECONDS", 2)
    dice, copy = random.Random(seed), tmp_path / "pair"
    shutil.copytree(dice.choice(pairs), copy)
    _forge(copy, dice)
    for use in (check, lambda pair: open_pair(pair).generate("ab", max_new_tokens=4, temperature=seed % 2)):
        with _within(PATIENCE):
            refusal = _refusal(use, copy)
        assert "\n" not in refusal
        assert len(refusal) < 1000
