"""Remarks on a planned pair before it is made: refusals, warnings, notes."""

from collections.abc import Iterator, Mapping

import torch

from qspec.bridges.text import data_names, where_from
from qspec.errors import PairError, SourceError
from qspec.models.load import source_dtype
from qspec.models.vocab import check_tokenizers, differing_parts
from qspec.pair.drafters.registry import kind_of
from qspec.planning.duration import questions
from qspec.planning.forecast import gain
from qspec.planning.idle import idle_findings
from qspec.planning.planned import MOST_PADDING, PlannedHalf, PlannedPair, device_remarks
from qspec.readable import duration
from qspec.schema.recipe import TaskSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.device_rules import PlanFinding

KV_OVERHEAD = 0.022
"""The share of a decode step: 6.44 to 6.58 ms at no context, FP8 KV on an H100 with an 8B model (vLLM, 2026-04-22)."""


def findings(pair: PlannedPair) -> list[PlanFinding]:
    """Every remark that `plan` and `run` make: those of `remarks`, and on both tokenizers."""
    return [*remarks(pair), *tokenizer_findings(pair)]


def remarks(pair: PlannedPair) -> Iterator[PlanFinding]:
    """Remarks that follow from shapes and the recipe, once each: device, pair, sizes, speed, budgets."""
    yield from dict.fromkeys(_remarks(pair))


def _remarks(pair: PlannedPair) -> Iterator[PlanFinding]:
    yield from device_remarks(pair.recipe, pair.sheet, pair.dtype, pair.halves)
    if pair.draft is not None:
        yield from draft_findings(pair, pair.draft)
    yield from _float16_findings(pair)
    if pair.sheet.capability is not None:
        rule = "`run` makes the pair on the CPU, and runs and times it on a GPU only where this machine has one"
        yield PlanFinding("note", f"device {pair.sheet.name}", rule, "run it there, or measure with the serving engine")
    yield from _data_findings(pair)
    yield from idle_findings(pair)
    yield from _memory_findings(pair)
    yield from _kv_pays(pair)
    yield from _budget_findings(pair)
    yield from speed_findings(pair)


def _float16_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    """Sources in float16 that stay so beside FP8: `dtype: auto` keeps what a model came in."""
    for header in pair.headers.values() if pair.recipe.dtype == "auto" else ():
        scheme = header.spec.quantization.scheme
        if SCHEMES[scheme].float8 and source_dtype(header.config) == torch.float16:
            rule = "stays in float16 with dtype: auto, and FP8 scales below 6e-5 lose bits there"
            yield PlanFinding("warning", f"{header.spec.model} for {scheme}", rule, "set dtype: bfloat16")


def tokenizer_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    """Tokenizers of a target and a draft model, where both are on this machine.

    Ids decide whether they are a pair; whatever else differs costs acceptance, since the target's is used.
    """
    if "draft" not in pair.headers:
        return
    try:
        ours, theirs = (header.tokenizer for header in pair.headers.values())
    except SourceError as error:
        if all(header.path is not None for header in pair.headers.values()):
            raise
        names = " ".join(header.spec.model for header in pair.headers.values())
        rule = "are not all here, and `run` compares them once it has fetched them"
        yield PlanFinding("note", f"tokenizers ({error.value})", rule, f"compare them now: qspec check {names}")
        return
    try:
        check_tokenizers(ours, theirs)
    except PairError as error:
        yield PlanFinding("refused", error.value, error.rule, error.fix)
    for name in differing_parts(ours, theirs):
        if name != "chat template":
            rule = "differ: the draft reads text that is split in other ways than what it has learned from"
            yield PlanFinding(
                "warning", f"{name} of the tokenizers", rule, "expect fewer accepted tokens; measure them"
            )
    templates = ours.parts()["chat template"], theirs.parts()["chat template"]
    if bool(templates[0]) != bool(templates[1]):
        which = "target" if templates[0] else "draft"
        rule = f"only the {which} has one: a base and an instruct model agree on fewer tokens"
        yield PlanFinding("warning", "chat template", rule, "use two base or two instruct models")
    elif templates[0] != templates[1]:
        rule = "differs; requests are written by the target's"
        yield PlanFinding("warning", "chat template", rule, "use a draft that was tuned on the same one")


def draft_findings(pair: PlannedPair, draft: PlannedHalf) -> Iterator[PlanFinding]:
    """The draft beside its target: size, padding, positions, head."""
    target = pair.target
    types = [str(header.config.get("dtype") or "") for header in pair.headers.values()]
    if len(set(types)) > 1 and all(types):
        rule = "are stored in different types; each half keeps its own where it is not quantized"
        yield PlanFinding("note", " and ".join(types), rule, "set dtype in the recipe for one of both")
    if kind_of(pair.recipe.draft).separate:
        ratio = target.bytes.parameters / draft.bytes.parameters
        if ratio < 10:
            rule = f"is {ratio:.1f} times smaller than the target; from 10 times on drafting is cheap"
            fix = f"a step costs c = {pair.duo.cost_ratio():.2f} of the target's; see the predicted speedup"
            yield PlanFinding("warning", draft.model, rule, fix)
    if pair.own_rows != target.arch.vocab_size:
        value = f"heads of {target.arch.vocab_size:,} and {pair.own_rows:,} rows"
        if abs(pair.own_rows - target.arch.vocab_size) > MOST_PADDING:
            rule, fix = "look like two tokenizers, and `run` refuses those", "use a draft of the target's family"
            yield PlanFinding("warning", value, rule, fix)
        else:
            yield PlanFinding("note", value, "differ in padding", "the draft gets the target's rows")
    if draft.arch.max_positions < pair.max_length:
        rule = f"the draft knows {draft.arch.max_positions:,} positions, the pair {pair.max_length:,}"
        yield PlanFinding("note", "long contexts", rule, "beyond the draft's positions decoding is plain")
    if draft.bytes.head_share > 0.2 and not draft.arch.tied and draft.schemes.get("lm_head") is None:
        rule = f"is {draft.bytes.head_share:.0%} of the bytes a draft step reads, and cannot change the output"
        yield PlanFinding("note", "draft lm_head", rule, "quantize it too with draft.quantization.ignore: []")


def _data_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    """Named text that the job reads and that is not on this machine. Nothing is fetched, and no row is read."""
    for name in data_names(pair.recipe, pair.calibrates):
        source = where_from(name)
        if source.present:
            continue
        looked = f"is not at {source.path}"
        fix = "set QSPEC_DATA to the folder that holds it, or name a file of your own"
        if source.offline:
            rule = f"{looked}, and {source.offline} forbids to fetch it from {source.remote}"
            yield PlanFinding("warning", f"data set {name}", rule, f"{fix}, or unset {source.offline}")
        else:
            yield PlanFinding("note", f"data set {name}", f"{looked}; `run` fetches it from {source.remote}", fix)


def _memory_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    if pair.max_length > pair.target.arch.max_positions:
        rule = f"{pair.target.model} knows {pair.target.arch.max_positions:,} positions"
        yield PlanFinding("refused", f"speculation.max_length {pair.max_length:,}", rule, "lower it")
    weights, kv = pair.weights_and_kv
    weights += pair.windows
    limit, need = pair.limit, weights + kv * pair.max_length
    if limit is None or need <= limit:
        return
    fits = int((limit - weights) // kv) if kv else 0
    fix = f"set speculation.max_length: {fits}" if fits >= 16 else "quantize further, or take a larger device"
    rule = f"above the {limit / 1e9:.1f} GB that {pair.sheet.name} and the budget allow"
    yield PlanFinding("refused", f"{need / 1e9:.1f} GB for weights and {pair.max_length:,} tokens of KV", rule, fix)


def _kv_pays(pair: PlannedPair) -> Iterator[PlanFinding]:
    """From which context on a quantized KV cache saves more than its rounding costs."""
    saved = pair.target.plain.cost.kv_bytes - pair.target.bytes.cost.kv_bytes
    if pair.target.plan.kv is None or pair.sheet.capability is None or saved <= 0:
        return
    context = KV_OVERHEAD * pair.target.bytes.cost.weight_bytes / saved
    rule = f"is expected to pay from about {context:,.0f} tokens of context on, by {saved / 1024:.1f} KiB each"
    fix = f"assumes {KV_OVERHEAD:.0%} of a step for rounding, as seen on one H100; below that leave kv: null"
    yield PlanFinding("note", f"KV {pair.target.plan.kv.label}", rule, fix)


def time_findings(pair: PlannedPair, counted: Mapping[TaskSpec, int] | None = None) -> Iterator[PlanFinding]:
    """Whether `run` takes longer than it may, and which tasks are cut. `counted`: as of `steps`."""
    for given, task in zip(pair.given.evaluation.tasks, pair.recipe.evaluation.tasks, strict=True):
        if task != given:
            value = f"evaluation.task_minutes {pair.recipe.evaluation.task_minutes:g}"
            rule = f"leaves time for {questions(task):,} of the {questions(given):,} questions of {task.name}"
            yield PlanFinding("note", value, rule, "raise it, set the task's limit, or ask all: --whole-tasks")
    steps, most = pair.steps(counted), pair.recipe.budget.minutes
    total = sum(step.seconds for step in steps)
    if most is not None and total > 60 * most:
        longest = max(steps, key=lambda step: step.seconds)
        rule = f"{duration(total)} are estimated, {duration(longest.seconds)} of them for {longest.stage}"
        fix = "shorten that, raise the budget, or start all the same: qspec run --long"
        yield PlanFinding("refused", f"budget.minutes {most:g}", rule, fix)


def _budget_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    budget, floor = pair.recipe.budget, pair.prompt_floor
    if budget.ttft_s is None or floor is None:
        return
    value = f"a prompt of {pair.max_length:,} tokens"
    if floor > budget.ttft_s:
        rule = f"takes at least {floor:.2f} s, above budget.ttft_s {budget.ttft_s:g}"
        yield PlanFinding("warning", value, rule, "shorten speculation.max_length, or take a faster device")
    else:
        rule = f"takes at least {floor:.2f} s, so at most {int(budget.ttft_s / floor)} at once keep {budget.ttft_s:g} s"
        yield PlanFinding("note", value, rule, "bound the batch of prompts by that")


def speed_findings(pair: PlannedPair) -> Iterator[PlanFinding]:
    """A draft that is not expected to pay."""
    duo = pair.duo
    best = gain(duo, *pair.gammas, duo.prior.alphas[-1])
    if best.best_speedup < 1.05:
        value = f"drafting with kind: {pair.recipe.draft.kind}"
        rule = f"predicts {best.speedup:.2f}x at an assumed acceptance of {best.alpha} and c = {duo.cost_ratio():.2f}"
        fix = "use a smaller or lower-precision draft, or kind: suffix, which reads no weights"
        yield PlanFinding("warning", value, rule, fix)
