"""`qspec inspect`: numbers that can be found in the files, and a page that a person can read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
import json
import math
from pathlib import Path
from typing import Any
import weakref

import pytest
import torch
from torch import Tensor

from qspec.bridges.compressed import read, write
from qspec.bridges.hf import load_folder
from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import QspecError, RecipeError, SourceError
from qspec.inspection.model import ModelView, fitting_group, view_model
from qspec.inspection.pair import HalfView, PairView, view_half
from qspec.inspection.view import as_data, document, inspect
from qspec.pair.package import package
from qspec.plan import KVScheme
from qspec.progress import Progress
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.report.document import Document, Finding, Table
from qspec.report.render import html as report_html, markdown as report_markdown, text as report_text
from qspec.schema.manifest import NAME
from qspec.schema.quantization import QuantSpec
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.pairs import halves, recipe
from tests.tiny import TEXT, tiny_model

QUIET = Progress(quiet=True)
K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    return package(*halves(folder / "source"), recipe(), folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join([TEXT] * 40), encoding="utf-8")
    return str(path)


def change(folder: Path, name: str, change_tensor: Any) -> None:
    """Rewrite one tensor of a model folder."""
    tensors = {key: value.clone() for key, value in read_tensors(folder).items()}
    tensors[name] = change_tensor(tensors[name])
    write_tensors(folder / "model.safetensors", tensors)


def model_view(reference: Path, data: str | None = None) -> ModelView:
    view = inspect(str(reference), data=data, progress=QUIET)
    assert isinstance(view, ModelView)
    return view


def pair_view(reference: Path, data: str | None = None) -> PairView:
    view = inspect(str(reference), data=data, progress=QUIET)
    assert isinstance(view, PairView)
    return view


def tables(page: Document) -> list[Table]:
    return [block for block in page.blocks if isinstance(block, Table)]


# A float model.


def test_a_planted_outlier_is_found_and_costs_accuracy(tmp_path: Path):
    """Would catch outliers counted over the wrong axis, a layer described by another one's weight, swapped costs."""
    folder, name = tiny_model("llama", tmp_path), "model.layers.1.mlp.up_proj"

    def plant(w_NK: Tensor) -> Tensor:
        w_NK[:, 5] *= 100
        return w_NK

    change(folder, f"{name}.weight", plant)
    layers = {layer.name: layer for layer in model_view(folder).layers}
    assert list(layers) == load_folder(folder).arch.linears()
    assert {n for n, layer in layers.items() if layer.weight.outliers} == {name}
    up, twin = layers[name], layers["model.layers.0.mlp.up_proj"]
    assert (up.shape, up.weight.channels, up.weight.outliers) == ((128, 64), 64, 1)
    assert up.weight.amax == read_tensors(folder)[f"{name}.weight"].abs().max().item()
    assert up.weight.kurtosis > 10 * twin.weight.kurtosis
    assert twin.sqnr_db["W8A8"] > twin.sqnr_db["FP8_DYNAMIC"] > twin.sqnr_db["W4A16"] > 10


@pytest.mark.parametrize(("columns", "group"), [(4096, 128), (576, 64), (96, 32), (48, 16), (40, None)])
def test_the_group_size_fits_the_layer(columns: int, group: int | None):
    """Would catch a cost that no recipe can have because the group does not divide."""
    assert fitting_group(columns) == group


def test_a_layer_that_no_group_fits_has_no_four_bit_cost(tmp_path: Path):
    """Would catch a crash, or an invented number, for widths such as 72."""
    folder = tiny_model("llama", tmp_path, hidden_size=72, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    view = model_view(folder)
    assert {layer.group_size for layer in view.layers} == {None, 64, 128}
    assert "W4A16" not in view.layers[0].sqnr_db
    assert "–" in report_text.render(document(view, layers=True))


class OneAtATime(Mapping[str, Tensor]):
    """Hands out copies and counts how many matrices are alive at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._given, self.most = tensors, list[weakref.ref[Tensor]](), 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].clone()
        self._given.append(weakref.ref(tensor))
        self.most = max(self.most, sum(given() is not None for given in self._given))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_weights_are_looked_at_one_at_a_time(tmp_path: Path):
    """Would catch a model that is held in float as a whole, which a large one does not survive."""
    model = load_folder(tiny_model("llama", tmp_path))
    tensors = OneAtATime(model.tensors)
    view_model(replace(model, tensors=tensors), "tiny", QUIET)
    assert tensors.most == 1


def test_weights_that_are_not_finite_are_refused(tmp_path: Path):
    """Would catch statistics of NaN that look like a model without outliers."""
    folder = tiny_model("llama", tmp_path)
    change(folder, "lm_head.weight", lambda w: w.fill_(math.nan))
    with pytest.raises(SourceError, match=r"lm_head\.weight: holds NaN"):
        model_view(folder)


def test_without_text_nothing_is_run(tmp_path: Path):
    """Would catch activations that come from nowhere; a tied head is looked at through the embedding."""
    view = model_view(tiny_model("qwen2", tmp_path))
    assert (view.kv, view.calibration, view.tied) == ((), None, True)
    assert all(layer.input is None for layer in view.layers)
    assert view.layers[-1].shape == (view.vocabulary, view.hidden_size)


def test_text_shows_activations_keys_and_the_key_bias(tmp_path: Path, text: str):
    """Would catch a bias outlier that is missed or placed in the wrong head, and inputs of the wrong layer."""
    folder = tiny_model("qwen2", tmp_path / "model")

    def plant(bias: Tensor) -> Tensor:
        bias[20] = 50.0  # 2 KV heads of 16: the second
        return bias

    change(folder, f"{K_PROJ}.bias", plant)
    view = model_view(folder, text)
    biases = {bias.name: bias for bias in view.k_bias}
    assert biases[K_PROJ].outliers == (0, 1)
    assert biases[K_PROJ].amax[1] == 50.0
    assert not sum(biases["model.layers.0.self_attn.k_proj"].outliers)
    keys = {kv.name: kv.k_amax for kv in view.kv}[K_PROJ.removesuffix(".k_proj")]
    assert keys[1] > 30 > 3 * keys[0]  # rotation turns 50 within its pair: at least 35 of it in one of both
    inputs = {layer.name: layer.input for layer in view.layers}
    assert inputs["model.layers.0.self_attn.q_proj"] == inputs["model.layers.0.self_attn.v_proj"]
    assert inputs["lm_head"] is not None
    assert view.calibration is not None
    assert (view.calibration.texts, view.calibration.tokens) == (16, 16 * 256)
    page = document(view)
    (finding,) = [block for block in page.blocks if isinstance(block, Finding)]
    assert finding.text.startswith("1 of 2 layers have outliers in their key bias")
    (row,) = next(table for table in tables(page) if "key bias" in table.caption).rows
    assert row[0] == "1.self_attn.k_proj"
    assert row[4] == "1"


def test_key_biases_in_all_channels_are_outliers_too(tmp_path: Path, text: str):
    """Would catch a rule by medians alone, which finds nothing where every channel has a bias, or every layer has."""
    folder = tiny_model("qwen2", tmp_path / "model")
    for layer in (0, 1):
        change(folder, f"model.layers.{layer}.self_attn.k_proj.bias", lambda bias: bias.fill_(200.0))
    view = model_view(folder, text)
    assert [bias.outliers for bias in view.k_bias] == [(16, 16), (16, 16)]
    findings = [block.text for block in document(view).blocks if isinstance(block, Finding)]
    assert any(found.startswith("2 of 2 layers have outliers in their key bias") for found in findings)


@pytest.mark.parametrize(("large", "outliers"), [(1, 1), (40, 0)])
def test_channels_that_one_scale_loses_are_told(large: int, outliers: int, tmp_path: Path, text: str):
    """Would catch inputs called even because most channels are huge: 40 of 64, and the others round to 0."""
    folder = tiny_model("llama", tmp_path / "model")

    def widen(gain: Tensor) -> Tensor:
        gain[:large] *= 1e5
        return gain

    change(folder, "model.layers.1.input_layernorm.weight", widen)
    view = model_view(folder, text)
    found = {layer.name: layer.input for layer in view.layers}["model.layers.1.self_attn.q_proj"]
    assert found is not None
    assert (found.outliers, found.lost) == (outliers, 64 - large)
    findings = [block.text for block in document(view).blocks if isinstance(block, Finding)]
    share = f"{100 * (64 - large) / 64:.1f}"
    assert any(share in line and "rounds to 0" in line for line in findings)


# A pair.


def test_a_pair_shows_what_its_files_hold(pair: Path):
    """Would catch numbers of another half, and bytes that are not those on disk."""
    view = pair_view(pair)
    assert [half.name for half in view.halves] == ["target", "draft"]
    for half in view.halves:
        stored = read(pair / half.name)
        for layer in half.layers[:-1]:
            scale = stored.linears[layer.name].weight.scale
            assert layer.scale is not None
            assert (layer.scale.min, layer.scale.max) == (scale.min().item(), scale.max().item())
            assert layer.scales == scale.numel()
        files = read_tensors(pair / half.name)
        uncounted = (".k_scale", ".v_scale", ".weight_shape")
        assert half.bytes == sum(files[name].nbytes for name in files if not name.endswith(uncounted))
    target, draft = view.halves
    assert {(x.format, x.granularity, x.activation) for x in target.layers[:-1]} == {
        ("int8", "channel", "int8 token dynamic")
    }
    assert {(x.scheme, x.format, x.granularity) for x in draft.layers[:-1]} == {("W4A16 g32", "int4", "group 32")}
    assert (target.layers[-1].scheme, target.layers[-1].scale) == ("none", None)
    # Absmax: one code per scale at the end of the range, and a neighbour now and then.
    assert all(1 / 128 <= (x.saturated or 0) < 0.05 for x in target.layers[:-1])
    assert all(1 / 32 <= (x.saturated or 0) < 0.12 for x in draft.layers[:-1])


def test_static_input_scales_are_shown(tmp_path: Path):
    """Would catch FP8 without its input scales, the ones that calibration decides."""
    folder = tiny_model("llama", tmp_path)
    spec = QuantSpec.model_validate({"scheme": "FP8", "kv": {"format": "fp8_e4m3", "granularity": "head"}})
    model = quantize(load(folder), observe(folder), build_plan(spec))
    half = view_half(model, "target", QUIET)
    expected = [float(linear.input_scale) for linear in model.linears.values() if linear.input_scale is not None]
    assert [x.input_scale for x in half.layers[:-1]] == expected
    assert half.kv is not None
    assert [len(x.scale) for x in half.kv.keys] == [2, 2]
    page = document(PairView("p", None, (half,), None), layers=True)
    (inputs,) = [table for table in tables(page) if table.caption == "Stored scales of layer inputs"]
    assert [row[0] for row in inputs.rows] == [row[0] for row in tables(page)[0].rows][:7]
    assert "input scale" in next(table for table in tables(page) if "linear layers" in table.caption).columns


def test_weights_kept_apart_are_shown_and_counted(tmp_path: Path):
    """Would catch outliers that take no bytes, and a page on which a sparse half looks like a dense one."""
    folder = tiny_model("llama", tmp_path / "source")
    spec = QuantSpec.model_validate({"scheme": "W8A8", "outliers": {"share": 2.0}})
    model = quantize(load(folder), None, build_plan(spec))
    write(model, tmp_path / "out", torch.float32)
    half = view_half(model, "target", QUIET)
    files = read_tensors(tmp_path / "out")
    assert half.bytes == sum(files[name].nbytes for name in files)
    assert [x.sparse for x in half.layers] == pytest.approx([0.02] * 14 + [0.0], abs=1e-3)  # whole elements
    page = document(PairView("p", None, (half,), None), layers=True)
    for table in (tables(page)[0], next(table for table in tables(page) if "linear layers" in table.caption)):
        column = table.columns.index("sparse, %")
        assert {row[column] for row in table.rows if row[0].endswith("down_proj")} == {"2.0"}


def test_kv_scales_and_what_they_stand_for(pair: Path):
    """Would catch the question that users of every such tool ask: were the KV scales calibrated?"""
    stored = read(pair / "target")
    half = view_half(stored, "target", QUIET)
    assert half.kv is not None
    assert (half.kv.origin, half.kv.granularity, half.problem) == ("calibrated", "tensor", None)
    for layer in half.kv.keys:
        assert layer.scale == tuple(stored.k_scale[layer.name].tolist())
        assert layer.amax == (448 * layer.scale[0],)
    assert {x.name: x.scale for x in half.kv.values} == {n: tuple(s.tolist()) for n, s in stored.v_scale.items()}
    assert "measured on calibration text" in report_text.render(document(pair_view(pair)))


def ones(model: QuantizedModel) -> dict[str, Tensor]:
    return {name: torch.ones_like(scale) for name, scale in model.k_scale.items()}


def with_kv(model: QuantizedModel, kv: KVScheme | None, scales: dict[str, Tensor]) -> HalfView:
    changed = replace(model, plan=replace(model.plan, kv=kv), k_scale=scales, v_scale=scales)
    return view_half(changed, "target", QUIET)


def test_the_origin_of_kv_scales_is_told_apart(pair: Path):
    """Would catch scales of 1 that pass as calibrated, and run-time scales that look missing."""
    model = read(pair / "target")
    assert model.plan.kv is not None
    cast, dynamic = replace(model.plan.kv, scales="cast"), replace(model.plan.kv, granularity="token_head")
    views = [with_kv(model, *case) for case in ((cast, ones(model)), (dynamic, {}), (model.plan.kv, ones(model)))]
    assert [view.kv and view.kv.origin for view in views] == ["cast", "at run time", "never calibrated"]
    assert with_kv(model, None, {}).kv is None
    never = document(PairView("p", None, (views[2],), None))
    assert {block.tone for block in never.blocks if isinstance(block, Finding)} == {"bad"}
    for view in views:
        assert "KV cache" in report_text.render(document(PairView("p", None, (view,), None), layers=True))
        assert report_html.render(document(PairView("p", None, (view,), None), layers=True))


def test_text_shows_how_much_of_the_cache_saturates(pair: Path, text: str):
    """Would catch saturation measured after the cache has clipped the values, where there is none to see."""
    view = pair_view(pair, text)
    keys = [layer for half in view.halves if half.kv for layer in half.kv.keys]
    assert all(layer.seen is not None and len(layer.seen.amax) == 2 for layer in keys)
    assert all(0 <= ((layer.seen and layer.seen.saturated) or 0) < 0.1 for layer in keys)
    model = read(pair / "target")
    small = {name: scale / 1e5 for name, scale in model.k_scale.items()}
    half = view_half(replace(model, k_scale=small), "target", QUIET, [[1, 2, 3, 4]])
    assert half.kv is not None
    for key, value in zip(half.kv.keys, half.kv.values, strict=True):
        assert key.seen is not None
        assert value.seen is not None
        assert key.seen.saturated == 1.0
        assert (value.seen.saturated or 0) < 0.5
    assert "saturated" in report_text.render(document(view, layers=True))


def test_an_unusable_number_is_named_and_the_rest_still_shown(pair: Path):
    """Would catch an inspection that dies on the very damage it is called for."""
    model = read(pair / "target")
    name = "model.layers.0.self_attn"
    broken = {**model.k_scale, name: torch.tensor([math.nan])}
    half = view_half(replace(model, k_scale=broken), "target", QUIET)
    assert half.problem is not None
    assert f"{name}.k_scale" in half.problem
    text = report_text.render(document(PairView("p", None, (half,), None), layers=True))
    assert "fail: " in text
    json.dumps(as_data(PairView("p", None, (half,), None)), allow_nan=False)


def test_one_checkpoint_alone(pair: Path):
    """Would catch a quantized folder refused as "already quantized" by the verb that looks into such folders."""
    view = pair_view(pair / "draft")
    assert (len(view.halves), view.draft) == (1, None)
    assert view.halves[0].layers == pair_view(pair).halves[1].layers


@pytest.mark.parametrize(
    ("reference", "options", "error", "part"),
    [
        ("no-such-model", {}, SourceError, "no-such-model"),
        ("{pair}", {"revision": "main"}, RecipeError, "only Hub models have revisions"),
        ("{pair}", {"data": "no-such-data"}, RecipeError, "no-such-data"),
        ("{pair}", {"data": "{short}"}, SourceError, "first half holds 0 rows .* add text"),
    ],
)
def test_refusals(pair: Path, tmp_path: Path, reference: str, options: dict[str, str], error: type, part: str):
    """Would catch a traceback, or an option that is silently ignored."""
    short = tmp_path / "short.txt"
    short.write_text("too short", encoding="utf-8")
    places = {"pair": pair, "short": short}
    with pytest.raises(error, match=part):
        inspect(reference.format(**places), **{k: v.format(**places) for k, v in options.items()}, progress=QUIET)


def test_a_changed_manifest_is_refused(pair: Path, tmp_path: Path):
    """Would catch an inspection of something that is no longer the pair it names."""
    (tmp_path / NAME).write_bytes((pair / NAME).read_bytes().replace(b'"name"', b'"nome"'))
    with pytest.raises(QspecError, match=r"pair\.json"):
        inspect(str(tmp_path), progress=QUIET)


# Documents and JSON.


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelView:
    return model_view(tiny_model("llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=9))


def test_one_line_per_kind_of_layer(deep: ModelView):
    """Would catch a page that grows with the model, or one that has no way to see a single layer."""
    weights, cost = tables(document(deep))
    assert [row[0] for row in weights.rows] == [row[0] for row in cost.rows]
    assert [row[:2] for row in weights.rows] == [
        *((kind, "9") for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("lm_head", "1"),
    ]
    *_, every = tables(document(deep, layers=True))
    assert [row[0] for row in every.rows][-2:] == ["8.mlp.down_proj", "lm_head"]
    assert len(every.rows) == 9 * 7 + 1
    assert max(map(len, report_text.render(document(deep)).splitlines())) <= 120


def test_the_spread_over_layers(deep: ModelView):
    """Would catch columns under the wrong head: least, median and greatest are those of the layers."""
    weights = tables(document(deep))[0]
    cells = dict(zip(weights.columns[3:6], weights.rows[0][3:6], strict=True))
    amax = sorted(layer.weight.amax for layer in deep.layers if layer.name.endswith("q_proj"))
    assert list(cells) == ["largest\nmin", "\nmedian", "\nmax"]
    # Cells have three digits.
    assert [float(cell) for cell in cells.values()] == pytest.approx([amax[0], amax[4], amax[8]], rel=5e-3)


def test_the_spread_of_scales(pair: Path):
    """Would catch a line that shows one layer's scales for all: least and greatest are over every layer."""
    view = pair_view(pair)
    found = [x.scale for x in view.halves[0].layers if x.name.endswith("q_proj") and x.scale]
    row = tables(document(view))[0].rows[0]
    assert row[:2] == ("q_proj", "2")
    ends = [min(s.min for s in found), sum(s.median for s in found) / 2, max(s.max for s in found)]
    # Cells have three digits.
    assert [float(cell) for cell in row[5:8]] == pytest.approx(ends, rel=5e-3)
    assert row[-1] == "8.70 kB"  # 2 x (64 x 64 codes + 64 float32 scales)


def test_the_page_has_every_layer(deep: ModelView, pair: Path):
    """Would catch a page that loads something, or that shows less than the terminal."""
    for view in (deep, pair_view(pair)):
        page = document(view, layers=True)
        html = report_html.render(page).partition("<script>")[0]  # the page's own is the last of it
        assert all(part not in html for part in ("http://", "https://", "<script", "nan"))
        assert "0.mlp.down_proj" in html
        assert "| q_proj |" in report_markdown.render(page).replace("\\", "")


def test_json_holds_every_layer_and_no_nan(deep: ModelView, pair: Path):
    """Would catch JSON that other languages refuse (NaN, Infinity), or summaries in place of the layers."""
    data = json.loads(json.dumps(as_data(deep), allow_nan=False))
    assert data["kind"] == "model"
    assert len(data["layers"]) == 64
    assert data["layers"][0]["sqnr_db"].keys() == {"W8A8", "FP8_DYNAMIC", "W4A16"}
    data = json.loads(json.dumps(as_data(pair_view(pair)), allow_nan=False))
    assert data["kind"] == "pair"
    assert data["halves"][0]["kv"]["keys"][0]["amax"][0] > 0
    exact = replace(deep, layers=(replace(deep.layers[0], sqnr_db={"W8A8": math.inf}),))
    assert as_data(exact)["layers"][0]["sqnr_db"]["W8A8"] is None
