"""A draft with weights, lowered layer by layer: which layers pay for their bits, by measured loss of acceptance.

The whole forms of a space are its levels. A mix of them takes each layer's codes from the form of its level, so that
none is rounded again; the passes of a mix are their times, layer by layer. What it would say is measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from qspec.bridges.quant_config import patterns
from qspec.numerics.speculation.lowering import Levels, Stop, best, descend, path, single_losses
from qspec.numerics.statistics.fidelity import sum_of_minima
from qspec.planning.tune_space import Form, Space
from qspec.records import QuantizedModel, View
from qspec.schema.drafts import Draft
from qspec.schema.quantization import QuantSpec
from qspec.schema.tuning import LayersSpec, head_parts, with_head
from qspec.schemes.build import build_plan
from qspec.speculation.types import Sampling
from qspec.tune.measure import Pieces
from qspec.tune.pieces import Json, answer_logits, distributions
from qspec.tune.predict import DraftPiece, Passes, SeparableModel, pass_seconds

V = TypeVar("V")
HEAD = "lm_head"


@dataclass(frozen=True)
class Ladder:
    """Levels of one draft: forms of its layers, and of its head, from the most bytes to the fewest.

    The first of both is one form, the finest.
    """

    layers: tuple[Form, ...]
    heads: tuple[Form, ...]

    @property
    def name(self) -> str:
        return f"{self.layers[0].kind} by layer, kv {self.layers[0].kv}"


@dataclass(frozen=True)
class Lowered:
    """Result of a search for one draft beside one target. draft: that of the chosen state, with its rules.

    sizes, seconds: bytes and predicted seconds of a one-row pass, by stop.
    """

    ladder: Ladder
    target: str
    stops: tuple[Stop, ...]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    chosen: Stop
    draft: Draft


def ladders(space: Space) -> list[Ladder]:
    """A ladder for every draft and KV format with more than one form; forms that rules cannot express are left out.

    A rule gives a layer another scheme and group size; what else a form sets, its draft's others must set alike.
    """
    lowerable = []
    for kind, kv in dict.fromkeys((form.kind, form.kv) for form in space.forms):
        same = [form for form in space.forms if (form.kind, form.kv) == (kind, kv)]
        finest = max(same, key=lambda form: _read(space, form))
        alike = [f for f in same if _rest(space, f) == _rest(space, finest) and _plain(space, f)]
        layers = sorted((f for f in alike if f.head == finest.head), key=lambda f: -_read(space, f))
        heads = sorted((f for f in alike if f.scheme == finest.scheme), key=lambda f: -_read(space, f))
        if finest in alike and (len(layers) > 1 or len(heads) > 1):
            lowerable.append(Ladder(tuple(layers), tuple(heads)))
    return lowerable


def _read(space: Space, form: Form) -> float:
    """Bytes of a step, which order forms by precision: beside a tied embedding, an INT8 head is more in memory."""
    drafting = space.drafts[form.label].drafting
    assert drafting is not None
    return drafting.cost.weight_bytes


def _quantization(space: Space, form: Form) -> QuantSpec:
    quantized = space.drafts[form.label].recipe.draft.quantized
    assert quantized is not None
    return quantized


def _rest(space: Space, form: Form) -> Json:
    spec, own = _quantization(space, form), {"scheme", "group_size", "rules", "ignore", "untie_head"}
    return spec.model_dump(mode="json", exclude=own) | {"ignore": sorted({*spec.ignore} - {HEAD})}


def _plain(space: Space, form: Form) -> bool:
    """Rounded as it came: smoothing, rotations and feedback tie a layer's codes to its neighbours."""
    spec = _quantization(space, form)
    rules = [rule for rule in spec.rules if rule.match != HEAD]
    untouched = spec.smoothing is None and spec.rotation is None and spec.mixed is None and not rules
    return untouched and (spec.engine, spec.method) == ("qspec", "rtn")


class Lowering:
    """The search for one draft beside one target. Units: the decoder layers, then the head."""

    def __init__(self, pieces: Pieces, model: SeparableModel, ladder: Ladder, target: str) -> None:
        self._pieces, self._model, self._ladder, self._target = pieces, model, ladder, target
        self._halves = pieces.halves
        sampling = pieces.sampling
        self._sampling = Sampling(sampling.temperature or 1.0, sampling.top_k, sampling.top_p)
        self._names = self._halves.model(ladder.layers[0].label).arch.layers

    def search(self, spec: LayersSpec) -> Lowered:
        """First order: every unit alone, at every level. Then in the order of loss per second saved, measured."""
        self._pieces.progress.stage(f"layers of {self._ladder.name} beside {self._target}")
        losses = single_losses(self._counts, lambda levels: self._distributions(levels)["acceptance"])
        stops = descend(path(losses, self._costs), self._measured, spec.floor, spec.patience)
        chosen = best(stops, spec.floor)
        sizes = tuple(self._total(stop.levels, self._sizes) for stop in stops)
        seconds = tuple(self._total(stop.levels, self._costs) for stop in stops)
        form = self._halves.space.drafts[self._ladder.layers[0].label].recipe.draft
        given = {"quantization": self.spec(chosen.levels), "draft_vocab": self._vocab(chosen.levels)}
        draft = form.model_copy(update=given)
        return Lowered(self._ladder, self._target, tuple(stops), sizes, seconds, chosen, draft)

    def spec(self, levels: Levels) -> QuantSpec:
        """A mix as a recipe says it: the finest scheme, and rules for what is lower."""
        space, ladder = self._halves.space, self._ladder
        arch = self._halves.model(ladder.layers[0].label).arch
        rules: list[Json] = []
        for level, form in enumerate(ladder.layers[1:], 1):
            lower = [layer for layer, at in zip(self._names, levels, strict=False) if at == level]
            given, names = _quantization(space, form), [n for layer in lower for n in arch.layer_linears(layer)]
            scheme: Json = {"scheme": given.scheme, "group_size": given.group_size}
            rules += [{"match": match} | scheme for match in patterns(names, arch.linears())]
        plain = _quantization(space, ladder.layers[0])
        fields: Json = {"rules": rules, "ignore": sorted({*plain.ignore, HEAD}), "untie_head": False}
        return with_head(QuantSpec.model_validate(plain.model_dump() | fields), ladder.heads[levels[-1]].head)

    def _vocab(self, levels: Levels) -> int:
        return head_parts(self._ladder.heads[levels[-1]].head)[1]

    def mixed(self, levels: Levels) -> QuantizedModel:
        """The model of a mix, from the codes of its levels' forms."""
        forms = [self._halves.quantized(form.label) for form in self._ladder.layers]
        base = self._halves.quantized(self._ladder.heads[levels[-1]].label)
        home = {name: forms[level] for name, level in zip(self._names, levels, strict=False)}

        def of(name: str) -> QuantizedModel:
            return home.get(".".join(name.split(".")[:3]), base)

        tensors = _routed([m.tensors for m in (base, *forms)], lambda name: of(name).tensors)
        linears = _routed([m.linears for m in (base, *forms)], lambda name: of(name).linears)
        return replace(base, tensors=tensors, linears=linears, plan=build_plan(self.spec(levels)))

    def piece(self, levels: Levels) -> DraftPiece:
        """A mix as the model of predictions takes it."""
        parts = self._parts(levels)
        pieces = [self._model.draft(form.label) for form, _ in parts]
        weights = [weight for _, weight in parts]
        first = pieces[0]
        passes: Passes = {
            b: {r: (_sum(weights, [pass_seconds(p.passes, b, r) for p in pieces]), at[r][1]) for r in at}
            for b, at in first.passes.items()
        }
        prompts = [_sum(weights, [p.prompts[text] for p in pieces]) for text in range(len(first.prompts))]
        return DraftPiece(passes, self._distributions(levels), prompts)

    @property
    def _counts(self) -> list[int]:
        return [len(self._ladder.layers)] * len(self._names) + [len(self._ladder.heads)]

    @cached_property
    def _costs(self) -> list[list[float]]:
        """Seconds of a one-row pass by unit and level: of layers what they change, of the head all the rest."""
        return self._differences(lambda form: pass_seconds(self._model.draft(form.label).passes, 1, 1))

    @cached_property
    def _sizes(self) -> list[list[float]]:
        return self._differences(lambda form: _read(self._halves.space, form))

    def _differences(self, of: Callable[[Form], float]) -> list[list[float]]:
        finest, n = of(self._ladder.layers[0]), len(self._names)
        layer = [(of(form) - finest) / n for form in self._ladder.layers]
        return [layer] * n + [[of(form) for form in self._ladder.heads]]

    def _total(self, levels: Levels, table: Sequence[Sequence[float]]) -> float:
        return sum(unit[level] for unit, level in zip(table, levels, strict=True))

    def _parts(self, levels: Levels) -> list[tuple[Form, float]]:
        """Whole forms and weights whose sum is a mix: what adds up over layers."""
        share = [levels[:-1].count(level) / len(self._names) for level in range(len(self._ladder.layers))]
        return [(self._ladder.heads[levels[-1]], 1.0), (self._ladder.layers[0], share[0] - 1)] + [
            (form, part) for form, part in zip(self._ladder.layers[1:], share[1:], strict=True) if part
        ]

    def _measured(self, levels: Levels) -> tuple[float, float]:
        """Acceptance, and tokens per second at the best draft length."""
        model = self._model.with_draft(self._ladder.name, self.piece(levels))
        lengths = self._halves.space.spec.lengths
        seconds = min(model.seconds(self._target, self._ladder.name, gamma) for gamma in lengths)
        return self._distributions(levels)["acceptance"], 1 / seconds

    def _distributions(self, levels: Levels) -> Json:
        """Distributions of a mix, and its acceptance: the mean overlap with the target's, at temperature 1 if greedy.

        The overlap moves with every layer, where agreement of likeliest tokens jumps.
        """
        pieces = self._pieces
        facts = [pieces.setting([self._target, *(f.label for f in (*self._ladder.layers, *self._ladder.heads))])]
        facts += [self.spec(levels).model_dump(mode="json"), pieces.texts, vars(pieces.sampling)]
        facts += [size] if (size := self._vocab(levels)) else []

        def make() -> Json:
            lm = self._halves.opened(self.mixed(levels))
            overlaps: list[Tensor] = []

            def watched() -> Iterator[Tensor]:
                for p_TV, logits_TV in zip(self._wanted, answer_logits(lm, pieces.texts), strict=True):
                    overlaps.append(sum_of_minima(p_TV, self._sampling.probs(logits_TV)))
                    yield logits_TV

            answers = distributions(watched(), pieces.sampling)
            return answers | {"acceptance": float(torch.cat(overlaps).mean())}

        return dict(pieces.kept.value("layers", facts, make))

    @cached_property
    def _wanted(self) -> list[Tensor]:
        lm = self._halves.decoder(self._target)
        return [self._sampling.probs(logits_TV) for logits_TV in answer_logits(lm, self._pieces.texts)]


def _routed(every: Sequence[Mapping[str, V]], source: Callable[[str], Mapping[str, V]]) -> View[V]:
    """Items of several mappings, each from the one that its name leads to."""
    return View((n for one in every for n in one if n in source(n)), lambda name: source(name)[name])


def as_data(lowered: Lowered) -> dict[str, Any]:
    """JSON types only: the curve, and the chosen state by unit."""
    rows = zip(lowered.stops, lowered.sizes, lowered.seconds, strict=True)
    names = [form.scheme for form in lowered.ladder.layers], [form.head for form in lowered.ladder.heads]
    return {
        "draft": lowered.ladder.name,
        "target": lowered.target,
        "levels": {"layers": names[0], "head": names[1]},
        "chosen": list(lowered.chosen.levels),
        "curve": [
            {
                "levels": list(stop.levels),
                "acceptance": stop.acceptance,
                "bytes": size,
                "step_s": seconds,
                "predicted_tok_s": stop.value,
            }
            for stop, size, seconds in rows
        ],
    }


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True))
