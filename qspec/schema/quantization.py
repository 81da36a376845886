"""How one model is quantized: the `quantization` part of a recipe."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from qspec.schema.problems import broken_rules, rule
from qspec.scheme_table import (
    GROUP,
    HADAMARD,
    IN_GROUPS,
    OUTLIERS,
    SCHEMES,
    Modifier,
    WeightScheme,
    named,
    rows_that,
)

MOST = 1_000_000
"""The most of anything that is counted: more is a slip, and would fill the memory or never end."""
RANDOM_ROWS = 8
"""Default of `QuantSpec.random_rows`."""


def _known(name: str) -> str:
    names = [row.name for row in SCHEMES.values()]
    if name not in names:
        *first, last = map(repr, names)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
    return name


Scheme = Annotated[str, AfterValidator(_known)]
"""A row of `scheme_table` that a recipe may name."""


class Strict(BaseModel):
    """Base of all recipe parts: unknown fields refused, values immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _by_its_rules(self) -> Self:
        if broken := broken_rules(self):
            raise ValueError("\n".join(broken))
        return self


class ClipSpec(Strict):
    """Range of a block: its maximum, a percentile of |x|, or the clip of least squared error."""

    method: Literal["absmax", "percentile", "mse"] = "absmax"
    percentile: float = Field(default=99.9, gt=50, le=100)


class SmoothingSpec(Strict):
    """Move activation outliers into weights (SmoothQuant). `auto` searches the strength per layer by output error."""

    strength: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"


class RotationSpec(Strict):
    """Orthogonal rotations that spread outliers over channels (QuaRot, SpinQuant), folded into weights in float64.

    r1: the residual stream (folds norm gains, unties the head). r2: values, per head. r4: the input of `down_proj`, by
    a Hadamard transform at run time.
    """

    r1: bool = True
    r2: bool = True
    r4: bool = False

    @rule
    def _rotates_something(self) -> None:
        if not (self.r1 or self.r2 or self.r4):
            raise ValueError("rotation without r1, r2 and r4 does nothing; set one of them, or leave rotation out")


class OutlierSpec(Strict):
    """Weights kept apart in float, in a sparse matrix beside the codes. Only qspec runs it."""

    share: float = Field(gt=0, le=5, description="percent of a layer's weights")


class MixedSpec(Strict):
    """A scheme per layer, solved for a budget from measured sensitivities. Give `bits` or `megabytes`."""

    candidates: tuple[Scheme, ...] = Field(default=("W4A16", "W8A8", "none"), min_length=2)
    bits: float | None = Field(default=None, gt=0, le=32, description="mean bits of a weight, scales included")
    megabytes: float | None = Field(default=None, gt=0, description="of all linear layers that are not ignored")
    metric: Literal["output", "kl"] = "output"

    @rule
    def _one_budget(self) -> None:
        if (self.bits is None) == (self.megabytes is None):
            given = "neither bits nor megabytes" if self.bits is None else "both bits and megabytes"
            raise ValueError(f"mixed gives {given}; set one of them, for example bits: 6")
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError(f"mixed.candidates {', '.join(self.candidates)} repeat a scheme; name each once")


_AT_RUN_TIME = "set granularity: token_head or channel"


class KVPartSpec(Strict):
    """How keys, or values, are stored where they differ from the rest of `kv`."""

    format: Literal["fp8_e4m3", "int8", "int4"]
    granularity: Literal["tensor", "head", "token_head", "channel"]
    group: int = Field(default=32, ge=8, le=1024, description="tokens that share the scales of `channel`")
    outliers: float = Field(default=0.0, ge=0, le=5, description="percent kept in float")

    @rule
    def _stored_scales_are_plain_fp8(self) -> None:
        stored = self.granularity in ("tensor", "head")
        if stored and self.format in ("int8", "int4"):
            raise ValueError(f"{self.format} KV has no static scales in any runtime; {_AT_RUN_TIME}")
        if stored and self.outliers:
            raise ValueError(f"outliers are chosen at run time, not stored; {_AT_RUN_TIME}")


class KVSpec(Strict):
    """KV-cache format; `key` and `value` override it for one of them.

    tensor, head: stored scales, `calibrated` on data, `cast` (1.0), or per layer the one of less measured KL (`auto`).
    token_head: a scale per token and head, made at run time. channel: one per channel and `group` tokens.
    residual: newest tokens kept in float. query: also round queries, with stored scales. skip_layers: kept in float.
    granularity auto: tensor, head or token_head by measured KL, and in float what none of them holds.
    """

    format: Literal["fp8_e4m3", "int8", "int4"] = "fp8_e4m3"
    granularity: Literal["tensor", "head", "token_head", "auto"] = "tensor"
    scales: Literal["calibrated", "cast", "auto"] = "calibrated"
    key: KVPartSpec | None = None
    value: KVPartSpec | None = None
    query: Literal["tensor", "head"] | None = None
    residual: int = Field(default=0, ge=0, le=MOST)
    skip_layers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"] = ()

    @rule
    def _int8_is_dynamic(self) -> None:
        if self.format in ("int8", "int4") and self.granularity != "token_head":
            rule = f"{self.format} KV has no static scales in any runtime"
            raise ValueError(f"{rule}; set granularity: token_head, or fp8_e4m3")

    @rule
    def _auto_has_a_choice(self) -> None:
        for name in ("key", "value", "query") if self.granularity == "auto" else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"granularity: auto chooses for keys and values alike; leave {name} out, or name a granularity"
                )

    @rule
    def _parts_agree(self) -> None:
        parts = [part or self for part in (self.key, self.value)]
        groups = {p.group for p in parts if isinstance(p, KVPartSpec) and p.granularity == "channel"}
        if len(groups) > 1:
            raise ValueError("keys and values leave the float window together; give both the same group")
        if self.scales == "auto" and all(part.granularity in ("token_head", "channel") for part in parts):
            raise ValueError("scales: auto chooses among stored scales; set granularity: tensor or head, or no scales")
        if self.query and (parts[0].format != "fp8_e4m3" or parts[0].granularity not in ("tensor", "head")):
            raise ValueError("query is for kernels that read fp8_e4m3 keys; give keys tensor or head scales")

    @property
    def by_channel(self) -> bool:
        """Whether tokens are stored in groups."""
        return any(part is not None and part.granularity == "channel" for part in (self.key, self.value))


def _pattern(match: str) -> str:
    """A layer pattern as `plan.Rule` reads it; `re:` must compile."""
    try:
        re.compile(match.removeprefix("re:") if match.startswith("re:") else "")
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"{match!r} is no regular expression ({e}); mend it, or drop re: for a plain name") from None
    return match


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]


class RuleSpec(Strict):
    """Another scheme for the linear layers that `match`: a name, its last part, or `re:` and a pattern."""

    match: Pattern
    scheme: Scheme
    group_size: int | None = Field(default=None, gt=0, le=MOST)


class QuantSpec(Strict):
    """How one model is quantized."""

    engine: Literal["qspec", "llmcompressor"] = "qspec"
    scheme: Scheme = Field(default="W8A8", description="; ".join(f"{row.name}: {row.help}" for row in SCHEMES.values()))
    method: Literal["rtn", "gptq", "smoothquant+gptq", "awq", "autoround"] = "rtn"
    group_size: int | None = Field(
        default=None,
        gt=0,
        le=MOST,
        description=f"inputs that share a scale: of {named(rows_that(lambda row: row.sized and not row.grouped))} "
        f"({GROUP}), and of {named(rows_that(lambda row: row.grouped))} (none: a scale per row)",
    )
    symmetric: bool = Field(
        default=True, description="false: groups of 4-bit weights have zero points, for ranges that do not centre on 0"
    )
    clip: ClipSpec = ClipSpec()
    smoothing: SmoothingSpec | None = None
    rotation: RotationSpec | None = None
    outliers: OutlierSpec | None = None
    mixed: MixedSpec | None = None
    random_rows: int = Field(
        default=RANDOM_ROWS,
        ge=0,
        le=MOST,
        description="rows of random tokens beside the text: what no text in one language shows",
    )
    untie_head: bool = Field(default=False, description="give a tied head a matrix of its own, to quantize it")
    rules: tuple[RuleSpec, ...] = ()
    ignore: tuple[Pattern, ...] = ("lm_head",)
    kv: KVSpec | None = None

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """Additions to the schemes that qspec's own engine alone runs.

        W8A8 is in groups where a size stands beside its name, not as a candidate of `mixed`.
        """
        own = [(rule.scheme, rule.group_size) for rule in self.rules]
        whole = [] if self.mixed is not None else [(self.scheme, self.group_size)]
        used = {
            IN_GROUPS: any(SCHEMES[name].grouped and size is not None for name, size in (*own, *whole)),
            OUTLIERS: self.outliers is not None,
            HADAMARD: self.rotation is not None and self.rotation.r4,
        }
        return tuple(modifier for modifier, given in used.items() if given)

    @rule
    def _engine_has_method(self) -> None:
        if self.engine == "qspec" and self.method not in ("rtn", "gptq"):
            fix = "smoothing and method: gptq" if self.method == "smoothquant+gptq" else "engine: llmcompressor"
            raise ValueError(f"engine qspec has the methods rtn and gptq; for {self.method} set {fix}")
        if self.engine == "llmcompressor" and self.smoothing is not None:
            raise ValueError("smoothing belongs to engine qspec; with llmcompressor set method: smoothquant+gptq")
        if self.engine == "llmcompressor" and self.rotation is not None:
            raise ValueError("rotation belongs to engine qspec; set engine: qspec, or leave rotation out")
        if self.engine == "llmcompressor" and self.random_rows != RANDOM_ROWS:
            raise ValueError("random_rows belong to engine qspec; set engine: qspec, or leave random_rows out")
        if self.engine == "llmcompressor" and self.untie_head:
            raise ValueError("untie_head belongs to engine qspec; set engine: qspec, or leave it out")
        if self.engine == "llmcompressor" and self.mixed is not None:
            raise ValueError("mixed belongs to engine qspec; set engine: qspec, or leave mixed out")
        row = SCHEMES[self.scheme]
        if self.engine == "llmcompressor" and row.weight is None:
            raise ValueError("scheme none leaves llmcompressor nothing to do; set engine: qspec, or another scheme")
        if self.method == "awq" and not (row.weights_only and row.zero_points):
            fits = named(rows_that(lambda row: row.weights_only and row.zero_points))
            raise ValueError(f"method awq is for 4-bit weights; set scheme: {fits}")
        if self.method == "smoothquant+gptq" and row.weights_only:
            raise ValueError(f"smoothquant helps quantized activations, {row.name} keeps them; set method: gptq")

    @property
    def schemes(self) -> frozenset[str]:
        """Every scheme that a layer may get; `mixed` takes the place of `scheme`."""
        rest = self.mixed.candidates if self.mixed is not None else (self.scheme,)
        return frozenset((*(rule.scheme for rule in self.rules), *rest))

    @property
    def rows(self) -> list[WeightScheme]:
        """Rows of `schemes`, in the table's order."""
        return [row for row in SCHEMES.values() if row.name in self.schemes]

    @rule
    def _outliers_have_a_dense_part(self) -> None:
        if self.outliers is not None and self.engine == "llmcompressor":
            raise ValueError("outliers belong to engine qspec; set engine: qspec, or leave outliers out")
        if self.outliers is not None and all(row.weight is None for row in self.rows):
            raise ValueError("outliers are kept beside rounded weights, scheme none rounds nothing; set another scheme")

    @rule
    def _zero_points_have_a_subject(self) -> None:
        if not self.symmetric and not any(row.zero_points for row in self.rows):
            fits = named(rows_that(lambda row: row.zero_points))
            raise ValueError(f"symmetric: false is for 4-bit weights; set scheme: {fits}, or leave it out")
        if not self.symmetric and self.mixed is not None:
            raise ValueError("mixed weighs symmetric schemes; leave symmetric: false out, or name schemes by rules")


class ModelSpec(Strict):
    """A model and its quantization.

    `model`: Hub id, local folder, `*.gguf` file, or `package:<import name>/<file>` for weights that an installed
    Python package carries. `base_model`: the Hub id of what lies in a file, folder or package, for a published card.
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    base_model: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
    quantization: QuantSpec = QuantSpec()
