"""An inspection as a document: one line per kind of layer, every layer on demand, bars for the page."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from qspec.numerics.distribution import OUTLIER_RATIO, Extent, extent
from qspec.stages.document import Bar, Bars, Block, Details, Document, Finding, Heading, Paragraph, Table, number, size
from qspec.stages.inspect_model import SCHEMES, Distribution, KeyBias, KVView, LayerView, ModelView
from qspec.stages.inspect_pair import HalfView, KVCacheView, PairView, StoredKV, StoredLayer
from qspec.stages.report_text import table_lines

L = TypeVar("L", LayerView, StoredLayer)
OUTLIERS = f"outliers: share of input channels whose largest magnitude is above {OUTLIER_RATIO:g} times the median's"


def document(view: ModelView | PairView, layers: bool = False, page: bool = False) -> Document:
    """`layers`: a line for every layer too. `page`: bars, and every layer folded away, as a web page can."""
    blocks = _model(view) if isinstance(view, ModelView) else _pair(view)
    if page:
        blocks += _model_bars(view) if isinstance(view, ModelView) else _pair_bars(view)
    if layers or page:
        tables = list(_every_layer(view))
        blocks += [_folded(table) for table in tables] if page else [Heading("Every layer"), *tables]
    title = view.model if isinstance(view, ModelView) else view.name
    return Document(title, _about(view), tuple(blocks))


def _about(view: ModelView | PairView) -> str:
    if isinstance(view, PairView):
        parts = [f"{half.name} {size(half.bytes)}" for half in view.halves]
        if view.draft is not None and len(view.halves) == 1:
            parts.append(f"draft {view.draft}: no weights")
    else:
        parts = [
            f"{view.model_type}, {view.decoder_layers} decoder layers",
            f"hidden size {view.hidden_size:,}",
            f"{view.heads} heads and {view.kv_heads} KV heads of {view.head_dim}",
            f"vocabulary {view.vocabulary:,}{', head tied to the embedding' if view.tied else ''}",
        ]
    if view.calibration is not None:
        seen = view.calibration
        parts.append(f"measured on {seen.tokens:,} tokens of {seen.data} ({seen.texts} texts)")
    return " · ".join(parts)


# A float model.


def _model(view: ModelView) -> list[Block]:
    kinds = _by(view.layers, _part)
    blocks: list[Block] = [
        Heading("Weights"),
        _spread_table(f"kurtosis: 3 is a normal law, more is heavier tails; {OUTLIERS}", kinds, lambda x: x.weight),
        Heading("Cost of a scheme"),
        _cost_table(kinds),
    ]
    if view.calibration is not None:
        caption = f"What the layers are given; kurtosis of a sample of rows; {OUTLIERS}"
        blocks += [Heading("Activations"), _spread_table(caption, kinds, _input)]
        blocks += [Heading("Keys and values"), _kv_table(view.kv)]
    if view.k_bias:
        blocks += [Heading("Key bias"), *_key_bias(view.k_bias, view.kv)]
    return blocks


def _spread_table(caption: str, kinds: dict[str, list[LayerView]], part: Callable[[LayerView], Distribution]) -> Table:
    rows = tuple(
        (
            kind,
            str(len(layers)),
            _shape(layers[0].shape),
            *_trio(part(x).amax for x in layers),
            *_trio(part(x).kurtosis for x in layers),
            *_trio((100 * part(x).outlier_share for x in layers), _two_places),
        )
        for kind, layers in kinds.items()
    )
    columns = ("", "layers", "out x in", *_heads("largest"), *_heads("kurtosis"), *_heads("outliers, %"))
    return Table(caption, columns, rows)


def _cost_table(kinds: dict[str, list[LayerView]]) -> Table:
    caption = (
        "SQNR of the rounded weight in dB: more is better, 6 dB are about one bit (round to nearest, absmax; weights "
        "alone, without what the layer is given). W4A16 in groups of the size shown"
    )
    rows = tuple(
        (
            kind,
            *(cell for name in SCHEMES for cell in _trio((x.sqnr_db.get(name, float("nan")) for x in layers), _place)),
            str(layers[0].group_size or "–"),
        )
        for kind, layers in kinds.items()
    )
    return Table(caption, ("", *(head for name in SCHEMES for head in _heads(name)), "group"), rows)


def _kv_table(kv: Sequence[KVView]) -> Table:
    sides = {"keys": [x.k_amax for x in kv], "values": [x.v_amax for x in kv]}
    rows = tuple(
        (name, str(len(amax)), *_trio(max(heads) for heads in amax), *_trio(map(_uneven, amax)))
        for name, amax in sides.items()
    )
    caption = "Largest magnitude of a layer, and how much further its largest head reaches than its smallest"
    return Table(caption, ("", "layers", *_heads("largest"), *_heads("head / head")), rows)


def _key_bias(biases: Sequence[KeyBias], kv: Sequence[KVView]) -> list[Block]:
    keys = {x.name: x.k_amax for x in kv}
    rows = tuple(
        (
            _short(x.name),
            number(max(x.amax)),
            f"{max(x.amax) / x.median:.0f}x" if x.median else "–",
            str(sum(x.outliers)),
            _list(i for i, count in enumerate(x.outliers) if count),
            number(max(keys[_attention(x.name)])) if keys else "–",
        )
        for x in biases
        if sum(x.outliers)
    )
    if not rows:
        return [Paragraph(f"{len(biases)} layers have one; no channel is above {OUTLIER_RATIO:g} times the median.")]
    columns = ("", "largest", "of median", "outliers", "in KV heads", "largest key")
    text = f"{len(rows)} of {len(biases)} layers have outliers in their key bias: they widen the range of every key."
    return [Finding("open", text), Table("Layers whose key bias has outlier channels", columns, rows)]


def _model_bars(view: ModelView) -> list[Block]:
    kinds = _by(view.layers, _part)
    blocks: list[Block] = [Heading("By kind of layer")]
    for name in SCHEMES:
        values = {kind: [x.sqnr_db[name] for x in layers if name in x.sqnr_db] for kind, layers in kinds.items()}
        blocks.append(_chart(f"SQNR of {name} weights, dB (median; line: all layers)", values))
    weights = {kind: [x.weight.kurtosis for x in layers] for kind, layers in kinds.items()}
    blocks.append(_chart("Kurtosis of weights (median; line: all layers; mark: normal law)", weights, mark=3.0))
    if view.calibration is not None:
        inputs = {kind: [_input(x).amax for x in layers] for kind, layers in kinds.items()}
        blocks.append(_chart("Largest activation (median; line: all layers)", inputs))
        for name, sides in (("key", [x.k_amax for x in view.kv]), ("value", [x.v_amax for x in view.kv])):
            blocks.append(_by_layer(f"Largest {name} (line: heads)", sides))
    return blocks


# A pair.


def _pair(view: PairView) -> list[Block]:
    return [block for half in view.halves for block in _half(half)]


def _half(half: HalfView) -> list[Block]:
    origin = " ".join(half.source[key] for key in ("model", "revision") if half.source.get(key))
    blocks: list[Block] = [Heading(half.name), Paragraph(f"made from {origin}")]
    if half.problem is not None:
        blocks.append(Finding("bad", half.problem))
    blocks.append(_formats_table(half))
    if any(layer.input_scale is not None for layer in half.layers):
        blocks.append(_input_table(half.layers))
    return [*blocks, *_kv_blocks(half.kv)]


def _formats_table(half: HalfView) -> Table:
    rows = [_formats_row(layers) for layers in _by(half.layers, lambda x: (_part(x), *_formats(x))).values()]
    caption = (
        "Scales over all layers of a kind; saturated: codes at the ends of the range. With absmax that is one per "
        "scale, more was clipped"
    )
    formats = ("scheme", "weights, scale per", "inputs, scale per")
    columns = ("", "layers", *formats, *_heads("weight scale"), "saturated, %\nmedian", "\nmax", "bytes")
    other = ("embeddings, norms", *[""] * (len(columns) - 2), size(half.other_bytes))
    return Table(caption, columns, (*rows, other))


def _formats_row(layers: Sequence[StoredLayer]) -> tuple[str, ...]:
    one = layers[0]
    scales = [x.scale for x in layers if x.scale is not None]
    spread = [extent(getattr(s, end) for s in scales) for end in ("min", "median", "max")]
    saturated = extent(100 * x.saturated for x in layers if x.saturated is not None)
    numbers = (number(spread[0].min), number(spread[1].median), number(spread[2].max))
    shares = (_two_places(saturated.median), _two_places(saturated.max))
    blank = ("",) * len((*numbers, *shares))
    return (
        _part(one),
        str(len(layers)),
        *_formats(one),
        *((*numbers, *shares) if scales else blank),
        size(sum(x.bytes for x in layers)),
    )


def _formats(layer: StoredLayer) -> tuple[str, str, str]:
    weights = layer.format if layer.scale is None else f"{layer.format} {layer.granularity}"
    return (layer.scheme, weights, layer.activation)


def _input_table(layers: Iterable[StoredLayer]) -> Table:
    kinds = _by([x for x in layers if x.input_scale is not None], _part)
    rows = tuple(
        (kind, str(len(found)), *_trio(x.input_scale for x in found if x.input_scale)) for kind, found in kinds.items()
    )
    return Table("Stored scales of layer inputs", ("", "layers", *_heads("input scale")), rows)


def _kv_blocks(kv: KVCacheView | None) -> list[Block]:
    if kv is None:
        return [Paragraph("KV cache: not quantized.")]
    text = f"KV cache: {kv.format}, {ORIGINS[kv.origin]}."
    note: Block = Finding("bad", text) if kv.origin == "never calibrated" else Paragraph(text)
    sides = {"k_scale": kv.keys, "v_scale": kv.values}
    rows = tuple(_kv_row(name, kv, layers) for name, layers in sides.items())
    columns = ["", "layers", "scale per", *_heads("scale"), *_heads("stands for")]
    if _was_seen(kv):
        columns += [*_heads("seen"), "saturated, %\nmedian", "\nmax"]
    caption = "stands for: the largest magnitude that the scale can hold" + (
        "; seen: on the text; saturated: values beyond" if _was_seen(kv) else ""
    )
    return [note, Table(caption, tuple(columns), rows)]


ORIGINS = {
    "calibrated": "scales measured on calibration text",
    "cast": "scales are 1 (cast): the format's own range, nothing was measured",
    "never calibrated": "every scale is 1, so none was calibrated: values beyond the format's own range saturate",
    "at run time": "one scale per token and head, computed at run time: none is stored",
}


def _was_seen(kv: KVCacheView) -> bool:
    return any(layer.seen is not None for layer in kv.keys)


def _kv_row(name: str, kv: KVCacheView, layers: Sequence[StoredKV]) -> tuple[str, ...]:
    row = (
        name,
        str(len(layers)),
        kv.granularity,
        *_trio(s for x in layers for s in x.scale),
        *_trio(a for x in layers for a in x.amax),
    )
    if not _was_seen(kv):
        return row
    shares = extent(100 * x.seen.saturated for x in layers if x.seen and x.seen.saturated is not None)
    amax = _trio(max(x.seen.amax) for x in layers if x.seen)
    return (*row, *amax, _places(shares.median), _places(shares.max))


def _pair_bars(view: PairView) -> list[Block]:
    blocks: list[Block] = []
    for half in view.halves:
        kinds = _by(half.layers, _part)
        stored = tuple(
            Bar(kind, float(total), size(total))
            for kind, total in ((k, sum(x.bytes for x in v)) for k, v in kinds.items())
        )
        blocks += [Heading(f"{half.name}: charts"), Bars("Bytes by kind of layer", stored)]
        saturated = {k: [100 * x.saturated for x in v if x.saturated is not None] for k, v in kinds.items()}
        blocks.append(
            _chart("Saturated codes, % (median; line: all layers)", {k: v for k, v in saturated.items() if v})
        )
        if half.kv is not None and half.kv.origin != "at run time":
            blocks.append(_by_layer("Largest key that a layer's scale can hold", [x.amax for x in half.kv.keys]))
            blocks.append(_by_layer("Largest value that a layer's scale can hold", [x.amax for x in half.kv.values]))
    return blocks


# Every layer.


def _every_layer(view: ModelView | PairView) -> Iterable[Table]:
    if isinstance(view, ModelView):
        yield _layers_table(view)
        if view.kv:
            rows = tuple((_short(x.name), _list(map(number, x.k_amax)), _list(map(number, x.v_amax))) for x in view.kv)
            yield Table("Largest key and value of every KV head", ("", "keys", "values"), rows)
        return
    for half in view.halves:
        yield _stored_table(half)
        if half.kv is not None and (half.kv.keys[0].scale or _was_seen(half.kv)):
            yield _stored_kv_table(half.name, half.kv)


def _layers_table(view: ModelView) -> Table:
    inputs = view.calibration is not None
    columns = ["", "largest", "kurtosis", "outliers", *SCHEMES]
    if inputs:
        columns += ["input\nlargest", "\nkurtosis", "\noutliers"]
    rows = tuple(
        (
            _short(x.name),
            *_cells(x.weight),
            *(_place(x.sqnr_db.get(name, float("nan"))) for name in SCHEMES),
            *(_cells(_input(x)) if inputs else ()),
        )
        for x in view.layers
    )
    return Table("Linear layers: weights, SQNR of each scheme in dB, outlier channels counted", tuple(columns), rows)


def _stored_table(half: HalfView) -> Table:
    static = any(x.input_scale is not None for x in half.layers)
    inputs = ("input scale",) if static else ()
    columns = ("", "scheme", "scale per", "scales", *_heads("weight scale"), "saturated, %", *inputs, "bytes")
    rows = tuple(
        (
            _short(x.name),
            x.scheme if x.scale else x.format,
            x.granularity,
            str(x.scales),
            *(map(number, (x.scale.min, x.scale.median, x.scale.max)) if x.scale else ("", "", "")),
            "" if x.saturated is None else _two_places(100 * x.saturated),
            *(("" if x.input_scale is None else number(x.input_scale),) if static else ()),
            size(x.bytes),
        )
        for x in half.layers
    )
    return Table(f"{half.name}: linear layers", columns, rows)


def _stored_kv_table(name: str, kv: KVCacheView) -> Table:
    seen = ("seen", "saturated, %") if _was_seen(kv) else ()
    sides = ("k_scale", "stands for", *seen, "v_scale", "stands for", *seen)
    rows = tuple(
        (_short(k.name), *_kv_cells(k, bool(seen)), *_kv_cells(v, bool(seen)))
        for k, v in zip(kv.keys, kv.values, strict=True)
    )
    return Table(f"{name}: KV cache by layer (several values: one per KV head)", ("", *sides), rows)


def _kv_cells(x: StoredKV, seen: bool) -> tuple[str, ...]:
    cells = (_list(map(number, x.scale)) or "–", _list(map(number, x.amax)) or "–")
    if not seen or x.seen is None:
        return cells
    share = "–" if x.seen.saturated is None else _places(100 * x.seen.saturated)
    return (*cells, _list(map(number, x.seen.amax)), share)


# Cells and charts.


def _by(layers: Iterable[L], key: Callable[[L], object]) -> dict[str, list[L]]:
    """Layers by key, in order of first appearance."""
    found: dict[object, list[L]] = {}
    for layer in layers:
        found.setdefault(key(layer), []).append(layer)
    return {str(name): members for name, members in found.items()}


def _part(layer: LayerView | StoredLayer) -> str:
    return layer.name.rpartition(".")[2]


def _input(layer: LayerView) -> Distribution:
    assert layer.input is not None
    return layer.input


def _short(name: str) -> str:
    return name.removeprefix("model.layers.")


def _attention(name: str) -> str:
    return name.rpartition(".")[0]


def _uneven(heads: Sequence[float]) -> float:
    """Largest head over smallest."""
    return max(heads) / min(heads) if min(heads) else float("nan")


def _heads(name: str) -> tuple[str, str, str]:
    return (f"{name}\nmin", "\nmedian", "\nmax")


def _trio(values: Iterable[float], text: Callable[[float], str] = number) -> tuple[str, str, str]:
    found: Extent = extent(values)
    return (text(found.min), text(found.median), text(found.max))


def _place(value: float) -> str:
    return f"{value:.1f}" if value == value and abs(value) != float("inf") else number(value)


def _two_places(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _places(percentage: float) -> str:
    """A share that may be tiny and must not look like none."""
    return "–" if percentage != percentage else "0" if not percentage else number(percentage, 2)


def _cells(x: Distribution) -> tuple[str, str, str]:
    return (number(x.amax), number(x.kurtosis), f"{x.outliers}/{x.channels}")


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _list(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _chart(caption: str, values: dict[str, list[float]], mark: float | None = None) -> Bars:
    """A bar per kind: the median over its layers, a line from the least to the greatest."""
    spread = {kind: extent(found) for kind, found in values.items()}
    return Bars(
        caption, tuple(Bar(kind, s.median, number(s.median), (s.min, s.max)) for kind, s in spread.items()), mark
    )


def _by_layer(caption: str, layers: Sequence[Sequence[float]]) -> Bars:
    """A bar per decoder layer: its largest head, a line over all of them."""
    bars = tuple(
        Bar(f"layer {i}", max(heads), number(max(heads)), (min(heads), max(heads)) if len(heads) > 1 else None)
        for i, heads in enumerate(layers)
    )
    return Bars(caption, bars)


def _folded(table: Table) -> Details:
    return Details(table.caption, tuple(table_lines(table)), code=True)
