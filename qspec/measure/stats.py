"""From timed runs to speeds, paired ratios, acceptance and predictions. Pure: no clock, no model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from torch import Tensor

from qspec.measure.arm import Run, TokenizedPrompt, steps_of
from qspec.numerics.statistics.fidelity import wilson_interval
from qspec.numerics.statistics.paired import detectable_ratio, geometric_mean, quartiles
from qspec.numerics.statistics.student import ratio_interval
from qspec.schema.results import (
    Acceptance,
    ArmSpeed,
    Equality,
    Measurement,
    Mismatch,
    Prediction,
    PromptFacts,
    Ratio,
    Scalar,
    SourceCounts,
    Speed,
    Spread,
)
from qspec.speculation.stats import SpecStats, intervals_by_position
from qspec.speculation.types import Generation, StepRecord


@dataclass(frozen=True)
class ArmFacts:
    """An arm without its models. `plain`: the plain arm of the same target (itself, for a plain arm)."""

    speculative: bool
    plain: str | None
    weight_bytes: int = 0
    draft_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    c_hat: float | None = None


def summarize(
    facts: Mapping[str, ArmFacts],
    requests: Sequence[TokenizedPrompt],
    runs: Sequence[Run],
    mismatches: Mapping[str, list[Mismatch]],
    bandwidth: Measurement,
    condition: dict[str, Scalar],
    betas: Mapping[tuple[str, float, str], Sequence[Tensor]] | None = None,
) -> Speed:
    """All of `Speed` from the runs of every arm, batches left out.

    betas: teacher-forced acceptance rates of every prompt, by arm, temperature and category (`all`: every one).
    """
    baseline = next((name for name, fact in facts.items() if not fact.speculative), None)
    arms: list[ArmSpeed] = []
    ratios: list[Ratio] = []
    accepted: list[Acceptance] = []
    predictions: list[Prediction] = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        by_arm = {name: [r for r in runs if (r.arm, r.temperature) == (name, temperature)] for name in facts}
        for name, fact in facts.items():
            arms.append(_arm_speed(name, fact, by_arm[name], requests, bandwidth.value))
            partners = dict.fromkeys(other for other in (fact.plain, baseline) if other not in (None, name))
            own = [ratio for other in partners if other and (ratio := _ratio(name, other, by_arm))]
            ratios += own
            if fact.speculative:
                forced = {key[2]: values for key, values in (betas or {}).items() if key[:2] == (name, temperature)}
                accepted += acceptance(name, by_arm[name], requests, forced)
                measured = next((r.speedup.value for r in own if r.baseline == fact.plain), None)
                if fact.plain is not None and measured is not None:
                    predictions += _prediction(name, fact, by_arm, measured)
    compared = [name for name, fact in facts.items() if fact.speculative and fact.plain is not None]
    greedy = {name: sum(r.arm == name and r.temperature == 0 for r in runs) for name in compared}
    return Speed(
        prompts=tuple(PromptFacts(category=r.category, tokens=len(r.tokens)) for r in requests),
        arms=tuple(arms),
        ratios=tuple(ratios),
        acceptance=tuple(accepted),
        predictions=tuple(predictions),
        equality=tuple(_equality(name, facts[name], n, mismatches.get(name, [])) for name, n in greedy.items() if n),
        bandwidth=bandwidth,
        condition=condition,
    )


def _arm_speed(
    name: str, fact: ArmFacts, runs: Sequence[Run], requests: Sequence[TokenizedPrompt], bandwidth: float
) -> ArmSpeed:
    steps = steps_of(runs)
    size = _bytes_per_token(fact, runs, requests)
    parts = {"draft": sum(s.t_draft for s in steps), "verify": sum(s.t_verify for s in steps)}
    parts["other"] = sum(s.t_other for s in steps)
    total = sum(parts.values())
    return ArmSpeed(
        arm=name,
        speculative=fact.speculative,
        temperature=runs[0].temperature,
        ttft=_spread("ms", (1000 * r.generation.ttft for r in runs)),
        tpot=_spread("ms/token", _each(runs, _tpot)),
        decode_rate=_spread("tokens/s", (1000 / t for t in _each(runs, _tpot) if t > 0)),
        total_rate=_spread("tokens/s", _each(runs, _total_rate)),
        weight_bytes=fact.weight_bytes,
        draft_bytes=fact.draft_bytes,
        kv_bytes_per_token=fact.kv_bytes_per_token,
        bytes_per_token=size,
        ceiling_tokens_s=bandwidth / size if size else None,
        time_share={part: seconds / total if total else 0.0 for part, seconds in parts.items()},
    )


def _tpot(generation: Generation) -> float | None:
    """Milliseconds per token after the first; None for answers of one token."""
    count = len(generation.tokens) - 1
    return 1000 * generation.seconds / count if count > 0 else None


def _total_rate(generation: Generation) -> float | None:
    """Tokens per second from the request to the last token."""
    seconds = generation.ttft + generation.seconds
    return len(generation.tokens) / seconds if seconds > 0 else None


def _each(runs: Iterable[Run], f: Callable[[Generation], float | None]) -> list[float]:
    return [value for run in runs if (value := f(run.generation)) is not None]


def _spread(unit: str, values: Iterable[float]) -> Spread:
    listed = list(values)
    q1, mid, q3 = quartiles(listed) if listed else (float("nan"),) * 3
    return Spread(median=mid, q1=q1, q3=q3, n=len(listed), unit=unit)


def _bytes_per_token(fact: ArmFacts, runs: Sequence[Run], requests: Sequence[TokenizedPrompt]) -> float | None:
    """Bytes that one output token has to read at the measured context, draft length and acceptance."""
    if not fact.weight_bytes or (fact.speculative and not steps_of(runs)):
        return None
    context = mean(len(requests[r.prompt].tokens) + len(r.generation.tokens) / 2 for r in runs)
    step = fact.weight_bytes + context * fact.kv_bytes_per_token
    if not fact.speculative:
        return step
    steps = steps_of(runs)
    drafted, accepted = mean(s.drafted for s in steps), mean(s.accepted for s in steps)
    return (step + drafted * fact.draft_bytes) / (1 + accepted)


def _prompt_tpot(runs: Iterable[Run]) -> dict[int, float]:
    """Median time per token over the repeats, by prompt."""
    times: dict[int, list[float]] = {}
    for run in runs:
        if (value := _tpot(run.generation)) is not None and value > 0:
            times.setdefault(run.prompt, []).append(value)
    return {prompt: median(values) for prompt, values in times.items()}


def _ratio(name: str, baseline: str, by_arm: Mapping[str, Sequence[Run]]) -> Ratio | None:
    """Paired speed ratio over the prompts that both arms answered with at least two tokens; None without any."""
    arm, base = _prompt_tpot(by_arm[name]), _prompt_tpot(by_arm[baseline])
    prompts = [prompt for prompt in base if prompt in arm]
    ratios = [base[prompt] / arm[prompt] for prompt in prompts]
    if not ratios:
        return None
    value, ci = geometric_mean(ratios)
    least = detectable_ratio(ratios)
    metric = "time per token, baseline / arm (geometric mean over prompts)"
    return Ratio(
        arm=name,
        baseline=baseline,
        temperature=by_arm[name][0].temperature,
        speedup=Measurement(metric=metric, value=value, unit="x", n=len(ratios), ci=ci, detectable=least),
        per_prompt=tuple(ratios),
        prompts=tuple(prompts),
    )


def _prediction(name: str, fact: ArmFacts, by_arm: Mapping[str, Sequence[Run]], measured: float) -> list[Prediction]:
    """Speedup by the model of arXiv 2211.17192 with measured inputs, beside the measured one."""
    plain = fact.plain
    assert plain is not None
    steps, plain_steps = steps_of(by_arm[name]), steps_of(by_arm[plain])
    if not steps or not plain_steps:
        return []
    t_plain = median(s.t_verify + s.t_other for s in plain_steps)
    stats = SpecStats.from_steps(steps, t_plain)
    return [
        Prediction(
            arm=name,
            baseline=plain,
            temperature=by_arm[name][0].temperature,
            alpha=stats.alpha,
            draft_length=stats.drafted / stats.steps,
            draft_cost=stats.c,
            verify_cost=stats.verify_cost,
            predicted=stats.predicted_speedup,
            measured=measured,
            expected_tokens=stats.expected_tokens,
            verify_costs=dict(stats.verify_costs),
            best_length=stats.best_length,
            best=stats.best_speedup,
            operations=None if fact.c_hat is None else _operations(steps, fact.c_hat),
            idle_share=stats.idle_steps / stats.steps,
            idle_cost=max(0.0, stats.idle_cost - median(s.t_other for s in plain_steps) / t_plain),
        )
    ]


def _operations(steps: Sequence[StepRecord], c_hat: float) -> float:
    """Rows computed per token that came out, a draft's row counted as `c_hat`."""
    return sum(s.drafted * c_hat + s.drafted + 1 for s in steps) / sum(s.accepted + 1 for s in steps)


def _equality(name: str, fact: ArmFacts, n: int, mismatches: Sequence[Mismatch]) -> Equality:
    assert fact.plain is not None
    return Equality(arm=name, baseline=fact.plain, n=n, equal=n - len(mismatches), mismatches=tuple(mismatches))


def acceptance(
    arm: str, runs: Sequence[Run], requests: Sequence[TokenizedPrompt], betas: Mapping[str, Sequence[Tensor]]
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
    accepted, tested = [_accepted(steps) for steps in by_prompt], [_tested(steps) for steps in by_prompt]
    ci = ratio_interval(accepted, tested)
    if ci is not None:
        low, high = wilson_interval(_accepted(distinct), _tested(distinct))
        ci = max(0.0, min(ci[0], low)), min(1.0, max(ci[1], high))
    return Measurement(metric="acceptance rate alpha", value=value, unit="per draft token", n=sum(tested), ci=ci)


def _accepted(steps: Sequence[StepRecord]) -> int:
    return sum(s.accepted for s in steps)


def _tested(steps: Sequence[StepRecord]) -> int:
    """Draft tokens that were judged: the accepted ones, and the first rejected one."""
    return sum(s.accepted + (s.accepted < s.drafted) for s in steps)


def _teacher_forced(betas: Sequence[Tensor]) -> Measurement | None:
    sums, counts = [float(beta.sum()) for beta in betas], [len(beta) for beta in betas]
    if not sum(counts):
        return None
    metric = "acceptance rate alpha, mean sum of minima behind the plain answers' tokens"
    ci = ratio_interval(sums, counts)
    bounded = ci and (max(0.0, ci[0]), min(1.0, ci[1]))
    return Measurement(metric=metric, value=sum(sums) / sum(counts), unit="per token", n=sum(counts), ci=bounded)
