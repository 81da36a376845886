"""The front of all predictions, the choice within a budget, and its reason in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qspec.numerics.statistics.evidence import useful
from qspec.numerics.statistics.pareto import choose, excess, front, schedule
from qspec.planning.tune_space import Space
from qspec.report.quality import FEWER
from qspec.schema.recipe import BudgetSpec
from qspec.tune.predict import PairPrediction, SeparableModel


@dataclass(frozen=True)
class Predictions:
    """All predictions, those that nothing dominates, the chosen one; `fits`: within the budget."""

    every: tuple[PairPrediction, ...]
    budget: BudgetSpec
    by_batch: Mapping[int, int]

    @cached_property
    def front(self) -> list[PairPrediction]:
        return [self.every[i] for i in front({i: p.costs for i, p in enumerate(self.every)})]

    @cached_property
    def chosen(self) -> PairPrediction:
        return self._choice[0]

    @property
    def fits(self) -> bool:
        return self._choice[1]

    @property
    def schedule(self) -> list[tuple[int, int, int]]:
        """As a recipe's `by_batch` and vLLM take it."""
        return schedule(self.by_batch)

    @property
    def why(self) -> str:
        """The choice in one sentence."""
        return sentence(self.chosen, self.every, self.budget, self.fits)

    @cached_property
    def _choice(self) -> tuple[PairPrediction, bool]:
        return pick(self.every, self.budget)


def answer(space: Space, model: SeparableModel, budget: BudgetSpec) -> Predictions:
    """Every combination predicted: additive pieces make that cheap, so nothing has to be sampled."""
    every = tuple(
        model.predict(target, draft, gamma, space.resident(target, draft))
        for target, draft in space.pairs
        for gamma in space.lengths(draft)
    )
    predicted = Predictions(every, budget, {1: 0})
    if predicted.chosen.gamma == 0:
        return predicted
    pair = predicted.chosen.target, predicted.chosen.draft
    return replace(predicted, by_batch=model.schedule(*pair, space.lengths(pair[1]), space.spec.batches))


def pick(every: Sequence[PairPrediction], budget: BudgetSpec) -> tuple[PairPrediction, bool]:
    """The fastest within the budget, or what oversteps it least."""
    at, fits = choose({i: p.limited for i, p in enumerate(every)}, limits(budget))
    return every[at], fits


def limits(budget: BudgetSpec) -> tuple[float | None, ...]:
    """Limits of `PairPrediction.limited`; without `max_kl` the KL that `qspec run` calls ready at any bits."""
    return None, budget.max_kl or FEWER.kl, budget.ttft_s, budget.memory_gb


def within(prediction: PairPrediction, budget: BudgetSpec) -> bool:
    return excess(prediction.limited, limits(budget)) == 0


def sentence(chosen: PairPrediction, every: Sequence[PairPrediction], budget: BudgetSpec, fits: bool) -> str:
    """Why this one: against the best plain one, and what the budget keeps out."""
    sure = f"{1 / chosen.ci[1]:.1f} to {1 / chosen.ci[0]:.1f}" if useful(chosen.ci) else "the times spread too far"
    text = f"{chosen.name}: {1 / chosen.seconds:.1f} tokens/s predicted ({sure})"
    text += f", KL {chosen.kl:.4f}, first token after {chosen.ttft:.2f} s, {chosen.memory / 1e6:.0f} MB"
    plain = min((p for p in every if p.gamma == 0 and p.target == chosen.target), key=lambda p: p.seconds, default=None)
    if plain is not None and chosen.gamma:
        text += f"; {plain.seconds / chosen.seconds:.2f} times the same target alone"
    if not fits:
        names = ("", "max_kl", "ttft_s", "memory_gb")
        pairs = zip(names, chosen.limited, limits(budget), strict=True)
        over = ", ".join(f"{n} {limit:g} (here {value:.4g})" for n, value, limit in pairs if limit and value > limit)
        return f"Nothing meets the budget {over}; the nearest is {text}."
    faster = min(every, key=lambda p: p.seconds)
    if faster.seconds < chosen.seconds:
        text += (
            f"; {faster.name} would be faster ({1 / faster.seconds:.1f}) but is over the budget (KL {faster.kl:.4f})"
        )
    return text + "."
