"""The space of a joint search: halves that may be a target or a draft, and why the others may not. No weights."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from qspec.errors import RecipeError
from qspec.pair.drafters.registry import kind_of
from qspec.planning.planned import PlannedPair, resolve
from qspec.planning.remarks import remarks
from qspec.schema.drafts import Draft, NgramDraft, SuffixDraft
from qspec.schema.problems import validate
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schema.tuning import (
    Head,
    TuneSpec,
    default_draft_schemes,
    default_kv,
    default_targets,
    head_parts,
    with_head,
)
from qspec.schemes.device_rules import PlanFinding, device_findings
from qspec.schemes.footprint import Footprint

PLAIN = "none"
"""The draft of plain decoding."""
Pruned = tuple[str, str]
"""A candidate that is left out, and the reason."""


class Form(NamedTuple):
    """A draft with weights under one scheme, with one head and KV format."""

    kind: str
    scheme: str
    head: Head
    kv: str

    @property
    def label(self) -> str:
        return f"{self.kind} {self.scheme}, head {self.head}, kv {self.kv}"

    @property
    def whole(self) -> "Form":
        """The form with all ids in its head: the same codes."""
        return self._replace(head=head_parts(self.head)[0])


@dataclass(frozen=True)
class Space:
    """Recipes of every half that may run, by name. `pairs`: the names that may stand together; `pruned`: the rest.

    A target's recipe drafts by prompt lookup; a draft's has the recipe's own target. forms: of drafts with weights.
    """

    recipe: Recipe
    spec: TuneSpec[Draft]
    targets: Mapping[str, PlannedPair]
    drafts: Mapping[str, PlannedPair]
    pairs: tuple[tuple[str, str], ...]
    pruned: tuple[Pruned, ...]
    forms: tuple[Form, ...] = ()

    def with_draft(self, name: str, draft: Draft) -> "Space":
        """The space with another draft, beside every target that may have it."""
        pruned = list(self.pruned)
        made = _admitted(name, lambda: _with(self.recipe, self.recipe.target.quantization, draft), pruned)
        if made is None:
            return replace(self, pruned=tuple(pruned))
        pairs = (*self.pairs, *_together(self.targets, {name: made}, pruned))
        return replace(self, drafts={**self.drafts, name: made}, pairs=pairs, pruned=tuple(pruned))

    def recipe_of(self, target: str, draft: str, gamma: int = 0) -> Recipe:
        """The complete job of one combination; gamma 0 keeps the recipe's own draft length."""
        fields = _with(self.recipe, self.targets[target].recipe.target.quantization, self.drafts[draft].recipe.draft)
        if gamma:
            fields["speculation"]["draft_length"] = {"policy": "fixed", "k": gamma}
        return validate(Recipe, fields, f"{target} | {draft}")

    def lengths(self, draft: str) -> tuple[int, ...]:
        """Draft lengths that are tried with a draft; 0: plain decoding. A speculator head has a most."""
        if draft == PLAIN:
            return (0,)
        most = self.drafts[draft].recipe.draft.longest
        return tuple(g for g in self.spec.lengths if most is None or g <= most)

    @property
    def combinations(self) -> int:
        return sum(len(self.lengths(draft)) for _, draft in self.pairs)

    def resident(self, target: str, draft: str) -> int:
        """Bytes of weights, and of both caches at the context that passes are timed at."""
        halves: list[Footprint] = [self.targets[target].target.bytes]
        drafting = self.drafts[draft].drafting if draft != PLAIN else None
        halves += [drafting] if drafting is not None else []
        return sum(half.resident + half.kv_bytes_per_token * self.spec.context for half in halves)


def as_data(space: Space) -> dict[str, Any]:
    """The data that `qspec plan` shows."""
    spec, cpu = space.spec, space.recipe.device == "cpu"
    counts = {
        "target schemes": len(spec.targets or default_targets(cpu)),
        "target KV formats": len(spec.target_kv or default_kv()),
        "drafts": len(_kinds(space.recipe, spec)),
        "draft schemes": len(spec.draft_schemes or default_draft_schemes(cpu)),
        "draft heads": len(spec.draft_heads),
        "draft KV formats": len(spec.draft_kv),
        "draft lengths": len(spec.lengths),
    }
    return {
        "dimensions": counts,
        "targets": list(space.targets),
        "drafts": list(space.drafts),
        "lengths": list(spec.lengths),
        "batches": list(spec.batches),
        "combinations": space.combinations,
        "confirmed": spec.confirm,
        "pruned": [list(entry) for entry in space.pruned],
    }


def space_of(recipe: Recipe) -> Space:
    """Every half of the recipe's space is resolved once; what the device refuses is pruned with its reason."""
    spec = recipe.tune or TuneSpec[Draft]()
    cpu = recipe.device == "cpu"
    pruned: list[Pruned] = []
    targets: dict[str, PlannedPair] = {}
    kvs = spec.target_kv or default_kv()
    for (name, quant), (kv_name, kv) in product((spec.targets or default_targets(cpu)).items(), kvs.items()):
        label = f"{name}/{kv_name}"
        made = _admitted(label, lambda q=quant, k=kv: _with(recipe, _given(q, kv=k), {"kind": "ngram"}), pruned)
        if made is not None:
            targets[label] = made
    drafts: dict[str, PlannedPair] = {}
    own = recipe.target.quantization
    forms: list[Form] = []
    for half, draft in _drafts(recipe, spec, cpu, pruned):
        label = half.label if isinstance(half, Form) else half
        made = _admitted(label, lambda d=draft: _with(recipe, own, d), pruned)
        if made is not None:
            drafts[label] = made
            forms += [half] if isinstance(half, Form) else []
    if not targets:
        raise RecipeError(f"tune of {recipe.name}", f"has no target that may run ({pruned[0][1]})", "add another")
    drafts = {PLAIN: next(iter(targets.values())), **drafts}
    pairs = tuple(_together(targets, drafts, pruned))
    return Space(recipe, spec, targets, drafts, pairs, tuple(pruned), tuple(forms))


def _drafts(
    recipe: Recipe, spec: TuneSpec[Draft], cpu: bool, pruned: list[Pruned]
) -> Iterator[tuple[str | Form, Draft]]:
    schemes = spec.draft_schemes or default_draft_schemes(cpu)
    for name, draft in _kinds(recipe, spec).items():
        if draft.quantized is None:
            yield name, draft
            continue
        for (scheme, quant), head, (kv_name, kv) in product(schemes.items(), spec.draft_heads, spec.draft_kv.items()):
            form = Form(name, scheme, head, kv_name)
            try:
                given = {"quantization": _given(with_head(quant, head), kv=kv), "draft_vocab": head_parts(head)[1]}
                yield form, draft.model_copy(update=given)
            except ValueError as error:
                pruned.append((form.label, str(error)))


def _kinds(recipe: Recipe, spec: TuneSpec[Draft]) -> Mapping[str, Draft]:
    lookups: dict[str, Draft] = {"ngram": NgramDraft(kind="ngram"), "suffix": SuffixDraft(kind="suffix")}
    return spec.drafts or {**lookups, str(recipe.draft.kind): recipe.draft}


def _given(spec: QuantSpec, **fields: Any) -> QuantSpec:
    return spec.model_copy(update=fields)


def _with(recipe: Recipe, target: QuantSpec, draft: Any) -> dict[str, Any]:
    fields = recipe.as_dict() | {"tune": None}
    fields["target"] |= {"quantization": target.model_dump(mode="json")}
    fields["draft"] = draft if isinstance(draft, dict) else draft.model_dump(mode="json")
    return fields


def _admitted(label: str, fields: Any, pruned: list[Pruned]) -> PlannedPair | None:
    """The resolved pair, or None with the reason kept."""
    try:
        pair = resolve(validate(Recipe, fields(), label))
    except RecipeError as error:
        pruned.append((label, str(error)))
        return None
    reason = _refusal(remarks(pair))
    if reason is not None:
        pruned.append((label, reason))
        return None
    return pair


def _refusal(findings: Iterable[PlanFinding]) -> str | None:
    return next((str(finding) for finding in findings if finding.level == "refused"), None)


def _together(
    targets: Mapping[str, PlannedPair], drafts: Mapping[str, PlannedPair], pruned: list[Pruned]
) -> Iterator[tuple[str, str]]:
    for (target, ours), (draft, theirs) in product(targets.items(), drafts.items()):
        if draft == PLAIN:
            yield target, draft
            continue
        both = ours.recipe.model_copy(update={"draft": theirs.recipe.draft})
        findings = [*kind_of(both.draft).findings(ours.sheet, both)]
        if theirs.draft is not None:
            findings += device_findings(ours.sheet, theirs.draft.possible, theirs.draft.plan.kv, ours.dtype)
        reason = _refusal(findings) or _too_large(ours, theirs)
        if reason is None:
            yield target, draft
        else:
            pruned.append((f"{target} + {draft}", reason))


def _too_large(ours: PlannedPair, theirs: PlannedPair) -> str | None:
    weights = ours.target.bytes.resident + (theirs.drafting.resident if theirs.drafting is not None else 0)
    if ours.limit is None or weights <= ours.limit:
        return None
    return f"{weights / 1e9:.2f} GB of weights do not fit into {ours.limit / 1e9:.2f} GB; lower one of both"
