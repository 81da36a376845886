"""Every scheme of weights: one row says what its name means, where it runs, and why it does not run elsewhere.

Plans, recipes, device rules, exports and `qspec tune` read this table and ask for no scheme by name, so that a further
scheme is a further row, and its kernel. Versions: vLLM 0.33, transformers 5.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.clipping import ABSMAX, Clip
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.plan import LayerScheme, TensorScheme

GROUP = 128
"""Inputs that share a scale of schemes in groups where a recipe does not say."""
BLOCK = 128
"""Rows and columns of an FP8_BLOCK tile, and the activation group beside it: the only size that servers run."""
ADA = 89
"""Compute capability of Ada cards (L40S, RTX 4090): the oldest with FP8 matmuls."""

Level = Literal["refused", "warning", "note"]
Kind = Literal["cpu", "gpu"]


class Place(NamedTuple):
    """A device, its compute capability (None: a CPU), and the dtype of what is not quantized."""

    device: str
    capability: int | None
    dtype: str = "auto"


@dataclass(frozen=True)
class Remark:
    """A refusal, a warning or a note about a scheme in the places that `where` is true of."""

    level: Level
    rule: str
    fix: str
    where: Callable[[Place], bool]


@dataclass(frozen=True)
class WeightScheme:
    """One row. weight None: layers keep their dtype. inputs None: activations keep theirs.

    blocks: which weights share a scale; None: groups of inputs, of the size that a recipe gives.
    grouped: also in groups, of weights and inputs alike, where a recipe gives a size beside its name.
    vllm, vllm_cpu: why vLLM does not serve it, anywhere or on a CPU; experts: why transformers loads no mixture of it.
    targets, drafts, head, tune_group: where `qspec tune` tries it by default, and in which groups.
    """

    name: str
    help: str
    weight: NumFormat | None
    blocks: Granularity | None = None
    inputs: TensorScheme | None = None
    grouped: bool = False
    remarks: tuple[Remark, ...] = ()
    vllm: str = ""
    vllm_cpu: str = ""
    vllm_cpu_note: str = ""
    experts: str = ""
    targets: tuple[Kind, ...] = ()
    drafts: tuple[Kind, ...] = ()
    head: bool = False
    tune_group: int | None = None

    @property
    def float8(self) -> bool:
        return self.weight is not None and self.weight.is_float

    @property
    def zero_points(self) -> bool:
        """Whether its weights may have zero points."""
        return self.weight == INT4

    @property
    def weights_only(self) -> bool:
        return self.weight is not None and self.inputs is None

    @property
    def sized(self) -> bool:
        """Whether a group size beside its name means anything."""
        return self.weight is not None and (self.blocks is None or self.grouped)

    def layer(self, group: int = GROUP, clip: Clip = ABSMAX) -> LayerScheme | None:
        """Formats of a layer, and the clip of its weights; None: it keeps its dtype."""
        if self.weight is None:
            return None
        return LayerScheme(self.name, TensorScheme(self.weight, self.blocks or PerGroup(group), clip=clip), self.inputs)

    def means(self, weight: TensorScheme, inputs: TensorScheme | None) -> bool:
        """Whether these are its formats, whatever the size of groups."""
        own = self.layer()
        if own is None or (own.activation is None) != (inputs is None):
            return False
        pairs = [(own.weight, weight), *([(own.activation, inputs)] if own.activation and inputs else [])]
        return all(_kind(ours) == _kind(theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class Modifier:
    """A recipe's addition to a scheme, run by qspec's own engine alone. fix: how to leave it out.

    has: whether a layer's formats show it. transformers: what happens there; None: it loads.
    """

    name: str
    rule: str
    fix: str
    has: Callable[[LayerScheme], bool]
    transformers: str | None = None


def _kind(tensor: TensorScheme) -> tuple[bool, int, type[Granularity], bool]:
    return tensor.fmt.is_float, tensor.fmt.bits, type(tensor.granularity), tensor.dynamic


def _gpu(low: int = 0, high: int = 1000) -> Callable[[Place], bool]:
    """GPUs of compute capability `low` to `high`."""
    return lambda at: at.capability is not None and low <= at.capability <= high


def _cpu(at: Place) -> bool:
    return at.capability is None


_INT8 = "INT8 matmul kernels exist for SM75 to SM90 only"
_ON_INT8 = tuple(Remark("refused", _INT8, "use scheme: FP8_DYNAMIC", _gpu(*sm)) for sm in ((0, 74), (91, 1000)))
_DECODED = "a CPU has no FP8 matmul: weights are decoded at load, so files shrink and speed does not rise"
_HALF_RATE = "with float32 accumulation INT8 has twice FP8's matmul rate there (prefill, large batches)"
_W8A16 = "has no FP8 matmul: vLLM multiplies FP8 weights with 16-bit inputs (W8A16, Marlin), at 16-bit speed"
_ON_FP8 = (
    Remark("warning", _W8A16, "use scheme: W8A8, which INT8 units multiply there", _gpu(0, ADA - 1)),
    Remark("note", _DECODED, "use scheme: W8A8 for speed on CPU", _cpu),
    Remark("note", _HALF_RATE, "compare scheme: W8A8", lambda at: at.device == "rtx4090"),
)
_LOSES = "FP8 scales below 6e-5 lose bits in float16"
_IN_HALF = Remark("warning", _LOSES, "use dtype: auto (bfloat16)", lambda at: at.dtype == "float16")
_FP8_CPU = "no usable FP8 matmul on CPU; use W8A8"
_ARM = "no server multiplies INT4 weights with INT8 inputs but vLLM on Arm CPUs; qspec's own engine (CPU) does"
_ELSEWHERE = "use scheme: W4A16 or W8A8 to serve it elsewhere"
_EXPERTS = "stops at INT8 experts: it unpacks those in INT4 and FP8 only"


def _per_token(fmt: NumFormat) -> TensorScheme:
    return TensorScheme(fmt, PerToken(), dynamic=True)


SCHEMES = {
    row.name: row
    for row in (
        WeightScheme("none", "keeps the layer's dtype", None, targets=("cpu", "gpu")),
        WeightScheme(
            "FP8_BLOCK",
            f"float8 weights in tiles of {BLOCK} x {BLOCK}, inputs in groups of {BLOCK} at run time",
            FP8_E4M3,
            PerBlock(BLOCK, BLOCK),
            TensorScheme(FP8_E4M3, PerGroup(BLOCK), dynamic=True),
            remarks=(
                *_ON_FP8,
                Remark(
                    "refused",
                    "block FP8 has no kernel of its own on Ada and runs slower there than 16-bit weights",
                    "use scheme: FP8_DYNAMIC or W8A8",
                    _gpu(ADA, ADA),
                ),
                replace(_IN_HALF, level="refused", rule="block FP8 kernels return bfloat16 only"),
            ),
            vllm_cpu=_FP8_CPU,
        ),
        WeightScheme(
            "FP8_DYNAMIC",
            "float8 weights with a scale per row, inputs per token at run time",
            FP8_E4M3,
            PerChannel(),
            _per_token(FP8_E4M3),
            remarks=(*_ON_FP8, _IN_HALF),
            vllm_cpu=_FP8_CPU,
            targets=("gpu",),
            drafts=("gpu",),
        ),
        WeightScheme(
            "FP8",
            "float8 weights and inputs with one stored scale each",
            FP8_E4M3,
            PerTensor(),
            TensorScheme(FP8_E4M3, PerTensor()),
            remarks=(
                *_ON_FP8,
                _IN_HALF,
                Remark(
                    "note", "per-tensor FP8 has been slower than BF16 in prefill there", "try FP8_DYNAMIC", _gpu(100)
                ),
            ),
            vllm_cpu=_FP8_CPU,
        ),
        WeightScheme(
            "W8A8",
            "INT8 weights with a scale per row, inputs per token at run time; both in groups with a group_size",
            INT8,
            PerChannel(),
            _per_token(INT8),
            grouped=True,
            remarks=_ON_INT8,
            experts=_EXPERTS,
            targets=("cpu", "gpu"),
            head=True,
        ),
        WeightScheme(
            "W4A8",
            "INT4 weights in groups, INT8 inputs per token at run time",
            INT4,
            inputs=_per_token(INT8),
            remarks=(Remark("note", _ARM, _ELSEWHERE, _cpu), Remark("refused", _ARM, _ELSEWHERE, _gpu())),
            vllm="vLLM has a kernel on Arm CPUs alone, not proven here; qspec's own engine runs it, or use W4A16",
            targets=("cpu",),
            drafts=("cpu",),
            tune_group=32,
        ),
        WeightScheme(
            "W4A16",
            "INT4 weights in groups, inputs as they are",
            INT4,
            vllm_cpu_note=", run as W4A8 unless VLLM_CPU_INT4_W4A8=0",
            targets=("cpu", "gpu"),
            drafts=("cpu", "gpu"),
            head=True,
            tune_group=32,
        ),
    )
}
"""By name, from the most exact to the smallest."""

IN_GROUPS = Modifier(
    "W8A8 in groups",
    "no server multiplies INT8 in groups (vLLM refuses the checkpoint at load); qspec's own engine (CPU) does",
    "leave group_size out",
    lambda scheme: scheme.weight.fmt == INT8 and isinstance(scheme.weight.granularity, PerGroup),
)
OUTLIERS = Modifier(
    "outliers",
    "no server runs dense + sparse weights; qspec's own engine (CPU) does",
    "set outliers: null",
    lambda scheme: scheme.outliers > 0,
    "stops at format dense-and-sparse: it cannot run outliers",
)
HADAMARD = Modifier(
    "rotation.r4",
    "needs a Hadamard transform at run time, which is proven in qspec's own engine (CPU) alone",
    "set rotation: {r4: false} (r1 and r2 need none)",
    lambda scheme: False,
    "loads without rotation.r4's transform (it ignores transform_config) and computes garbage",
)
MODIFIERS = (IN_GROUPS, OUTLIERS, HADAMARD)


def named(rows: Iterable[WeightScheme]) -> str:
    """Names that a recipe may give, for refusals: `W8A8, W4A8 or W4A16`."""
    *first, last = [row.name for row in rows]
    return f"{', '.join(first)} or {last}" if first else last


def rows_that(has: Callable[[WeightScheme], bool]) -> list[WeightScheme]:
    """Rows that a recipe may name and `has` is true of."""
    return [row for row in SCHEMES.values() if has(row)]


def in_groups(scheme: LayerScheme, size: int) -> LayerScheme:
    """The scheme with a scale per `size` inputs, of weights and of activations alike."""
    assert scheme.activation is not None
    weight, activation = (replace(part, granularity=PerGroup(size)) for part in (scheme.weight, scheme.activation))
    return replace(scheme, weight=weight, activation=activation)


def name_of(weight: TensorScheme, inputs: TensorScheme | None) -> str:
    """The field's name for formats that were read from elsewhere."""
    name = next((row.name for row in SCHEMES.values() if row.means(weight, inputs)), None)
    if name is None and weight.fmt.is_float and inputs is not None:
        return "FP8"
    return name or f"W{weight.fmt.bits}A{16 if inputs is None else inputs.fmt.bits}"
