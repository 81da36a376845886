"""A scheme is one row: every verb knows one that a test adds."""

from collections.abc import Iterator
from dataclasses import replace
import json
from pathlib import Path
import re

import pytest

from qspec import cli, pipeline
from qspec.errors import RecipeError, SourceError
from qspec.numerics.quantization.blocks import PerChannel
from qspec.numerics.quantization.formats import FP8_E4M3, INT8
from qspec.pair.check import check
from qspec.pair.open import open_pair
from qspec.progress import Progress
from qspec.schema.recipe import Recipe
from qspec.scheme_table import SCHEMES, Place, Remark, WeightScheme
from tests.jobs import job
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
ROW = WeightScheme(
    "F8A16",
    "float8 weights with a scale per row, inputs as they are",
    FP8_E4M3,
    PerChannel(),
    remarks=(Remark("note", "no server was tried with it", "use FP8_DYNAMIC", lambda at: at.capability is None),),
    vllm="was not tried with it",
    targets=("cpu",),
)


ROWS = (ROW, replace(ROW, name="W8A16", help="INT8 weights with a scale per row, inputs as they are", weight=INT8))


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Iterator[WeightScheme]:
    added: WeightScheme = request.param
    SCHEMES[added.name] = added
    yield added
    del SCHEMES[added.name]


def test_a_scheme_that_one_row_adds_is_known_to_every_verb(
    row: WeightScheme, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a verb that asks for schemes by name: plan, run, check, generate, the manifest's servers, tune."""
    model = tiny_model("llama", tmp_path / "model")
    target = {"model": str(model), "quantization": {"scheme": row.name}}
    recipe = job(tmp_path, model, {"kind": "ngram"}, target=target, tune={})
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    cli.main(["plan", str(tmp_path / "recipe.yaml"), "--json"])
    view = json.loads(capsys.readouterr().out)
    assert row.remarks[0].rule in [finding["rule"] for finding in view["findings"]]
    assert f"{row.name}/float" in view["tune"]["targets"]
    pair = pipeline.run(recipe, tmp_path / "out", progress=Progress(quiet=True))
    assert any("sha256" in line for line in check(pair))
    opened = open_pair(pair)
    assert opened.manifest.target.schemes == {row.name: 14, "none": 1}
    served = {(line.runtime, line.part): line for line in opened.manifest.served_by}
    assert not served["vllm", "target"].served
    assert served["vllm", "target"].detail == f"{row.name}: {row.vllm}"
    assert opened.generate("The quick brown fox", max_new_tokens=8).generation.tokens
    (bits,) = [group["bits"] for group in view["target"]["linears"] if group["scheme"] == row.name]
    assert 8 < bits < 9  # codes, and a scale per row


def test_a_foreign_checkpoint_gets_the_name_of_its_row(row: WeightScheme) -> None:
    """Would catch formats that are written under a name and read back under another."""
    from qspec.bridges.quant_config import decode, encode

    for own in SCHEMES.values():
        scheme = own.layer(32)
        if scheme is not None:
            config = encode({"a.down_proj": scheme}, None, "1")
            assert config is not None
            schemes, _ = decode(config, ["a.down_proj"])
            assert [found.name for found in schemes.values()] == [own.name]


@pytest.mark.parametrize("place", ["group", "whole"])
def test_int8_weights_in_words_are_refused_by_name(place: str) -> None:
    """Would catch words of four codes, which qspec does not read, that pass for codes in a byte each."""
    from qspec.bridges.quant_config import decode, encode

    scheme = ROWS[1].layer()
    assert scheme is not None
    config = encode({"a.down_proj": scheme}, None, "1")
    assert config is not None
    if place == "whole":  # as older writers have it
        config["config_groups"]["group_0"]["format"] = None
        config["format"] = "pack-quantized"
    else:
        config["config_groups"]["group_0"]["format"] = "pack-quantized"
    with pytest.raises(SourceError, match="packed 8-bit weights are not read"):
        decode(config, ["a.down_proj"])


def test_a_name_that_no_row_has_is_refused_with_the_known_ones() -> None:
    """Would catch a scheme that stays known after it was taken out."""
    fields = {"name": "t", "target": {"model": "m", "quantization": {"scheme": ROW.name}}, "draft": {"kind": "ngram"}}
    with pytest.raises(RecipeError, match=r"must be 'none', .* or 'W4A16'"):
        Recipe.of(fields, (), "recipe.yaml")


def test_rows_are_complete() -> None:
    """Would catch a recipe's page that leaves a scheme out, or a refusal that fires nowhere."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    for row in SCHEMES.values():
        assert f"`{row.name}`" in page
        places = [Place("x", sm, dtype) for sm in (None, 70, 89, 90, 100) for dtype in ("auto", "float16")]
        places.append(Place("rtx4090", 89))
        assert all(any(remark.where(place) for place in places) for remark in row.remarks)


def test_no_other_part_asks_for_a_scheme_by_name() -> None:
    """Would catch a branch by name that a new row does not know of."""
    names = "|".join(name for name in SCHEMES if name != "none")
    asks = re.compile(rf"(?:==|!=| in) *[\[({{]?\"(?:{names})\"|startswith\(\"(?:FP8|W[48])|case \"(?:{names})\"")
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "qspec").rglob("*.py"))}
    allowed = {"qspec/pair/drafters/model.py"}  # which measured drafts a prediction is taken from
    found = {name: asks.findall(text) for name, text in files.items() if asks.search(text) and name not in allowed}
    assert found == {}
