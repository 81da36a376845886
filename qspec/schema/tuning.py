"""The `tune` part of a recipe: which pairs are searched, on what text, and how many are run to confirm them."""

from typing import Annotated, Generic, TypeVar

from pydantic import Field

from qspec.schema.problems import rule
from qspec.schema.quantization import MOST, KVSpec, QuantSpec, RuleSpec, Strict
from qspec.scheme_table import SCHEMES, WeightScheme, rows_that

D = TypeVar("D")
HEADS = "|".join(row.name for row in rows_that(lambda row: row.head))
Head = Annotated[str, Field(pattern=rf"^(float|{HEADS})(/[1-9][0-9]*)?$")]
"""A draft's head: its scheme, and behind a slash how many ids it is run for (`draft_vocab`)."""
Length = Annotated[int, Field(ge=1, le=64)]


class LayersSpec(Strict):
    """Drafts with weights lowered layer by layer, from their finest form on, by acceptance lost per second saved.

    floor: share of the finest form's acceptance that is kept. patience: states without gain after which it ends.
    """

    floor: float = Field(default=0.5, ge=0, le=1)
    patience: int = Field(default=5, ge=1, le=MOST)


class TuneSpec(Strict, Generic[D]):
    """The space of `qspec tune`: names to settings, every target with every KV format, every draft in every form.

    Empty axes get the device's defaults. `draft_schemes`, `draft_heads`, `draft_kv`: forms of drafts with weights
    (kinds model and self), in place of their own quantization and draft_vocab; `layers` mixes those schemes by layer.
    `lengths`: draft lengths beside plain decoding. `per_category` prompts of `benchmark` give the text that acceptance
    is measured on, `tokens` each; its next ones confirm. `context`: cached tokens where passes are timed, `repeats`
    times. `confirm`: combinations that are run.
    """

    targets: dict[str, QuantSpec] = Field(default={})
    target_kv: dict[str, KVSpec | None] = Field(default={})
    drafts: dict[str, D] = Field(default={})
    draft_schemes: dict[str, QuantSpec] = Field(default={})
    draft_heads: tuple[Head, ...] = Field(default=("float", "W8A8"), min_length=1)
    draft_kv: dict[str, KVSpec | None] = Field(default={"float": None}, min_length=1)
    lengths: tuple[Length, ...] = Field(default=(1, 2, 3, 4, 5, 6, 8), min_length=1)
    batches: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(default=(1, 2, 4), min_length=1)
    per_category: int = Field(default=1, ge=1, le=MOST)
    tokens: int = Field(default=64, ge=4, le=MOST)
    layers: LayersSpec | None = None
    context: int = Field(default=256, ge=8, le=MOST)
    repeats: int = Field(default=7, ge=3, le=1000)
    confirm: int = Field(default=8, ge=1, le=1000)

    @rule
    def _rising(self) -> None:
        for name, values in (("lengths", self.lengths), ("batches", self.batches)):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} {list(values)} do not rise; give each once, in order")
        if self.batches[0] != 1:
            raise ValueError(f"batches start at {self.batches[0]}; start at 1")


def default_targets(cpu: bool) -> dict[str, QuantSpec]:
    """Schemes that the device's kernels multiply, from the most exact on."""
    return _specs(rows_that(lambda row: ("cpu" if cpu else "gpu") in row.targets))


def default_draft_schemes(cpu: bool) -> dict[str, QuantSpec]:
    """Schemes of a draft: it cannot change the output, so the smallest."""
    return _specs(rows_that(lambda row: ("cpu" if cpu else "gpu") in row.drafts)[::-1])


def default_kv() -> dict[str, KVSpec | None]:
    """Floats, and FP8 without calibration."""
    return {"float": None, "fp8": KVSpec(scales="cast")}


def _specs(rows: list[WeightScheme]) -> dict[str, QuantSpec]:
    return {row.name: QuantSpec(scheme=row.name, group_size=row.tune_group) for row in rows}


def head_parts(head: Head) -> tuple[str, int]:
    """Its scheme, and how many ids it is run for; 0: all."""
    scheme, _, size = head.partition("/")
    return scheme, int(size or 0)


def with_head(spec: QuantSpec, head: Head) -> QuantSpec:
    """The same scheme with the output head left alone (`float`) or rounded too."""
    scheme, _ = head_parts(head)
    if scheme == "float" or SCHEMES[spec.scheme].weight is None:
        return spec
    rule = RuleSpec.model_validate({"match": "lm_head", "scheme": scheme, "group_size": SCHEMES[scheme].tune_group})
    fields = {"untie_head": True, "ignore": tuple(p for p in spec.ignore if p != "lm_head")}
    return QuantSpec.model_validate(spec.model_dump() | fields | {"rules": (rule, *spec.rules)})
