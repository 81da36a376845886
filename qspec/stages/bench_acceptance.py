"""How drafts fared, by kind of prompt, from timed runs. Pure: no clock, no model.

Intervals are over prompts: tokens of one answer resemble each other, and greedy repeats are the same answer again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from qspec.numerics.fidelity import wilson_interval
from qspec.numerics.student import ratio_interval
from qspec.schema.results import Acceptance, Measurement, SourceCounts
from qspec.spec.stats import SpecStats, intervals_by_position
from qspec.spec.types import StepRecord
from qspec.stages.bench_arm import Request, Run, steps_of


def acceptance(
    arm: str, runs: Sequence[Run], requests: Sequence[Request], betas: Mapping[str, Sequence[Tensor]]
) -> list[Acceptance]:
    """Pooled over all prompts (`all`), then by category. betas: teacher-forced rates of every prompt, by category."""
    groups = {"all": list(runs)}
    for run in runs:
        groups.setdefault(requests[run.prompt].category, []).append(run)
    drafting = {category: members for category, members in groups.items() if steps_of(members)}
    return [_of(arm, category, members, betas.get(category, ())) for category, members in drafting.items()]


def _of(arm: str, category: str, runs: Sequence[Run], betas: Sequence[Tensor]) -> Acceptance:
    stats = SpecStats.from_steps(steps_of(runs), 1.0)
    prompts = dict.fromkeys(run.prompt for run in runs)
    by_prompt = [steps_of([run for run in runs if run.prompt == prompt]) for prompt in prompts]
    lengths, emitted = [len(steps) for steps in by_prompt], [sum(s.accepted + 1 for s in steps) for steps in by_prompt]
    answers = [run for run in runs if run.repeat == 0] if runs[0].temperature == 0 else runs
    return Acceptance(
        arm=arm,
        temperature=runs[0].temperature,
        category=category,
        prompts=len(prompts),
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        alpha=_alpha(stats.alpha, by_prompt, steps_of(answers)),
        tokens_per_step=stats.tokens_per_step,
        tokens_per_step_ci=ratio_interval(emitted, lengths),
        per_position=stats.per_position,
        per_position_ci=intervals_by_position(steps_of(answers)),
        teacher_forced=_teacher_forced(betas),
        nodes_per_step=stats.nodes_per_step,
        sources=tuple(SourceCounts(source=s, **asdict(counts)) for s, counts in stats.by_source.items()),
    )


def _alpha(value: float, by_prompt: Sequence[Sequence[StepRecord]], distinct: Sequence[StepRecord]) -> Measurement:
    """Acceptance per tested token; its interval is never narrower than that of as many independent tokens."""
    stood, tested = [_stood(steps) for steps in by_prompt], [_tested(steps) for steps in by_prompt]
    ci = ratio_interval(stood, tested)
    if ci is not None:
        low, high = wilson_interval(_stood(distinct), _tested(distinct))
        ci = max(0.0, min(ci[0], low)), min(1.0, max(ci[1], high))
    return Measurement(metric="acceptance rate alpha", value=value, unit="per draft token", n=sum(tested), ci=ci)


def _stood(steps: Sequence[StepRecord]) -> int:
    return sum(s.accepted for s in steps)


def _tested(steps: Sequence[StepRecord]) -> int:
    """Draft tokens that were judged: those that stood, and the first that did not."""
    return sum(s.accepted + (s.accepted < s.drafted) for s in steps)


def _teacher_forced(betas: Sequence[Tensor]) -> Measurement | None:
    sums, counts = [float(beta.sum()) for beta in betas], [len(beta) for beta in betas]
    if not sum(counts):
        return None
    metric = "acceptance rate alpha, mean sum of minima behind the plain answers' tokens"
    ci = ratio_interval(sums, counts)
    bounded = ci and (max(0.0, ci[0]), min(1.0, ci[1]))
    return Measurement(metric=metric, value=sum(sums) / sum(counts), unit="per token", n=sum(counts), ci=bounded)
