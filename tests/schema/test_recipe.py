"""Recipes: read, refused in one line that helps, written back unchanged."""

from pathlib import Path
from typing import get_args

from hypothesis import given, strategies as st
import pytest
import yaml

from qspec.errors import RecipeError
from qspec.schema.devices import read_devices
from qspec.schema.drafts import ModelDraft, NgramDraft, SelfDraft, SuffixDraft
from qspec.schema.quantization import ClipSpec, KVSpec, ModelSpec, QuantSpec, RuleSpec, SmoothingSpec
from qspec.schema.recipe import CalibrationSpec, DataSpec, Device, DraftLengthSpec, Recipe, SpeculationSpec

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = "name: t\ntarget: {model: org/m}\ndraft: {kind: self}\n"


def refusal(folder: Path, text: str = SMALL, *overrides: str) -> str:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        Recipe.read(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_read_and_carry_their_file_name(path: Path):
    """Would catch a recipe in the folder that no longer parses, or that runs under another name."""
    assert Recipe.read(path).name == path.stem


def test_there_are_recipes():
    """Would catch the parametrised tests above passing because the folder moved."""
    assert "smollm2-135m-int8-cpu" in {path.stem for path in RECIPES}


def test_every_device_name_has_a_data_sheet():
    """Would catch a device that recipes accept and nobody has figures for, or the reverse."""
    assert set(get_args(Device)) == set(read_devices())


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "target.quantization.sheme=FP8",
            ["target.quantization.sheme", "not a field", "did you mean 'scheme'", "clip"],
        ),
        ("target.quantization.scheme=W8A7", ["target.quantization.scheme 'W8A7'", "did you mean 'W8A8'"]),
        ("draft={kind: slef}", ["draft.kind 'slef'", "did you mean 'self'"]),
        ("draft={model: x}", ["draft.kind", "is required"]),
        ("draft={kind: model, model: 3}", ["draft.model 3", "must be a string", "quotes"]),
        ("draft={kind: model, model: m, quantization: {sheme: FP8}}", ["draft.quantization.sheme", "'scheme'"]),
        ("draft={kind: ngram, min_ngram: 4}", ["draft", "min_ngram 4 is above max_ngram 3", "swap"]),
        ("calibration.samples=1.5", ["calibration.samples 1.5", "must be an integer", "whole number"]),
        ("calibration.samples=true", ["calibration.samples True", "must be an integer"]),
        ("calibration.samples=0", ["calibration.samples 0", "greater than or equal to 1", "larger"]),
        ("calibration.data=gutenberg", ["calibration.data 'gutenberg'", "must be a list"]),
        ("calibration.data=[]", ["calibration.data []", "at least 1 item; give at least one"]),
        ("target.quantization.mixed={bits: 6, candidates: [FP8]}", ["at least 2 items; give at least two"]),
        ("calibration.data=[{name: a, weight: 0}]", ["calibration.data[0].weight 0", "give a larger number"]),
        ("calibration.samples=1" + 30 * "0", ["calibration.samples", "less than or equal to 1000000"]),
        ("benchmark.per_category=1" + 30 * "0", ["benchmark.per_category", "less than or equal to 1000000"]),
        ("benchmark.categories=[]", ["benchmark.categories []", "at least 1 item"]),
        ("evaluation.tasks=[{subjects: []}]", ["evaluation.tasks[0].subjects []", "at least 1 item"]),
        ("draft={kind: ngram, max_ngram: 1" + 30 * "0" + "}", ["draft.max_ngram", "less than or equal to 64"]),
        ("draft={kind: mlp_speculator, model: m, n_predict: 100}", ["draft.n_predict 100", "equal to 64"]),
        (
            "draft={kind: mlp_speculator, model: m, n_predict: 4, candidates: 8, top_k: [64, 64, 64, 64]}",
            ["16777216 paths", "give less"],
        ),
        ("target.quantization.ignore=['re:a{99999999999}']", ["no regular expression", "too large"]),
        ("seed=-1", ["seed -1", "greater than or equal to 0"]),
        ("seed=18446744073709551616", ["seed 18446744073709551616", "less than or equal to 4294967295"]),
        ("name=" + 101 * "a", ["name", "at most 100 characters", "shorten it"]),
        ("fusion.fold_norms=1", ["fusion.fold_norms 1", "true or false"]),
        ("speculation.top_p=.nan", ["speculation.top_p nan", "finite"]),
        ("benchmark.temperatures=[-1.0]", ["benchmark.temperatures", "none below 0"]),
        ("target.quantization.smoothing.strength=abc", ["smoothing.strength 'abc'", "'auto' or a number"]),
        ("target.quantization.kv={format: int8}", ["target.quantization.kv", "token_head"]),
        ("target.quantization.kv.format=fp8_e3m4", ["'fp8_e3m4'", "fp8_e4m3"]),
        (
            "target.quantization.kv={key: {format: int4, granularity: head}}",
            ["no static scales", "token_head or channel"],
        ),
        ("target.quantization.kv={value: {format: fp8_e4m3, granularity: head, outliers: 1}}", ["at run time"]),
        ("target.quantization.kv={format: int8, granularity: token_head, scales: auto}", ["stored scales"]),
        ("target.quantization.kv={format: int8, granularity: token_head, query: head}", ["tensor or head scales"]),
        (
            "target.quantization.kv={key: {format: int4, granularity: channel}, residual: 8}",
            ["residual 8", "16 or more"],
        ),
        (
            "target.quantization.kv={key: {format: int4, granularity: channel},"
            " value: {format: int4, granularity: channel, group: 64}, residual: 64}",
            ["the same group"],
        ),
        ("target.quantization.method=awq", ["methods rtn and gptq", "for awq set engine: llmcompressor"]),
        ("target.quantization.method=smoothquant+gptq", ["methods rtn and gptq", "set smoothing and method: gptq"]),
        ("target.quantization={engine: llmcompressor, smoothing: {}}", ["method: smoothquant+gptq"]),
        ("target.quantization={engine: llmcompressor, scheme: none}", ["leaves llmcompressor nothing"]),
        ("target.quantization={engine: llmcompressor, rotation: {}}", ["rotation belongs to engine qspec"]),
        ("target.quantization.rotation={r1: false, r2: false}", ["rotation", "does nothing", "set one of them"]),
        ("target.quantization={engine: llmcompressor, outliers: {share: 1}}", ["belong to engine qspec"]),
        ("target.quantization={scheme: none, outliers: {share: 1}}", ["rounds nothing", "set another scheme"]),
        ("target.quantization={outliers: {share: 6}}", ["outliers.share 6", "less than or equal to 5"]),
        ("target.quantization={engine: llmcompressor, method: awq}", ["4-bit", "scheme: W4A16"]),
        ("evaluation.tasks=[{subjects: [phisics]}]", ["evaluation.tasks[0]", "did you mean 'physics'"]),
        ("evaluation.tasks=[{backends: []}]", ["evaluation.tasks[0].backends", "at least 1"]),
        ("target.quantization.ignore=['re:(']", ["ignore[0]", "no regular expression"]),
        ("calibration.data=[{name: wikitext2}]", ["evaluation.fidelity: 'wikitext2'", "calibration text too"]),
        ("evaluation.fidelity.domains=[gutenberg]", ["evaluation.fidelity: 'gutenberg'", "calibration text too"]),
        ("speculation.draft_length={k: 20}", ["k 20 is above max_k 16"]),
        ("speculation.draft_length={policy: optimal, k: 20}", ["k 20 is above max_k 16"]),
        ("speculation.draft_length={threshold: 0.5}", ["threshold 0.5 is for policy: confidence"]),
        ("speculation.draft_length={policy: best}", ["speculation.draft_length.policy", "'optimal'"]),
        ("speculation.draft_length={by_batch: [[2, 4, 5]]}", ["by_batch [2, 4]", "from batch size 1"]),
        ("speculation.draft_length={by_batch: [[1, 4, 5], [4, 8, 2]]}", ["by_batch [4, 8]", "ends at 4"]),
        ("speculation.draft_length={by_batch: [[1, 4, 99]]}", ["by_batch[0][2]", "64"]),
        ("draft={kind: suffix, min_match: 9, max_match: 4}", ["min_match 9 is above max_match 4"]),
        ("draft={kind: suffix, memory_mb: 0}", ["memory_mb"]),
        ("draft={kind: self, lookup: prefix}", ["lookup"]),
        ("name=Has Space", ["name 'Has Space'", "lower-case"]),
        ("name.x=1", ["--set 'name.x=1'", "'x' leads into 't'"]),
        ("nonsense", ["--set 'nonsense'", "dotted.key=value"]),
        ("seed=[1", ["--set 'seed=[1'", "not valid YAML"]),
    ],
)
def test_bad_values_name_field_rule_and_fix(tmp_path: Path, override: str, parts: list[str]):
    """Would catch a refusal without the field's path, without the rule, or without what to do."""
    message = refusal(tmp_path, SMALL, override)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: t\nname: u\n", "line 2, column 1: is not valid YAML (key 'name' is given twice)"),
        ("a: [1\n", "is not valid YAML"),
        ("- 1\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("name: t\ndraft: {kind: self}\n", "target: is required"),
        ("1: x\n", "a key must be text"),
        ("x: &a [*a]\n", "an alias stands inside of what it names"),
        ("x: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        (SMALL + "x: " + "[" * 3000, "is not valid YAML"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, part: str):
    """Would catch a YAML trap (duplicate keys, tags, cycles, depth) that surfaces as a traceback or not at all."""
    assert part in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "half", ["target.quantization={method: gptq}", "draft={kind: self, quantization: {method: gptq}}"]
)
def test_error_feedback_needs_a_text_to_judge_by(tmp_path: Path, half: str):
    """Would catch a job that fails after loading its models because no row is left to hold out."""
    path = tmp_path / "r.yaml"
    path.write_text(SMALL, encoding="utf-8")
    with pytest.raises(RecipeError, match="judges by a text"):
        Recipe.read(path, (half, "calibration.samples=1"))
    assert Recipe.read(path, (half, "calibration.samples=2")).calibration.samples == 2


def test_paths_that_are_no_recipe(tmp_path: Path):
    """Would catch a traceback for a missing file, a folder, or bytes that are no text."""
    binary = tmp_path / "weights.gguf"
    binary.write_bytes(b"GGUF\xff\xfe\x00")
    for path, part in ((tmp_path / "no.yaml", "does not exist"), (tmp_path, "is a folder"), (binary, "is not UTF-8")):
        with pytest.raises(RecipeError, match=part):
            Recipe.read(path)


def test_overrides_reach_new_null_and_listed_places(tmp_path: Path):
    """Would catch an override that is dropped where the recipe leaves a section out, has it null, or has a list."""
    path = tmp_path / "r.yaml"
    path.write_text(SMALL + "calibration: {data: [{name: code}]}\nbudget: null\n", encoding="utf-8")
    overrides = ("target.quantization.kv.granularity=head", "budget.max_kl=1e-3", "calibration.data.0.weight=2.5")
    recipe = Recipe.read(path, overrides)
    assert recipe.target.quantization.kv == KVSpec(granularity="head")
    assert (recipe.budget.max_kl, recipe.calibration.data[0].weight) == (0.001, 2.5)
    for place in ("1", "²", "9" * 5000):  # the last two are digits that `int` refuses
        with pytest.raises(RecipeError, match="leads into a list of 1"):
            Recipe.read(path, (f"calibration.data.{place}.weight=2.5",))


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
patterns = words.filter(lambda w: not w.startswith("re:"))
unit = st.floats(0, 1, exclude_min=True)
quantizations = st.builds(
    QuantSpec,
    engine=st.just("qspec"),
    method=st.sampled_from(("rtn", "gptq")),
    scheme=st.sampled_from(["W8A8", "FP8", "FP8_BLOCK", "W4A16", "W4A8", "none"]),
    group_size=st.integers(1, 4096),
    clip=st.builds(ClipSpec, percentile=st.floats(51, 100)),
    smoothing=st.none() | st.builds(SmoothingSpec, strength=st.just("auto") | unit),
    rules=st.lists(st.builds(RuleSpec, match=patterns, scheme=st.just("none"), group_size=st.none()), max_size=2).map(
        tuple
    ),
    ignore=st.lists(patterns, max_size=3).map(tuple),
    kv=st.none() | st.builds(KVSpec, format=st.just("int8"), granularity=st.just("token_head")),
)
drafts = st.one_of(
    st.builds(NgramDraft, kind=st.just("ngram"), min_ngram=st.just(1), max_ngram=st.integers(1, 9)),
    st.builds(SuffixDraft, kind=st.just("suffix"), min_match=st.integers(1, 9), memory_mb=st.floats(0.1, 1e6)),
    st.builds(SelfDraft, kind=st.just("self"), layers=st.none() | st.integers(1, 9), quantization=quantizations),
    st.builds(ModelDraft, kind=st.just("model"), model=words, revision=st.none() | words),
)
recipes = st.builds(
    Recipe,
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True),
    description=words,
    seed=st.integers(0, 2**32 - 1),
    target=st.builds(ModelSpec, model=words, revision=st.none() | words, quantization=quantizations),
    draft=drafts,
    calibration=st.builds(
        CalibrationSpec, data=st.just((DataSpec(name="code", weight=1e-5), DataSpec(name="1e5", weight=1e20)))
    ),
    speculation=st.builds(
        SpeculationSpec,
        draft_length=st.builds(
            DraftLengthSpec,
            policy=st.just("confidence"),
            k=st.integers(1, 16),
            max_k=st.just(16),
            threshold=st.floats(0.01, 0.99),
            by_batch=st.just(((1, 4, 5), (8, 64, 0))),
        ),
        temperature=st.just(0.0) | st.floats(1e-30, 1e30),
        top_p=st.floats(1e-30, 1),
        max_length=st.none() | st.integers(16, 10**9),
    ),
)


@given(recipe=recipes)
def test_dump_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe):
    """Would catch a value that YAML reads back as another type (`1e5`, `no`, dates), and tags that no one can read."""
    path = tmp_path_factory.mktemp("round") / "r.yaml"
    path.write_text(recipe.dump(), encoding="utf-8")
    assert Recipe.read(path) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dump_of_shipped_recipes_is_plain_yaml(tmp_path: Path, path: Path):
    """Would catch a dump that only this project's own reader understands."""
    recipe = Recipe.read(path)
    assert yaml.safe_load(recipe.dump()) == recipe.as_dict()


def test_a_list_is_not_blamed_for_its_item(tmp_path: Path):
    """Would catch a second complaint about the list that holds the one wrong item."""
    assert "data[0].weight 0" in refusal(tmp_path, SMALL, "calibration.data=[{name: a, weight: 0}]")


PROBLEMS = """
name: t
target: {model: org/m, quantization: {scheme: W4A16, engine: llmcompressor, smoothing: {}}}
draft: {kind: self, lookup: sufix}
calibration: {data: [{name: wikitext2}], samples: 1}
speculation: {draft_length: {k: 20, threshold: 0.5}}
benchmark: {repeets: 3}
"""


def test_all_problems_come_at_once(tmp_path: Path):
    """Would catch a recipe that is mended one run at a time: fields, rules of a section, rules across sections."""
    (tmp_path / "r.yaml").write_text(PROBLEMS, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        Recipe.read(tmp_path / "r.yaml")
    expected = [
        "target.quantization: smoothing belongs to engine qspec; with",
        "draft.lookup 'sufix': must be 'none', 'ngram' or 'suffix'; did you mean 'suffix'?",
        "speculation.draft_length: k 20 is above max_k 16; raise max_k",
        "speculation.draft_length: threshold 0.5 is for policy: confidence; omit it",
        "benchmark.repeets: is not a field here; did you mean 'repeats'?",
        "the whole file: evaluation.fidelity: 'wikitext2' is calibration text too; compare",
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(expected)
    assert [part for part, line in zip(expected, lines, strict=True) if part not in line] == []


def test_a_rule_is_not_judged_by_what_was_not_given(tmp_path: Path):
    """Would catch a second complaint that follows from the default of a field whose own value is wrong."""
    told = refusal(tmp_path, SMALL, "evaluation.fidelity.data=3", "calibration.data=[{name: wikitext2}]")
    assert "evaluation.fidelity.data 3: must be a string" in told


def test_an_address_is_not_told_to_be_a_name(tmp_path: Path):
    """Would catch the fix of another pattern: "use lower-case letters" for `localhost:8000`."""
    message = refusal(
        tmp_path, SMALL, "evaluation.api={original: 'localhost:8000', quantized: 'http://localhost:1/v1'}"
    )
    assert "evaluation.api.original 'localhost:8000'" in message
    assert "give an address, such as http://localhost:8000/v1" in message


@pytest.mark.parametrize("field", ["speculation.temperature", "speculation.top_p", "benchmark.temperatures"])
def test_numbers_that_float32_does_not_hold_are_refused(tmp_path: Path, field: str):
    """Would catch a run of hours that ends at its first sampled token: 1e-46 is 0 in float32, and keeps no token."""
    value = "[0.0, 1e-46]" if field.endswith("s") else "1e-46"
    assert "1e-46 is lost in float32" in refusal(tmp_path, SMALL, f"{field}={value}")


def test_a_refusal_is_short_whatever_was_given(tmp_path: Path):
    """Would catch a message of megabytes for a file of unknown fields, or for one with a huge name."""
    (tmp_path / "many.yaml").write_text(SMALL + "".join(f"wrong_{i}: 0\n" for i in range(500)), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        Recipe.read(tmp_path / "many.yaml")
    assert len(str(caught.value)) < 6000
    assert len(refusal(tmp_path, f"{SMALL}{'x' * 100_000}: 0\n")) < 1000
