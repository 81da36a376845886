"""Weights as the C++ core reads them: panels of eight outputs, input after input (see native/kernels.h)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.errors import IntegrityError
from qspec.numerics.quantization.affine import QTensor
from qspec.numerics.quantization.blocks import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.numerics.quantization.outliers import concatenated, nothing
from qspec.numerics.quantization.packing import pack_nibbles
from qspec.plan import TensorScheme
from qspec.records import QLinear

LANES = 8
WORDS = 32
"""Integer products of codes in groups, and of INT4 ones, read this many inputs at once."""
_F32, _BF16, _F16, _FP8, _INT8, _INT4, _INT8_DOT, _INT4_DOT = range(8)
_FLOAT_KINDS = {torch.float32: _F32, torch.bfloat16: _BF16, torch.float16: _F16}
_FLOAT_INPUT, _INT8_INPUT, _FP8_INPUT, _INT8_GROUP_INPUT = range(4)
_FP8_FACTOR = 256.0
"""The core reads e4m3 bits as float16, which gives value / 256."""

Member = Tensor | QLinear
Form = tuple[int, int, int, float]
"""Kind of codes, kind of inputs, inputs per scale, fixed scale of inputs (0: made per row)."""


@dataclass(frozen=True)
class Packed:
    """A weight `[N, K]` in panels; `scale`, `bias`, `half_scale` and `zero` are None where there are none.

    scale: float32; half_scale: float16 in its place, for groups. bias: float32. zero: int8, of INT4.
    outliers: weights kept apart, as row ends, inputs and values of a CSR matrix whose rows lie as the panels do.
    """

    kind: int
    input: int
    n: int
    k: int
    group: int
    input_scale: float
    codes: Tensor
    scale: Tensor | None
    bias: Tensor | None
    half_scale: Tensor | None = None
    zero: Tensor | None = None
    outliers: tuple[Tensor, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        """Arrays are as long as the core will read: it is given their beginnings alone. Raises `IntegrityError`."""
        lanes = -(-self.n // LANES) * LANES
        scales = lanes * (self.k // max(1, self.group))
        ends, inputs, values = self.outliers or (None, None, None)
        due = [
            (self.codes, self.codes.dtype, self.codes.numel()),
            (self.scale, torch.float32, scales),
            (self.half_scale, torch.float16, scales),
            (self.zero, torch.int8, scales),
            (self.bias, torch.float32, lanes),
            (ends, torch.int32, lanes + 1),
            (inputs, torch.int32, 0 if ends is None else int(ends[-1])),
            (values, torch.float32, 0 if ends is None else int(ends[-1])),
        ]
        for array, dtype, count in due:
            if array is not None and (array.dtype, array.numel(), array.is_contiguous()) != (dtype, count, True):
                value = f"a weight {self.n} x {self.k}: {list(array.shape)} of {array.dtype}"
                raise IntegrityError(value, f"{count} of {dtype} are due", "fetch an intact copy of the model")

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """In the order of `Weight` in native/model.h."""
        return self.codes, self.scale, self.bias, self.half_scale, self.zero, *(self.outliers or (None, None, None))


def linear_obstacle(linear: QLinear) -> str | None:
    """Why the C++ core does not run a quantized layer; None when it does."""
    weight, k = linear.weight, linear.weight.shape[1]
    if linear.outliers is not None and linear.activation is not None and linear.activation.fmt != INT8:
        return f"outliers beside {linear.activation.fmt.name} inputs"
    if weight.zero_point is not None and (linear.activation is None or weight.fmt != INT4):
        return f"zero points of {weight.fmt.name} weights" + ("" if linear.activation else " with float inputs")
    if weight.fmt not in (INT4, INT8, FP8_E4M3):
        return f"{weight.fmt.name} weights"
    if k % (group := _group(weight)) or (weight.fmt == INT4 and group % LANES):
        return f"groups of {group} in {k} inputs"
    if linear.activation is None:
        return None
    return _input_obstacle(linear.activation, weight)


def _input_obstacle(activation: TensorScheme, weight: QTensor) -> str | None:
    granularity = activation.granularity
    served = isinstance(granularity, PerToken) or _by_group(activation, weight)
    if not activation.dynamic:
        served = isinstance(granularity, PerTensor)
    if activation.fmt not in (INT8, FP8_E4M3) or not served or not activation.symmetric:
        return f"{activation.fmt.name} inputs {granularity}"
    if activation.fmt.is_float != weight.fmt.is_float:
        return f"{activation.fmt.name} inputs of {weight.fmt.name} weights"
    group, k = _group(weight), weight.shape[1]
    if activation.fmt == INT8 and ((group != k and group % WORDS) or (weight.fmt == INT4 and k % WORDS)):
        return f"int8 inputs of groups of {group} in {k}"
    return None


def _by_group(activation: TensorScheme, weight: QTensor) -> bool:
    """Whether inputs have a scale for each group of the weight."""
    return activation.fmt == INT8 and activation.granularity == PerGroup(_group(weight))


def member_form(member: Member) -> Form:
    """The form that members of one merged layer must share."""
    if isinstance(member, Tensor):
        return _FLOAT_KINDS.get(member.dtype, _F32), _FLOAT_INPUT, member.shape[1], 0.0
    weight, scale = member.weight, 0.0 if member.input_scale is None else float(member.input_scale)
    kinds = {INT4.name: _INT4, INT8.name: _INT8, FP8_E4M3.name: _FP8}
    if member.activation is None:
        return kinds[weight.fmt.name], _FLOAT_INPUT, _group(weight), 0.0
    if not weight.fmt.is_float:
        inputs = _INT8_GROUP_INPUT if _by_group(member.activation, weight) else _INT8_INPUT
        return _INT8_DOT if weight.fmt == INT8 else _INT4_DOT, inputs, _group(weight), scale
    return _FP8, _FP8_INPUT, _group(weight), scale


def pack_linears(members: Sequence[Member], biases: Sequence[Tensor | None], paired: bool = False) -> Packed:
    """Layers that share an input as one weight: rows after one another, or (`paired`) panels in turns."""
    kind, input_kind, group, input_scale = member_form(members[0])
    rows = [m.shape[0] if isinstance(m, Tensor) else m.weight.shape[0] for m in members]
    k = members[0].shape[1] if isinstance(members[0], Tensor) else members[0].weight.shape[1]
    codes = _joined([_code_panels(_codes(m), kind) for m in members], paired)
    scale = half = bias = zero = None
    if any(isinstance(m, QLinear) for m in members):
        scale = _joined([_panels(_row_scales(m.weight)) for m in members if isinstance(m, QLinear)], paired)
        scale = scale * _FP8_FACTOR if kind == _FP8 else scale
        if group < k and torch.equal(scale.half().float(), scale):  # in float32 a fifth of what INT4 g32 reads
            half, scale = scale.half(), None
        zero = _joined_zeros([m.weight for m in members if isinstance(m, QLinear)], paired)
    if any(b is not None for b in biases):
        parts = [torch.zeros(n) if b is None else b.float() for n, b in zip(rows, biases, strict=True)]
        bias = _joined([_panels(part[:, None]) for part in parts], paired)
    n = len(codes) * LANES if len(members) > 1 else rows[0]
    outliers = _pack_outliers(members, rows, k, paired)
    return Packed(kind, input_kind, n, k, group, input_scale, codes, scale, bias, half, zero, outliers)


def pack_rows(weight_VK: Tensor) -> Packed:
    """An embedding, row after row."""
    weight_VK = weight_VK if weight_VK.dtype in _FLOAT_KINDS else weight_VK.float()
    v, k = weight_VK.shape
    return Packed(_FLOAT_KINDS[weight_VK.dtype], _FLOAT_INPUT, v, k, k, 0.0, weight_VK.contiguous(), None, None)


def _pack_outliers(
    members: Sequence[Member], rows: Sequence[int], k: int, paired: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    outliers = [m.outliers if isinstance(m, QLinear) else None for m in members]
    if all(matrix is None for matrix in outliers):
        return None
    whole = concatenated([nothing((n, k)) if x is None else x for n, x in zip(rows, outliers, strict=True)])

    def by_panel(x_N: Tensor) -> Tensor:
        return _joined([_panels(part[:, None]) for part in x_N.split(list(rows))], paired).flatten()

    counts_N, starts_N = by_panel(whole.indptr.diff().long()), by_panel(whole.indptr[:-1].long())
    ends_N = F.pad(counts_N.cumsum(0), (1, 0))
    place = torch.arange(int(ends_N[-1])) + (starts_N - ends_N[:-1]).repeat_interleave(counts_N)
    return ends_N.int(), whole.indices[place].contiguous(), whole.values.float()[place].contiguous()


def _joined(panels: Sequence[Tensor], paired: bool) -> Tensor:
    if len(panels) == 1:
        return panels[0]  # a head is large: no second copy
    return torch.stack(list(panels), 1).flatten(0, 1) if paired else torch.cat(list(panels))


def _joined_zeros(weights: Sequence[QTensor], paired: bool) -> Tensor | None:
    if all(weight.zero_point is None for weight in weights):
        return None
    parts = [torch.zeros_like(w.scale) if w.zero_point is None else w.zero_point for w in weights]
    return _joined([_panels(part.to(torch.int8)) for part in parts], paired)


def _codes(member: Member) -> Tensor:
    if isinstance(member, QLinear):
        codes = member.weight.codes
        return codes.view(torch.uint8) if member.weight.fmt == FP8_E4M3 else codes
    return member if member.dtype in _FLOAT_KINDS else member.float()


def _code_panels(codes_NK: Tensor, kind: int) -> Tensor:
    """`[N/8, K, 8]`; INT8 products `[N/8, K/4, 8, 4]`; INT4, and its products, `[N/8, K/8, 8]` words."""
    if kind == _INT4_DOT:
        unsigned = (codes_NK + 8).view(torch.uint8).unflatten(1, (-1, 2, 4))
        return _panels((unsigned[:, :, 0] | unsigned[:, :, 1] << 4).contiguous().flatten(1).view(torch.int32))
    if kind == _INT4:
        return _panels(pack_nibbles(codes_NK).view(torch.int32))
    if kind == _INT8_DOT:
        quads = F.pad(codes_NK, (0, -codes_NK.shape[1] % LANES)).contiguous().view(torch.int32)
        return _panels(quads)
    return _panels(codes_NK)


def _panels(x_NK: Tensor) -> Tensor:
    """`[N/8, K, 8]`, rows filled up with zeros."""
    missing = -x_NK.shape[0] % LANES
    padded = F.pad(x_NK, (0, 0, 0, missing)) if missing else x_NK.contiguous()
    return padded.view(-1, LANES, x_NK.shape[1]).transpose(1, 2).contiguous()


def _group(weight: QTensor) -> int:
    """Inputs that share a scale."""
    match weight.granularity:
        case PerGroup(size):
            return size
        case PerBlock(_, columns):
            return columns
        case _:
            return weight.shape[1]


def _row_scales(weight: QTensor) -> Tensor:
    """Float32 `[N, groups]`."""
    n = weight.shape[0]
    match weight.granularity:
        case PerTensor():
            return weight.scale.float().reshape(1, 1).expand(n, 1)
        case PerBlock(rows, _):
            return weight.scale.float().repeat_interleave(rows, 0)[:n]
        case PerChannel() | PerToken() | PerGroup(_):
            return weight.scale.float()
