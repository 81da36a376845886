"""A recipe resolved against the shapes of its models: plans, bytes, rates. No weights, no compute."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qspec.bridges import oneshot
from qspec.bridges.architectures import require_float
from qspec.bridges.text import SUFFIXES, data_names, where_from
from qspec.errors import Problems, SourceError
from qspec.memory import Need
from qspec.models.load import STORED, Header, read_header
from qspec.models.vocab import require_limit
from qspec.numerics.roofline import PassCost, prefill_seconds
from qspec.pair.drafters.registry import kind_of
from qspec.plan import LayerScheme, QuantPlan
from qspec.planning.duration import HalfCost, Step, settled, steps
from qspec.planning.forecast import CONTEXT, Duo, prior, rates
from qspec.quantization.allocate import assumed_plan
from qspec.quantization.rotate import prepared_arch
from qspec.quantization.units import candidate_schemes
from qspec.records import ArchMap
from qspec.schema.datasets import dataset
from qspec.schema.devices import DeviceSheet, read_device
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schema.recipe import Recipe, TaskSpec
from qspec.schemes.build import build_plan, needs_statistics, resolve_plan
from qspec.schemes.device_rules import PlanFinding, device_findings, modifier_findings, raise_refused
from qspec.schemes.footprint import Footprint, footprint, kv_window_bytes

USABLE = 0.9
"""Share of a device's memory that weights and KV may take; the rest is activations and graphs."""
MOST_PADDING = 1024
"""Head rows by which models of one tokenizer differ at most."""


@dataclass(frozen=True)
class PlannedHalf:
    """One half of the pair, resolved: `bytes` under its plan, `plain` with nothing quantized.

    original: the architecture before any rewrite; stored: bytes of a float that is kept. With mixed precision the plan
    is one of the budget's size, not yet the one that measurements will give.
    """

    model: str
    arch: ArchMap
    spec: QuantSpec
    plan: QuantPlan
    schemes: Mapping[str, LayerScheme | None]
    bytes: Footprint
    plain: Footprint
    original: ArchMap
    stored: int

    @property
    def reasons(self) -> list[str]:
        """Why it must see calibration text, in words; empty if it need not."""
        return needs_statistics(self.schemes, self.plan, self.spec)

    @property
    def cost(self) -> HalfCost:
        """The facts that the duration of its stages follows from."""
        rounded = sum(group.parameters for label, group in self.bytes.groups.items() if label != "none")
        kv = self.plan.kv
        return HalfCost(
            stored=self.plain.parameters * self.stored,
            cost=self.plain.cost,
            spec=self.spec,
            weights=self.bytes.parameters,
            rounded=rounded,
            layers=self.arch.n_layers,
            reasons=tuple(self.reasons),
            kv_candidates=0 if kv is None else kv.candidates,
        )

    @property
    def possible(self) -> Mapping[str, LayerScheme | None]:
        """Schemes by layer, and those that a layer may yet get."""
        open_to = candidate_schemes(self.spec) if self.spec.mixed is not None else {}
        return {**self.schemes, **{f"mixed.candidates {name}": scheme for name, scheme in open_to.items()}}


@dataclass(frozen=True)
class PlannedPair:
    """A recipe resolved against shapes. `draft` None: n-gram or MLP speculator (then `head` has its bytes).

    recipe: with a limit for every task that has to have one; given: as it was written. headers: of `sources`. own_rows:
    rows of the draft's head before it gets the target's.
    """

    recipe: Recipe
    given: Recipe
    headers: Mapping[str, Header]
    sheet: DeviceSheet
    dtype: str
    target: PlannedHalf
    draft: PlannedHalf | None
    head: Footprint | None
    own_rows: int

    @property
    def halves(self) -> list[PlannedHalf]:
        """The target and, if it has weights to quantize, the draft."""
        return [half for half in (self.target, self.draft) if half is not None]

    @property
    def calibrates(self) -> bool:
        """Whether any half must see calibration text, or a draft's ids are chosen by it."""
        return _calibrates(self.recipe, self.halves)

    @property
    def drafting(self) -> Footprint | None:
        """Bytes of whatever drafts; None for n-grams."""
        return self.draft.bytes if self.draft is not None else self.head

    @property
    def max_length(self) -> int:
        return self.recipe.speculation.max_length or self.target.arch.max_positions

    @property
    def gammas(self) -> tuple[int, int]:
        """The recipe's draft length, and the longest that may be used."""
        length = self.recipe.speculation.draft_length
        most = self.recipe.draft.longest
        if most is not None:
            return min(length.k, most), most
        return length.k, max(length.k, length.max_k)

    @property
    def limit(self) -> float | None:
        """Bytes that weights and KV may take: the device's, the budget's, whichever is less."""
        device = self.sheet.memory_gb and self.sheet.memory_gb * USABLE
        return min((gb * 1e9 for gb in (device, self.recipe.budget.memory_gb) if gb), default=None)

    @property
    def weights_and_kv(self) -> tuple[int, int]:
        """Resident bytes of both halves, and KV bytes of both per token."""
        halves = [half for half in (self.target.bytes, self.drafting) if half is not None]
        return sum(half.resident for half in halves), sum(half.kv_bytes_per_token for half in halves)

    @property
    def windows(self) -> int:
        """Bytes of float KV windows that a sequence takes in both halves, beside its KV per token."""
        width: int = getattr(torch, self.dtype).itemsize
        return sum(kv_window_bytes(half.arch, half.plan.kv, width, self.max_length) for half in self.halves)

    @property
    def run_need(self) -> Need:
        """Memory that the run takes at least while it measures: the models as they came beside both results.

        On a CPU the C++ core keeps floats as they are stored, and room for KV in float32.
        """
        width: int = getattr(torch, self.dtype).itemsize
        kept = min(width, self.target.stored if self.recipe.dtype == "auto" else STORED)
        came = [self.target, *([self.draft] if self.draft and kind_of(self.recipe.draft).separate else [])]
        results = [footprint(half.arch, half.schemes, half.plan.kv, min(width, half.stored)) for half in self.halves]
        results += [self.head] if self.head is not None else []
        held = sum(half.plain.parameters * kept for half in came) + sum(half.resident for half in results)
        if self.recipe.asks_transformers:
            held += torch.float32.itemsize * self.target.plain.parameters
        caches = [*(half.plain for half in came), *results]
        return Need(held, sum(half.kv_bytes_per_token for half in caches) * self.max_length)

    @property
    def training_need(self) -> Need:
        """Memory that `train-draft` takes at least: the quantized target, and the draft with gradients and moments."""
        trained = self.head.parameters if self.head is not None else 0
        if self.draft is not None:
            arch = self.draft.arch
            trained = self.draft.plain.parameters - (1 if arch.tied else 2) * arch.vocab_size * arch.hidden_size
        return Need(self.target.bytes.resident + 4 * torch.float32.itemsize * trained)

    def capacity(self, length: int) -> int | None:
        """Sequences of `length` tokens that fit beside the weights; None without a limit."""
        weights, kv = self.weights_and_kv
        return None if self.limit is None else max(0, int((self.limit - weights) // (kv * length + self.windows)))

    @property
    def duo(self) -> Duo:
        """Costs and rates of both halves."""
        drafting = self.drafting
        return Duo(
            self.target.bytes.cost,
            drafting.cost if drafting is not None else None,
            rates(self.sheet, self.target.schemes),
            rates(self.sheet, self.draft.schemes if self.draft is not None else {}),
            max_batch=max(1, self.capacity(CONTEXT) or 1),
            prior=prior(kind_of(self.recipe.draft).measured_as, self.recipe.speculation.draft_length.policy),
        )

    @property
    def prompt_floor(self) -> float | None:
        """Seconds that a prompt of `max_length` tokens takes at least (the head runs for its last row only)."""
        at, cost, arch = rates(self.sheet, self.target.schemes), self.target.bytes.cost, self.target.arch
        body = replace(cost, ops=cost.ops - 2 * arch.vocab_size * arch.hidden_size)
        return None if at is None else prefill_seconds(body, at, self.max_length)

    def steps(self, counted: Mapping[TaskSpec, int] | None = None) -> list[Step]:
        """Stages of the job with their estimated seconds; `counted`: questions by task, where they were counted."""
        return steps(self.recipe, [half.cost for half in self.halves], counted)


def resolve(recipe: Recipe, made: bool = False) -> PlannedPair:
    """Shapes, plans and bytes of both halves. Raises `RecipeError` or `SourceError` for all that has no plan at all.

    made: whether the recipe's models are halves of a finished pair, which are quantized.
    """
    problems, kind, sheet = Problems(), kind_of(recipe.draft), read_device(recipe.device)
    dtype = computed_with(recipe, sheet)
    width: int = getattr(torch, dtype).itemsize
    headers: dict[str, Header] = {}
    for half, source in sources(recipe).items():
        with problems.kept():
            headers[half] = read_header(source)
            if not made:
                require_float(source.model, headers[half].config)
    target = draft = shape = head = None
    if (ours := headers.get("target")) is not None:
        with problems.kept():
            stored = ours.width(recipe.dtype)
            target = plan_half(recipe.target.model, ours.arch, recipe.target.quantization, width, stored)
        with problems.kept():
            head = kind.footprint(ours.arch, width)
        with problems.kept():
            if headers.keys() >= sources(recipe).keys():
                shape = kind.shape(recipe, ours.arch, headers.get("draft"))
            if shape is not None:
                own = ours.width(recipe.dtype) if shape.width is None else shape.width
                draft = plan_half(shape.model, shape.arch, shape.quantization, width, own, recipe.draft.head_rows)
    halves = [half for half in (target, draft) if half is not None]
    _data(recipe, _calibrates(recipe, halves), problems)
    if problems.errors:
        with problems.kept():
            raise_refused(device_remarks(recipe, sheet, dtype, halves))
    problems.tell()
    assert target is not None, "a target without a plan is a problem"
    own_rows = target.original.vocab_size if shape is None else shape.own_rows
    planned = settled(recipe, target.plain.cost)
    return PlannedPair(planned, recipe, headers, sheet, dtype, target, draft, head, own_rows)


def device_remarks(
    recipe: Recipe, sheet: DeviceSheet, dtype: str, halves: Sequence[PlannedHalf]
) -> Iterator[PlanFinding]:
    """Remarks on what a device, and those who serve there, make of halves and of a recipe."""
    for half in halves:
        yield from device_findings(sheet, half.possible, half.plan.kv, dtype, half.arch)
    for judge in (modifier_findings, kind_of(recipe.draft).findings):
        yield from judge(sheet, recipe)


def sources(recipe: Recipe) -> dict[str, ModelSpec]:
    """The models that are read to be quantized: the target and, if it is a model that exists, the draft."""
    kind, source = kind_of(recipe.draft), recipe.draft.source
    own = {"draft": source} if kind.separate and source is not None and not kind.untrained else {}
    return {"target": recipe.target, **own}


def computed_with(recipe: Recipe, sheet: DeviceSheet) -> str:
    """Name of the dtype that floats are computed in on a device."""
    if recipe.dtype != "auto":
        return recipe.dtype
    return "float32" if sheet.capability is None else "bfloat16"


def plain_cost(recipe: Recipe, arch: ArchMap) -> PassCost:
    """A pass of a model of that shape with nothing quantized, as the recipe's device computes it."""
    width: int = getattr(torch, computed_with(recipe, read_device(recipe.device))).itemsize
    return footprint(arch, dict.fromkeys(arch.linears()), None, width).cost


def plan_half(model: str, arch: ArchMap, spec: QuantSpec, width: int, stored: int, head_rows: int = 0) -> PlannedHalf:
    """One model under one plan. width, stored: bytes of a float as computed with, and as stored.

    head_rows: ids that a draft's head is run for; 0: all.
    """
    plan, original = build_plan(spec), arch
    arch = prepared_arch(arch, spec)
    if spec.mixed is not None:
        plan = assumed_plan(spec, plan, arch, stored)
    schemes = resolve_plan(plan, arch)
    if spec.engine == "llmcompressor":
        oneshot.refuse(arch, spec, plan, [[0]])
    plain = footprint(original, dict.fromkeys(schemes), None, width)
    if head_rows:
        require_limit(head_rows, arch.vocab_size, schemes["lm_head"])
    half_bytes = footprint(arch, schemes, plan.kv, width, head_rows)
    return PlannedHalf(model, arch, spec, plan, schemes, half_bytes, plain, original, stored)


def _calibrates(recipe: Recipe, halves: Sequence[PlannedHalf]) -> bool:
    """Whether any half must see calibration text, or a draft's ids are chosen by it."""
    return bool(recipe.draft.head_rows) or any(half.reasons for half in halves)


def _data(recipe: Recipe, calibrates: bool, problems: Problems) -> None:
    """Named data sets have an entry, and files that the job reads are there."""
    used = data_names(recipe, calibrates)
    for name in data_names(recipe):
        with problems.kept():
            if not name.endswith(SUFFIXES):
                dataset(name)
            elif name in used and not (source := where_from(name)).present:
                rule = f"does not exist (looked at {source.path})"
                raise SourceError(name, rule, "give the path of a .jsonl, .parquet or .txt file")
