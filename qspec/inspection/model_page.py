"""The page of a float model: ranges and outliers by kind of layer, what each scheme would cost, activations."""

from collections.abc import Callable, Iterator, Sequence

from qspec.inspection.cells import by_key, heads, joined, part, short, trio, two_places
from qspec.inspection.model import SCHEMES, Distribution, KeyBias, KVView, LayerView, ModelView
from qspec.numerics.quantization.distribution import OUTLIER_RATIO
from qspec.readable import number, percent
from qspec.report.document import Block, Finding, Heading, Paragraph, Table, tabulate

OUTLIERS = f"outliers: share of input channels whose largest magnitude is above {OUTLIER_RATIO:g} times the median's"


def summary(view: ModelView) -> list[Block]:
    """One line per kind of layer."""
    kinds = by_key(view.layers, part)
    blocks: list[Block] = [
        Heading("Weights"),
        _spread_table(f"kurtosis: 3 is normal, more is heavier tails; {OUTLIERS}", kinds, lambda x: x.weight),
        Heading("Cost of a scheme"),
        _cost_table(kinds),
    ]
    if view.calibration is not None:
        caption = f"What the layers are given; kurtosis of a sample of rows; {OUTLIERS}"
        blocks += [Heading("Activations"), _spread_table(caption, kinds, _input), *_lost(view)]
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
            *trio(part(x).amax for x in layers),
            *trio(part(x).kurtosis for x in layers),
            *trio((100 * part(x).outlier_share for x in layers), two_places),
        )
        for kind, layers in kinds.items()
    )
    columns = ("", "layers", "out x in", *heads("largest"), *heads("kurtosis"), *heads("outliers, %"))
    return Table(caption, columns, rows)


def _lost(view: ModelView) -> list[Block]:
    """Inputs of which one scale loses whole channels, few outliers or many."""
    shares = {x.name: _input(x).lost / _input(x).channels for x in view.layers if _input(x).lost}
    if not shares:
        return []
    worst = max(shares, key=lambda name: shares[name])
    text = f"{len(shares)} of {len(view.layers)} layers have input channels that one INT8 scale rounds to 0"
    return [Finding("open", f"{text}, {short(worst)} {percent(shares[worst])} of them: use smoothing, or a rotation")]


def _cost_table(kinds: dict[str, list[LayerView]]) -> Table:
    caption = (
        "SQNR of the rounded weight in dB: more is better, 6 dB are about one bit (round to nearest, absmax; weights "
        "alone, without what the layer is given). W4A16 in groups of the size shown"
    )
    rows = tuple(
        (
            kind,
            *(cell for name in SCHEMES for cell in trio((x.sqnr_db.get(name, float("nan")) for x in layers), _place)),
            str(layers[0].group_size or "–"),
        )
        for kind, layers in kinds.items()
    )
    return Table(caption, ("", *(head for name in SCHEMES for head in heads(name)), "group"), rows)


def _kv_table(kv: Sequence[KVView]) -> Table:
    sides = {"keys": [x.k_amax for x in kv], "values": [x.v_amax for x in kv]}
    rows = tuple(
        (name, str(len(amax)), *trio(max(heads) for heads in amax), *trio(map(_uneven, amax)))
        for name, amax in sides.items()
    )
    caption = "Largest magnitude of a layer, and how much further its largest head reaches than its smallest"
    return Table(caption, ("", "layers", *heads("largest"), *heads("head / head")), rows)


def _key_bias(biases: Sequence[KeyBias], kv: Sequence[KVView]) -> list[Block]:
    keys = {x.name: x.k_amax for x in kv}
    listed = [x for x in biases if sum(x.outliers)]
    if not listed:
        return [
            Paragraph(f"{len(biases)} layers have one; none is above {OUTLIER_RATIO:g} times what the weights add.")
        ]
    table = tabulate(
        "Layers whose key bias has outlier channels",
        listed,
        ("", lambda x: short(x.name)),
        ("largest", lambda x: number(max(x.amax))),
        ("of weights", lambda x: f"{max(x.amax) / x.weights:.0f}x" if x.weights else "–"),
        ("outliers", lambda x: str(sum(x.outliers))),
        ("in KV heads", lambda x: joined(i for i, count in enumerate(x.outliers) if count)),
        ("largest key", lambda x: number(max(keys[_attention(x.name)])) if keys else "–"),
    )
    text = f"{len(listed)} of {len(biases)} layers have outliers in their key bias: they widen the range of every key."
    return [Finding("open", text), table]


def every_layer(view: ModelView) -> Iterator[Table]:
    """One line per layer."""
    yield _layers_table(view)
    if view.kv:
        rows = tuple((short(x.name), joined(map(number, x.k_amax)), joined(map(number, x.v_amax))) for x in view.kv)
        yield Table("Largest key and value of every KV head", ("", "keys", "values"), rows)


def _layers_table(view: ModelView) -> Table:
    inputs = view.calibration is not None
    columns = ["", "largest", "kurtosis", "outliers", *SCHEMES]
    if inputs:
        columns += ["input\nlargest", "\nkurtosis", "\noutliers"]
    rows = tuple(
        (
            short(x.name),
            *_cells(x.weight),
            *(_place(x.sqnr_db.get(name, float("nan"))) for name in SCHEMES),
            *(_cells(_input(x)) if inputs else ()),
        )
        for x in view.layers
    )
    return Table("Linear layers: weights, SQNR of each scheme in dB, outlier channels counted", tuple(columns), rows)


def _input(layer: LayerView) -> Distribution:
    assert layer.input is not None
    return layer.input


def _attention(name: str) -> str:
    return name.rpartition(".")[0]


def _uneven(heads: Sequence[float]) -> float:
    """Largest head over smallest."""
    return max(heads) / min(heads) if min(heads) else float("nan")


def _place(value: float) -> str:
    return f"{value:.1f}" if value == value and abs(value) != float("inf") else number(value)


def _cells(x: Distribution) -> tuple[str, str, str]:
    return (number(x.amax), number(x.kurtosis), f"{x.outliers}/{x.channels}")


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"
