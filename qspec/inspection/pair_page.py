"""The page of a pair: formats, scales and saturated codes by kind of layer, and the KV cache."""

from collections.abc import Iterable, Iterator, Sequence

from qspec.inspection.cells import by_key, heads, joined, part, places, short, trio, two_places
from qspec.inspection.pair import HalfView, KVCacheView, PairView, StoredKV, StoredLayer
from qspec.numerics.quantization.distribution import extent
from qspec.readable import number, size
from qspec.report.document import Block, Finding, Heading, Paragraph, Table


def summary(view: PairView) -> list[Block]:
    """Both halves, one line per kind of layer."""
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
    kinds = by_key(half.layers, lambda x: (part(x), *_formats(x)))
    rows = [_formats_row(layers, _is_sparse(half)) for layers in kinds.values()]
    caption = (
        "Scales over all layers of a kind; saturated: codes at the ends of the range. With absmax that is about one "
        "per scale; more was clipped"
    )
    formats = ("scheme", "weights, scale per", "inputs, scale per")
    sparse = ("sparse, %",) if _is_sparse(half) else ()
    columns = ("", "layers", *formats, *heads("weight scale"), "saturated, %\nmedian", "\nmax", *sparse, "bytes")
    other = ("embeddings, norms", *[""] * (len(columns) - 2), size(half.other_bytes))
    return Table(caption, columns, (*rows, other))


def _is_sparse(half: HalfView) -> bool:
    return any(layer.sparse for layer in half.layers)


def _formats_row(layers: Sequence[StoredLayer], sparse: bool) -> tuple[str, ...]:
    one = layers[0]
    scales = [x.scale for x in layers if x.scale is not None]
    spread = [extent(getattr(s, end) for s in scales) for end in ("min", "median", "max")]
    saturated = extent(100 * x.saturated for x in layers if x.saturated is not None)
    numbers = (number(spread[0].min), number(spread[1].median), number(spread[2].max))
    shares = (two_places(saturated.median), two_places(saturated.max))
    blank = ("",) * len((*numbers, *shares))
    return (
        part(one),
        str(len(layers)),
        *_formats(one),
        *((*numbers, *shares) if scales else blank),
        *((places(100 * extent(x.sparse for x in layers).median),) if sparse else ()),
        size(sum(x.bytes for x in layers)),
    )


def _formats(layer: StoredLayer) -> tuple[str, str, str]:
    weights = layer.format if layer.scale is None else f"{layer.format} {layer.granularity}"
    return (layer.scheme, weights, layer.activation)


def _input_table(layers: Iterable[StoredLayer]) -> Table:
    kinds = by_key([x for x in layers if x.input_scale is not None], part)
    rows = tuple(
        (kind, str(len(group)), *trio(x.input_scale for x in group if x.input_scale)) for kind, group in kinds.items()
    )
    return Table("Stored scales of layer inputs", ("", "layers", *heads("input scale")), rows)


def _kv_blocks(kv: KVCacheView | None) -> list[Block]:
    if kv is None:
        return [Paragraph("KV cache: not quantized.")]
    text = f"KV cache: {kv.format}, {ORIGINS[kv.origin]}."
    note: Block = Finding("bad", text) if kv.origin == "never calibrated" else Paragraph(text)
    if kv.origin == "at run time" and not _was_seen(kv):
        return [note]
    sides = {"k_scale": kv.keys, "v_scale": kv.values}
    rows = tuple(_kv_row(name, kv, layers) for name, layers in sides.items())
    columns = ["", "layers", "scale per", *heads("scale"), *heads("stands for")]
    if _was_seen(kv):
        columns += [*heads("seen"), "saturated, %\nmedian", "\nmax"]
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
        *trio(s for x in layers for s in x.scale),
        *trio(a for x in layers for a in x.amax),
    )
    if not _was_seen(kv):
        return row
    shares = extent(100 * x.seen.saturated for x in layers if x.seen and x.seen.saturated is not None)
    amax = trio(max(x.seen.amax) for x in layers if x.seen)
    return (*row, *amax, places(shares.median), places(shares.max))


def every_layer(view: PairView) -> Iterator[Table]:
    """One line per layer of each half."""
    for half in view.halves:
        yield _stored_table(half)
        if half.kv is not None and (half.kv.keys[0].scale or _was_seen(half.kv)):
            yield _stored_kv_table(half.name, half.kv)


def _stored_table(half: HalfView) -> Table:
    static = any(x.input_scale is not None for x in half.layers)
    inputs = ("input scale",) if static else ()
    sparse = ("sparse, %",) if _is_sparse(half) else ()
    columns = ("", "scheme", "scale per", "scales", *heads("weight scale"), "saturated, %", *inputs, *sparse, "bytes")
    rows = tuple(
        (
            short(x.name),
            x.scheme if x.scale else x.format,
            x.granularity,
            str(x.scales),
            *(map(number, (x.scale.min, x.scale.median, x.scale.max)) if x.scale else ("", "", "")),
            "" if x.saturated is None else two_places(100 * x.saturated),
            *(("" if x.input_scale is None else number(x.input_scale),) if static else ()),
            *((places(100 * x.sparse),) if sparse else ()),
            size(x.bytes),
        )
        for x in half.layers
    )
    return Table(f"{half.name}: linear layers", columns, rows)


def _stored_kv_table(name: str, kv: KVCacheView) -> Table:
    seen = ("seen", "saturated, %") if _was_seen(kv) else ()
    sides = ("k_scale", "stands for", *seen, "v_scale", "stands for", *seen)
    rows = tuple(
        (short(k.name), *_kv_cells(k, bool(seen)), *_kv_cells(v, bool(seen)))
        for k, v in zip(kv.keys, kv.values, strict=True)
    )
    return Table(f"{name}: KV cache by layer (several values: one per KV head)", ("", *sides), rows)


def _kv_cells(x: StoredKV, seen: bool) -> tuple[str, ...]:
    cells = (joined(map(number, x.scale)) or "–", joined(map(number, x.amax)) or "–")
    if not seen or x.seen is None:
        return cells
    share = "–" if x.seen.saturated is None else places(100 * x.seen.saturated)
    return (*cells, joined(map(number, x.seen.amax)), share)
