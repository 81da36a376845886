"""`qspec plan`: everything about a job that follows from the recipe and the shapes alone. No weights, no compute."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from qspec.errors import RecipeError
from qspec.numerics.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from qspec.numerics.roofline import PassCost, pass_seconds, prefill_seconds, ridge_rows
from qspec.plan import KVScheme, LayerScheme, QuantPlan, TensorScheme
from qspec.records import ArchMap
from qspec.schema.devices import DeviceSheet, read_device
from qspec.schema.recipe import MlpDraft, ModelDraft, QuantSpec, Recipe, SelfDraft
from qspec.stages.build_plan import build_plan, needs_statistics, resolve_plan
from qspec.stages.duration import HalfCost, basis, steps
from qspec.stages.exports import exports, transformers_snippet, vllm_command
from qspec.stages.footprint import DTYPE_BYTES, Footprint, footprint, mlp_footprint
from qspec.stages.forecast import ALPHAS, CONTEXT, Duo, gain, rates
from qspec.stages.load import resolve_arch
from qspec.stages.preflight import Finding, device_findings, pair_findings, raise_refused, refuse_unbuilt

USABLE = 0.9
"""Share of a device's memory that weights and KV may take; the rest is activations and graphs."""
MOST_PADDING = 1024
"""Head rows by which models of one tokenizer differ at most."""


@dataclass(frozen=True)
class PlannedHalf:
    """One half of the pair, resolved: `bytes` under its plan, `plain` with nothing quantized."""

    model: str
    arch: ArchMap
    spec: QuantSpec
    plan: QuantPlan
    schemes: Mapping[str, LayerScheme | None]
    bytes: Footprint
    plain: Footprint


@dataclass(frozen=True)
class PlannedPair:
    """A recipe resolved against shapes. `draft` None: n-gram or MLP speculator (then `head` has its bytes).

    own_rows: rows of the draft's head before it gets the target's.
    """

    recipe: Recipe
    sheet: DeviceSheet
    dtype: str
    target: PlannedHalf
    draft: PlannedHalf | None
    head: Footprint | None
    own_rows: int

    @property
    def drafting(self) -> Footprint | None:
        """Bytes of whatever drafts; None for n-grams."""
        return self.draft.bytes if self.draft is not None else self.head

    @property
    def max_length(self) -> int:
        return self.recipe.speculation.max_length or self.target.arch.max_positions


def resolve(recipe: Recipe) -> PlannedPair:
    """Shapes, plans and bytes of both halves. Raises `RecipeError` or `SourceError` for what has no plan at all."""
    sheet = read_device(recipe.device)
    dtype = recipe.dtype if recipe.dtype != "auto" else "float32" if sheet.capability is None else "bfloat16"
    arch = resolve_arch(recipe.target)
    target = _half(recipe.target.model, arch, recipe.target.quantization, dtype)
    draft, head, own_rows = None, None, arch.vocab_size
    if isinstance(recipe.draft, ModelDraft):
        own = resolve_arch(recipe.draft)
        own_rows, padded = own.vocab_size, replace(own, vocab_size=arch.vocab_size)
        draft = _half(recipe.draft.model, padded, recipe.draft.quantization, dtype)
    elif isinstance(recipe.draft, SelfDraft):
        draft = _half(recipe.target.model, _truncated(arch, recipe.draft.layers), recipe.draft.quantization, dtype)
    elif isinstance(recipe.draft, MlpDraft):
        head = mlp_footprint(recipe.draft, arch, DTYPE_BYTES[dtype])
    return PlannedPair(recipe, sheet, dtype, target, draft, head, own_rows)


def admit(recipe: Recipe) -> PlannedPair:
    """The resolved pair, if the job may start; raises the first refusal otherwise. Called before any compute."""
    refuse_unbuilt(recipe)
    pair = resolve(recipe)
    raise_refused(list(findings(pair)))
    return pair


def preview(recipe: Recipe) -> dict[str, Any]:
    """All that `qspec plan` shows, as plain data."""
    pair = resolve(recipe)
    return {
        "name": recipe.name,
        "description": recipe.description,
        "device": {**pair.sheet.model_dump(), "compute_dtype": pair.dtype},
        "target": _half_view(pair.target),
        "draft": _draft_view(pair),
        "memory": _memory(pair),
        "speed": _speed(pair),
        "time": _time(pair),
        "exports": [served.model_dump() for served in exports(recipe, pair.sheet)],
        "commands": {
            "vllm": vllm_command(recipe),
            "transformers": transformers_snippet(recipe, pair.sheet.capability),
        },
        "findings": [asdict(finding) for finding in findings(pair)],
        "recipe": recipe.as_dict(),
    }


def findings(pair: PlannedPair) -> Iterator[Finding]:
    """Every remark: device, pair, sizes, speed, budgets."""
    yield from device_findings(pair.sheet, pair.target.schemes, pair.target.plan.kv, pair.dtype, pair.target.arch)
    if pair.draft is not None:
        yield from device_findings(pair.sheet, pair.draft.schemes, pair.draft.plan.kv, pair.dtype, pair.draft.arch)
        yield from _draft_findings(pair, pair.draft)
    yield from pair_findings(pair.sheet, pair.recipe)
    yield from _memory_findings(pair)
    yield from _budget_findings(pair)
    yield from _speed_findings(pair)


def _half(model: str, arch: ArchMap, spec: QuantSpec, dtype: str) -> PlannedHalf:
    plan = build_plan(spec)
    schemes = resolve_plan(plan, arch)
    plain = footprint(arch, dict.fromkeys(schemes), None, dtype)
    return PlannedHalf(model, arch, spec, plan, schemes, footprint(arch, schemes, plan.kv, dtype), plain)


def _truncated(arch: ArchMap, layers: int | None) -> ArchMap:
    if layers is not None and layers > arch.n_layers:
        raise RecipeError(f"draft.layers {layers}", f"the target has {arch.n_layers} layers", "keep fewer, or omit it")
    return replace(arch, n_layers=layers or arch.n_layers)


def _half_view(half: PlannedHalf) -> dict[str, Any]:
    return {
        "model": half.model,
        "model_type": half.arch.model_type,
        "decoder_layers": half.arch.n_layers,
        "parameters": half.bytes.parameters,
        "engine": half.spec.engine,
        "method": half.spec.method,
        "linears": [_group_view(half, label, group.layers) for label, group in half.bytes.groups.items()],
        "kv": _kv_text(half.plan.kv),
        "calibrated_for": needs_statistics(half.schemes, half.plan, half.spec),
    }


def _draft_view(pair: PlannedPair) -> dict[str, Any]:
    kind = {"kind": pair.recipe.draft.kind}
    if pair.draft is not None:
        return kind | _half_view(pair.draft)
    if isinstance(pair.recipe.draft, MlpDraft) and pair.head is not None:
        return kind | {"model": pair.recipe.draft.model, "parameters": pair.head.parameters}
    return kind


def _group_view(half: PlannedHalf, label: str, layers: tuple[str, ...]) -> dict[str, Any]:
    scheme = half.schemes[layers[0]]
    return {
        "layers": len(layers),
        "scheme": label,
        "weights": _tensor_text(scheme.weight) if scheme else None,
        "activations": _tensor_text(scheme.activation) if scheme and scheme.activation else None,
        "parts": dict(Counter(layer.rpartition(".")[2] for layer in layers)),
    }


def _tensor_text(scheme: TensorScheme) -> str:
    return f"{scheme.fmt.name} {_granularity_text(scheme.granularity)}{', at run time' if scheme.dynamic else ''}"


def _granularity_text(granularity: Granularity) -> str:
    match granularity:
        case PerTensor():
            return "per tensor"
        case PerChannel():
            return "per output channel"
        case PerGroup(size):
            return f"per {size} elements"
        case PerBlock(rows, columns):
            return f"per {rows}x{columns} tile"
        case _:
            return "per token"


def _kv_text(kv: KVScheme | None) -> str:
    if kv is None:
        return "not quantized"
    if kv.granularity == "token_head":
        return f"{kv.fmt.name}, a scale per token and head, at run time"
    origin = "measured on calibration text" if kv.scales == "calibrated" else "1.0 (cast)"
    return f"{kv.fmt.name}, a scale per {'layer' if kv.granularity == 'tensor' else 'head'}, {origin}"


def _memory(pair: PlannedPair) -> dict[str, Any]:
    halves = {"target": pair.target.bytes, "draft": pair.drafting}
    views = {name: _bytes_view(half, pair.max_length) for name, half in halves.items() if half is not None}
    total = sum(view["weights"] + view["kv_at_max_length"] for view in views.values())
    return {
        **views,
        "max_length": pair.max_length,
        "total": total,
        "limit": _limit(pair),
        "unquantized_target": pair.target.plain.resident,
        "sequences_at_max_length": _capacity(pair, pair.max_length),
        "run_peak": pair.target.plain.resident + sum(half.resident for half in halves.values() if half is not None),
    }


def _bytes_view(half: Footprint, max_length: int) -> dict[str, Any]:
    return {
        "linears": {label: group.bytes for label, group in half.groups.items()},
        "embeddings": half.embedding_bytes,
        "norms_and_biases": half.other_bytes,
        "weights": half.resident,
        "read_per_step": half.cost.weight_bytes,
        "kv_per_token": half.kv_bytes_per_token,
        "kv_at_max_length": half.kv_bytes_per_token * max_length,
    }


def _limit(pair: PlannedPair) -> float | None:
    """Bytes that weights and KV may take: the device's, the budget's, whichever is less."""
    device = pair.sheet.memory_gb and pair.sheet.memory_gb * USABLE
    limits = [gb * 1e9 for gb in (device, pair.recipe.budget.memory_gb) if gb]
    return min(limits, default=None)


def _weights_and_kv(pair: PlannedPair) -> tuple[int, int]:
    """Resident bytes of both halves, and KV bytes of both per token."""
    halves = [half for half in (pair.target.bytes, pair.drafting) if half is not None]
    return sum(half.resident for half in halves), sum(half.kv_bytes_per_token for half in halves)


def _capacity(pair: PlannedPair, length: int) -> int | None:
    """Sequences of `length` tokens that fit beside the weights."""
    weights, kv = _weights_and_kv(pair)
    limit = _limit(pair)
    return None if limit is None else max(0, int((limit - weights) // (kv * length)))


def _duo(pair: PlannedPair) -> Duo:
    drafting = pair.drafting
    return Duo(
        pair.target.bytes.cost,
        drafting.cost if drafting is not None else None,
        rates(pair.sheet, pair.target.schemes),
        rates(pair.sheet, pair.draft.schemes if pair.draft is not None else {}),
        max_batch=max(1, _capacity(pair, CONTEXT) or 1),
    )


def _gammas(recipe: Recipe) -> tuple[int, int]:
    """The recipe's draft length, and the longest that may be used."""
    length = recipe.speculation.draft_length
    if isinstance(recipe.draft, MlpDraft):
        return min(length.k, recipe.draft.n_predict), recipe.draft.n_predict
    return length.k, max(length.k, length.max_k)


def _speed(pair: PlannedPair) -> dict[str, Any]:
    duo = _duo(pair)
    at = duo.target_rates
    return {
        "basis": _speed_basis(pair),
        "cost_ratio_c": duo.cost_ratio(),
        "quantization_alone": _quantization_gain(pair),
        "speculation": [asdict(gain(duo, *_gammas(pair.recipe), alpha)) for alpha in ALPHAS],
        "target_step_ms": at and 1e3 * pass_seconds(duo.target, at, 1, CONTEXT, 1),
        "largest_batch": duo.max_batch,
        "free_rows": at and int(ridge_rows(duo.target, at)),
        "prompt_floor_s": at and prefill_seconds(_body(pair), at, pair.max_length),
    }


def _speed_basis(pair: PlannedPair) -> str:
    if _duo(pair).target_rates is None:
        return "c is a ratio of bytes read per step, verification taken as free: an upper bound; `run` measures both"
    return f"floors from bytes and operations on the data sheet, context {CONTEXT}, no launch overhead: an upper bound"


def _quantization_gain(pair: PlannedPair) -> float:
    """Plain decoding at batch 1: time of the original target over that of the quantized one, from bytes."""
    before, after = (
        half.cost.weight_bytes + CONTEXT * half.cost.kv_bytes for half in (pair.target.plain, pair.target.bytes)
    )
    return before / after


def _body(pair: PlannedPair) -> PassCost:
    """Cost of a prompt row: the head runs for the last row only."""
    cost, arch = pair.target.bytes.cost, pair.target.arch
    return replace(cost, ops=cost.ops - 2 * arch.vocab_size * arch.hidden_size)


def _time(pair: PlannedPair) -> dict[str, Any]:
    halves = [half for half in (pair.target, pair.draft) if half is not None]
    costs = [HalfCost(h.plain.cost, h.spec, bool(needs_statistics(h.schemes, h.plan, h.spec))) for h in halves]
    found = steps(pair.recipe, pair.sheet, costs)
    return {
        "basis": basis(pair.sheet),
        "stages": [asdict(step) for step in found],
        "minutes": sum(step.seconds for step in found) / 60,
    }


def _draft_findings(pair: PlannedPair, draft: PlannedHalf) -> Iterator[Finding]:
    target = pair.target
    if isinstance(pair.recipe.draft, ModelDraft):
        ratio = target.bytes.parameters / draft.bytes.parameters
        if ratio < 10:
            rule = f"is {ratio:.1f} times smaller than the target; from 10 times on drafting is cheap"
            fix = f"a step costs c = {_duo(pair).cost_ratio():.2f} of the target's; see the predicted speedup"
            yield Finding("warning", draft.model, rule, fix)
    if pair.own_rows != target.arch.vocab_size:
        value = f"heads of {target.arch.vocab_size:,} and {pair.own_rows:,} rows"
        if abs(pair.own_rows - target.arch.vocab_size) > MOST_PADDING:
            rule, fix = "look like two tokenizers, and `run` refuses those", "use a draft of the target's family"
            yield Finding("warning", value, rule, fix)
        else:
            yield Finding("note", value, "differ in padding", "the draft gets the target's rows")
    if draft.arch.max_positions < pair.max_length:
        rule = f"the draft knows {draft.arch.max_positions:,} positions, the pair {pair.max_length:,}"
        yield Finding("note", "long contexts", rule, "beyond the draft's positions decoding is plain")
    if draft.bytes.head_share > 0.2 and not draft.arch.tied:
        rule = f"is {draft.bytes.head_share:.0%} of the bytes a draft step reads, and cannot change the output"
        yield Finding("note", "draft lm_head", rule, "quantize it too with draft.quantization.ignore: []")


def _memory_findings(pair: PlannedPair) -> Iterator[Finding]:
    if pair.max_length > pair.target.arch.max_positions:
        rule = f"{pair.target.model} knows {pair.target.arch.max_positions:,} positions"
        yield Finding("refused", f"speculation.max_length {pair.max_length:,}", rule, "lower it")
    weights, kv = _weights_and_kv(pair)
    limit, need = _limit(pair), weights + kv * pair.max_length
    if limit is None or need <= limit:
        return
    fits = int((limit - weights) // kv) if kv else 0
    fix = f"set speculation.max_length: {fits}" if fits >= 16 else "quantize further, or take a larger device"
    rule = f"above the {limit / 1e9:.1f} GB that {pair.sheet.name} and the budget allow"
    yield Finding("refused", f"{need / 1e9:.1f} GB for weights and {pair.max_length:,} tokens of KV", rule, fix)


def _budget_findings(pair: PlannedPair) -> Iterator[Finding]:
    minutes, budget = _time(pair)["minutes"], pair.recipe.budget
    if budget.minutes is not None and minutes > budget.minutes:
        fix = "raise it, or lower evaluation.tasks, benchmark or calibration"
        yield Finding("refused", f"budget.minutes {budget.minutes:g}", f"the estimate is {minutes:.0f}", fix)
    at = rates(pair.sheet, pair.target.schemes)
    if budget.ttft_s is None or at is None:
        return
    floor = prefill_seconds(_body(pair), at, pair.max_length)
    value = f"a prompt of {pair.max_length:,} tokens"
    if floor > budget.ttft_s:
        rule = f"takes at least {floor:.2f} s, above budget.ttft_s {budget.ttft_s:g}"
        yield Finding("warning", value, rule, "shorten speculation.max_length, or take a faster device")
    else:
        rule = f"takes at least {floor:.2f} s, so at most {int(budget.ttft_s / floor)} at once keep {budget.ttft_s:g} s"
        yield Finding("note", value, rule, "bound the batch of prompts by that")


def _speed_findings(pair: PlannedPair) -> Iterator[Finding]:
    duo = _duo(pair)
    best = gain(duo, *_gammas(pair.recipe), ALPHAS[-1])
    if best.best_speedup < 1.05:
        value = f"drafting with kind: {pair.recipe.draft.kind}"
        rule = f"predicts {best.speedup:.2f}x at an assumed acceptance of {best.alpha} and c = {duo.cost_ratio():.2f}"
        fix = "use a smaller or lower-precision draft, or kind: ngram, which drafts for free"
        yield Finding("warning", value, rule, fix)
