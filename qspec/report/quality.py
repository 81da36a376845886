"""Whether a pair is ready: its quality was measured, and lies within ceilings that honest quantizations keep.

A pair that is not ready is kept and can be looked into, but `qspec run` says so and `qspec publish` refuses it. The
ceilings catch what is broken, not what is merely lossy: budgets of the recipe are for that. Where they come from:
docs/fidelity.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import math
from typing import Any

from qspec.numerics.statistics.fidelity import wilson_interval
from qspec.readable import number, percent
from qspec.report.arms import at, pair_arm
from qspec.report.document import Finding
from qspec.schema.drafts import DRAFTS
from qspec.schema.results import Acceptance, Answer, Measurement, Results, Speed
from qspec.scheme_table import SCHEMES

NOT_READY = "not ready"
LOOP = 0.5
"""Share of an answer's tokens from which it is called a loop (`measure.quality.loop_share`)."""
LEAST_ALPHA = 0.1
"""Acceptance below which a draft is spoilt: even one that costs nothing gains less than 1 / (1 - 0.1) = 1.11 times."""


@dataclass(frozen=True)
class Ceiling:
    """How far a half may differ from the model that it was made from: nats per token, share of equal top tokens."""

    kl: float
    agreement: float
    of: str


EIGHT = Ceiling(kl=0.2, agreement=0.6, of="8 bits or more")
FEWER = Ceiling(kl=1.0, agreement=0.35, of="fewer than 8 bits")


def ceiling(half: Mapping[str, Any]) -> Ceiling:
    """The ceiling of a recipe's `target` or `draft` (plain data): by the fewest bits of its weights and KV cache."""
    spec = half.get("quantization") or {}
    mixed, kv = spec.get("mixed") or {}, spec.get("kv") or {}
    rules = [rule.get("scheme") for rule in spec.get("rules") or ()]
    weights = [*(mixed.get("candidates") or [spec.get("scheme")]), *rules]
    caches = [(part or {}).get("format") for part in (kv, kv.get("key"), kv.get("value"))]
    four = any(name in SCHEMES and SCHEMES[name].zero_points for name in weights) or "int4" in caches
    return FEWER if four else EIGHT


def target_ceiling(recipe: Mapping[str, Any]) -> Ceiling:
    """That of the target, or what a budget of the recipe allows beyond it."""
    limits, budget = ceiling(recipe.get("target") or {}), recipe.get("budget") or {}
    kl, agreement = budget.get("max_kl") or limits.kl, budget.get("min_agreement") or limits.agreement
    if kl <= limits.kl and agreement >= limits.agreement:
        return limits
    return Ceiling(max(kl, limits.kl), min(agreement, limits.agreement), "the recipe's budget")


def quality_findings(results: Results) -> list[Finding]:
    """One line where all is within the ceilings, else one for everything that is not.

    What other verbs did not ask again is no finding; what the recipe itself switches off is.
    """
    against, evaluation = list(_over(results)), results.recipe.get("evaluation") or {"fidelity": ""}
    if results.accuracy.fidelity is None and evaluation.get("fidelity") is None:
        against += _unmeasured(results)
    if not against:
        return [] if results.accuracy.fidelity is None else [Finding("good", _within(results))]
    listed = [Finding("danger", text, NOT_READY) for text in against]
    return [*listed, *([Finding("danger", results.despite, "despite")] if results.despite else [])]


def quality_obstacles(results: Results) -> list[str]:
    """Why a pair with these results is not ready, as far as its quality goes; what was not measured is no pass."""
    return [*_over(results), *_unmeasured(results)]


def _over(results: Results) -> Iterator[str]:
    accuracy, recipe = results.accuracy, results.recipe
    if accuracy.fidelity is not None:
        fidelity = accuracy.fidelity
        yield from _beyond("the target", fidelity.kl, fidelity.top1_agreement, target_ceiling(recipe))
    yield from _nonsense(accuracy.answers.rows if accuracy.answers else ())
    if accuracy.draft is not None:
        draft = accuracy.draft
        yield from _beyond("the draft", draft.kl, draft.top1_agreement, ceiling(recipe.get("draft") or {}))


def _unmeasured(results: Results) -> Iterator[str]:
    accuracy, kind = results.accuracy, DRAFTS.get((results.recipe.get("draft") or {}).get("kind", ""))
    if accuracy.fidelity is None:
        yield "quality was not measured (evaluation.fidelity)"
    elif accuracy.draft is None and kind is not None and kind.drafts_from != "text":
        yield "what rounding took from the draft was not measured (evaluation.fidelity of qspec run)"


def _beyond(half: str, kl: Measurement, agreement: Measurement, most: Ceiling) -> Iterator[str]:
    """Values are judged, not ends of intervals: a few windows leave those wide, and what is broken is far off."""
    if not kl.value <= most.kl:  # NaN too
        size = number(kl.value) if math.isfinite(kl.value) else "no number"
        fact = f"KL {size} nats/token from the model that it was made from"
        yield f"{half}: {fact}, not at most {most.kl:g} ({most.of})"
    if not agreement.value >= most.agreement:
        fact = f"names that model's most likely token at {percent(agreement.value)} of the positions"
        yield f"{half}: {fact}, not at least {percent(most.agreement, 0)} ({most.of})"


def _nonsense(answers: tuple[Answer, ...]) -> Iterator[str]:
    """Answers that no reader would take for text, where the original's are."""
    if not all(answer.finite for answer in answers):
        yield "the target: logits of its short answers are not finite"
    judged = [answer for answer in answers if answer.original_loop <= LOOP]
    lost = [answer for answer in judged if answer.quantized_loop > LOOP]
    if len(lost) > 1 and len(lost) > len(judged) / 2:
        fact = f"{len(lost)} of {len(judged)} short answers are empty or repeat themselves where the original's do not"
        yield f"the target: {fact}, such as {' '.join(lost[0].quantized.split())[:60]!r}"


def _within(results: Results) -> str:
    accuracy = results.accuracy
    assert accuracy.fidelity is not None
    fidelity, most = accuracy.fidelity, target_ceiling(results.recipe)
    text = f"KL {number(fidelity.kl.value)} nats/token (at most {most.kl:g}: {most.of}), the same most likely token at "
    text += f"{percent(fidelity.top1_agreement.value)} (at least {percent(most.agreement, 0)})"
    if accuracy.answers:
        text += f", {len(accuracy.answers.rows)} short answers without new loops"
    if accuracy.draft is None:
        return text
    kl, after, before = accuracy.draft.kl, accuracy.draft.acceptance, accuracy.draft.unrounded_acceptance
    kept = f"{number(after.value)} of its tokens accepted, {number(before.value)} before it was rounded"
    return f"{text}; draft: KL {number(kl.value)}, {kept}"


def lost_acceptance(speed: Speed) -> list[Finding]:
    """A pair whose draft has weights and of whose tokens the target takes next to none: spoilt, or of another target.

    Judged by teacher-forced acceptance where there is one, which no draft-length policy moves.
    """
    own = pair_arm(speed) if speed.arms else ""
    weighs = any(arm.draft_bytes for arm in speed.arms if arm.arm == own)
    pooled = [a for a in speed.acceptance if a.category == "all" and a.arm == own]
    return [finding for a in pooled if weighs and (finding := _spoilt(a)) is not None]


def _spoilt(acceptance: Acceptance) -> Finding | None:
    rate = acceptance.teacher_forced or acceptance.alpha
    if rate.value >= LEAST_ALPHA:
        return None
    high = max(wilson_interval(round(rate.value * rate.n), rate.n)[1], (rate.ci or (0.0, 0.0))[1])
    share = f"{acceptance.accepted} of {acceptance.drafted} drafted tokens"
    fact = f"{acceptance.arm}: {share} stand{at(acceptance.temperature)}"
    text = f"{fact}, acceptance {number(rate.value)} (at most {number(high)}, 95 %), below {LEAST_ALPHA:g}"
    if high < LEAST_ALPHA:
        return Finding("danger", f"{text}: the draft is spoilt, or belongs to another target", NOT_READY)
    return Finding("open", f"{text}, but {rate.n} tokens are too few to call the draft spoilt")
