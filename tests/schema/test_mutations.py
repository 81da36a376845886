"""Manifests, recipes and results in which anything is something else: refused with our error, or harmless.

Harmless: what is read writes itself back as it was read. Never a crash of a library, and never a silent change.
"""

from collections.abc import Iterator
import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st
import pytest

from qspec.errors import IntegrityError, RecipeError
from qspec.schema.manifest import FileEntry, Half, Manifest, Served, TokenizerInfo, Validity
from qspec.schema.recipe import Recipe
from qspec.schema.results import Results
from qspec.schema.text import dump_yaml
from tests.example_results import example

ROOT = Path(__file__).resolve().parents[2]
SHA = "0" * 64
Node = dict[str, Any]

DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 2**70, 10**400, -0.0, 0.5, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "no", "1e5", "0x10", "2026-01-01", "..", "../../x", "/etc/passwd", "a/../b", "C:\\x", "~/x"),
    *("a\0b", "a\nb", "\x1b[2Jx", "\u202ex", "\ud800", "é", "e\u0301", "\ufeff", "--trust-remote-code", "a" * 70_000),
    *([], [[]], {}, [None], {"": {}}, {"kind": "self"}, ["re:("], DEEP),
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
strange = st.sampled_from(STRANGE) | plain


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of every value in plain data, containers too."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def put(data: Any, path: tuple[str | int, ...], change: str, value: Any) -> Any:
    """A copy in which the value at `path` is another, gone, there under another name, or there twice."""
    data = copy.deepcopy(data)
    node = data
    for key in path[:-1]:
        node = node[key]
    key = path[-1]
    if change == "replace":
        node[key] = value
    elif change == "drop":
        del node[key]
    elif isinstance(node, list):
        node.insert(int(key), node[int(key)])
    else:
        node[f"{key}_"] = node[key]
    return data


changes = st.sampled_from(("replace", "replace", "replace", "drop", "again"))


def a_manifest() -> Manifest:
    entries = [FileEntry(path=path, bytes=2, sha256=SHA) for path in ("draft/config.json", "target/config.json")]
    return Manifest(
        name="pair",
        target=Half(kind="model", folder="target", source={"model": "org/m"}, schemes={"W8A8": 7}, notes=("a",)),
        draft=Half(kind="self", folder="draft", quantization={"format": "int-quantized", "groups": [1, 2.5]}),
        tokenizer=TokenizerInfo(fingerprint="ab", real_vocab=500, target_vocab=512, draft_vocab=512),
        served_by=(Served(runtime="vllm", part="kv", served=False, detail="serve flag"),),
        validity=Validity(device="cpu", dtype="float32", max_length=64),
        recipe={"name": "pair", "seed": 0, "budget": {"max_kl": 1e-05}},
        vllm_speculative_config={"method": "draft_model", "num_speculative_tokens": 3},
        measurements=({"metric": "kl", "value": 0.1, "n": 3},),
        lossless={"equality": [{"n": 3}]},
        files=tuple(entries),
    )


def sealed(data: Node, indent: int | None = 2) -> bytes:
    """`pair.json` of this data with the digest that belongs to it, as somebody who knows the format writes it."""

    def text(body: Node) -> bytes:
        return (
            json.dumps(body, indent=indent, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        )

    body = {key: value for key, value in data.items() if key != "digest"}
    return text(body | {"digest": hashlib.sha256(text(body)).hexdigest()})


def short_lines(message: str, most: int = 1) -> None:
    lines = message.split("\n")
    assert 1 <= len(lines) <= most
    assert all(0 < len(line) < 2000 for line in lines)


def refused_or_same(raw: bytes) -> None:
    try:
        read = Manifest.parse(raw)
    except IntegrityError as error:
        short_lines(str(error))
        return
    assert read.dump() == raw
    for entry in read.files:
        assert entry.path.isprintable()
        assert not Path(entry.path).is_absolute()
        assert ".." not in Path(entry.path).parts


MANIFEST = json.loads(a_manifest().dump())
MANIFEST_PLACES = [path for path in places(MANIFEST) if path != ("digest",)]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:24])
def test_every_field_of_a_manifest_with_every_strange_value(value: Any) -> None:
    """Would catch a type, size, path or number of one field that ends in a library's traceback, or is let in."""
    for path in MANIFEST_PLACES:
        refused_or_same(sealed(put(MANIFEST, path, "replace", value)))


@settings(max_examples=300)
@given(data=st.data())
def test_manifests_with_several_changes(data: st.DataObject) -> None:
    """Would catch changes that hide each other, fields that are missing or have a neighbour of a similar name."""
    body = MANIFEST
    for _ in range(data.draw(st.integers(1, 3))):
        found = [path for path in places(body) if path != ("digest",)]
        body = put(body, data.draw(st.sampled_from(found)), data.draw(changes), data.draw(strange))
        if not isinstance(body, dict) or not body:
            return
    refused_or_same(sealed(body, data.draw(st.sampled_from((2, 2, None, 4)))))


@settings(max_examples=300)
@given(at=st.integers(0, 10**6), cut=st.integers(0, 40), piece=st.binary(max_size=6) | st.just(b'"name": "x",\n  '))
def test_bytes_of_a_manifest(at: int, cut: int, piece: bytes) -> None:
    """Would catch a key that is given twice, bytes that are no UTF-8, and white space that nobody looks at."""
    raw = a_manifest().dump()
    at %= len(raw)
    changed = raw[:at] + piece + raw[at + cut :]
    if changed != raw:
        with pytest.raises(IntegrityError):
            Manifest.parse(changed)


@given(
    name=texts,
    notes=st.lists(texts, max_size=2),
    quantization=st.none() | st.dictionaries(texts, plain, max_size=3),
    recipe=st.dictionaries(texts, plain, max_size=4),
    measurements=st.lists(st.dictionaries(texts, plain, max_size=3), max_size=2),
    environment=st.dictionaries(texts, texts, max_size=3),
)
@settings(max_examples=200)
def test_manifests_read_back_equal(
    name: str, notes: list[str], quantization: Node | None, recipe: Node, measurements: list[Node], environment: Node
) -> None:
    """Would catch a number, a character or an order of keys that a manifest of ours does not survive."""
    fields = a_manifest().model_dump()
    fields["target"] |= {"notes": tuple(notes), "quantization": quantization}
    fields |= {"name": name, "recipe": recipe, "measurements": tuple(measurements), "environment": environment}
    made = Manifest.model_validate(fields)
    assert Manifest.parse(made.dump()) == made


def refused_or_round(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        recipe = Recipe.read(path)
    except RecipeError as error:
        short_lines(str(error), most=40)  # one for each problem
        return
    path.write_text(recipe.dump(), encoding="utf-8")
    assert Recipe.read(path) == recipe


RECIPES = [
    Recipe.read(ROOT / f"recipes/{name}.yaml").as_dict()
    for name in ("smollm2-135m-int8-cpu", "smollm2-135m-mlp-cpu", "smollm2-135m-tune-cpu", "llama-3-8b-fp8-kv8-rtx4090")
]


def as_yaml(data: Any) -> str:
    """YAML as a person might write it: lone surrogates, which no dumper takes, come as bytes that are no UTF-8."""
    return dump_yaml(json.loads(json.dumps(data).replace("\\ud800", "SURROGATE"))).replace("SURROGATE", "\ud800")


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:24])
def test_fields_of_recipes_with_every_strange_value(tmp_path: Path, value: Any) -> None:
    """Would catch a field of a recipe that takes what it cannot mean, or that falls over it."""
    for n, recipe in enumerate(RECIPES):
        found = list(places(recipe))
        for path in found[(STRANGE.index(value) * 7 + n) % 9 :: 9]:  # each place with several values, all in time
            refused_or_validated(put(recipe, path, "replace", value))


def refused_or_validated(data: Any) -> None:
    """As `refused_or_round` behind the YAML, which is slow."""
    try:
        recipe = Recipe.of(data, (), "r")
    except RecipeError as error:
        short_lines(str(error), most=40)  # one for each problem
        return
    assert Recipe.of(recipe.as_dict(), (), "r") == recipe


@settings(max_examples=60)
@given(data=st.data())
def test_recipes_with_several_changes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Would catch a change that only YAML brings about, or that another one hides."""
    body = data.draw(st.sampled_from(RECIPES))
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(body))
        body = put(body, data.draw(st.sampled_from(found)), data.draw(changes), data.draw(strange))
    refused_or_round(tmp_path_factory.mktemp("mutated") / "r.yaml", as_yaml(body))


@settings(max_examples=60)
@given(
    at=st.integers(0, 10**6), cut=st.integers(0, 12), piece=st.text(max_size=6) | st.sampled_from(list("{}[]&*!|>%@`"))
)
def test_characters_of_a_recipe(tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, piece: str) -> None:
    """Would catch a slip of the finger that YAML's reader answers with a traceback."""
    text = (ROOT / "recipes/smollm2-135m-int8-cpu.yaml").read_text(encoding="utf-8")
    at %= len(text)
    refused_or_round(tmp_path_factory.mktemp("slip") / "r.yaml", text[:at] + piece + text[at + cut :])


@settings(max_examples=300)
@given(data=st.data())
def test_results_with_several_changes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Would catch results in a fetched pair that stop `check` or `publish` with a traceback."""
    body = json.loads(example().dump())
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(body))
        body = put(body, data.draw(st.sampled_from(found)), data.draw(changes), data.draw(strange))
    path = tmp_path_factory.mktemp("results") / "results.json"
    path.write_bytes(json.dumps(body).encode())
    try:
        results = Results.read(path)
    except IntegrityError as error:
        short_lines(str(error))
        return
    path.write_text(results.dump(), encoding="utf-8")
    assert Results.read(path).dump() == results.dump()
