"""Speed of several requests at once: the same groups of prompts with and without drafts, in turns."""

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, islice
from statistics import mean

import torch

from qspec.measure.arm import Arm, TokenizedPrompt
from qspec.measure.stats import ArmFacts
from qspec.nn.lm import BatchLM
from qspec.numerics.statistics.paired import detectable_ratio, geometric_mean, quartiles
from qspec.pair.drafters.registry import request_policy
from qspec.progress import Progress
from qspec.schema.recipe import Recipe
from qspec.schema.results import BatchSpeed, Measurement, Spread
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.types import DraftLength, Generation, Sampling

Answers = list[list[Generation]]
"""Generations of every repeat and group of prompts, in the order of measurement."""


def measure_batches(
    arms: Mapping[str, Arm],
    facts: Mapping[str, ArmFacts],
    requests: Sequence[TokenizedPrompt],
    recipe: Recipe,
    eos_ids: Collection[int],
    progress: Progress,
) -> tuple[BatchSpeed, ...]:
    """Arms that make drafters, each beside the plain arm of its target, at every batch size above 1 of the recipe."""
    spec = recipe.timing
    pairs = [(name, facts[name].plain) for name, arm in arms.items() if arm.new_drafter is not None]
    jobs = [
        (batch, temperature, name, plain)
        for batch in spec.batch_sizes
        for temperature in spec.temperatures
        for name, plain in pairs
        if batch > 1 and plain is not None and isinstance(arms[name].target, BatchLM)
    ]
    speeds: list[BatchSpeed] = []
    for batch, temperature, name, plain in progress.track(jobs, "batches", len(jobs), "size"):
        answers: dict[str, Answers] = {plain: [], name: []}
        # a slot keeps its policy, so that one that learns has learned
        policies = [request_policy(recipe.speculation.draft_length) for _ in range(batch)]
        for repeat in range(spec.repeats):
            for number, group in enumerate(_groups(requests, batch)):
                order = [plain, name] if (repeat + number) % 2 == 0 else [name, plain]
                for which in order:
                    answers[which].append(_run(arms[which], group, policies, recipe, temperature, eos_ids))
        speeds += [_summary(which, plain, batch, temperature, answers, spec.repeats) for which in (plain, name)]
    return tuple({(b.arm, b.batch, b.temperature): b for b in speeds}.values())


def _groups(requests: Sequence[TokenizedPrompt], batch: int) -> list[list[TokenizedPrompt]]:
    """The prompts in groups of one size; from the start again where they do not fill the only one."""
    count = max(1, len(requests) // batch)
    return [list(islice(cycle(requests), i * batch, (i + 1) * batch)) for i in range(count)]


def _run(
    arm: Arm,
    group: Sequence[TokenizedPrompt],
    policies: Sequence[DraftLength],
    recipe: Recipe,
    temperature: float,
    eos_ids: Collection[int],
) -> list[Generation]:
    assert isinstance(arm.target, BatchLM)
    speculation = recipe.speculation
    prompts = [
        GenerationRequest(
            request.tokens,
            recipe.timing.max_new_tokens,
            torch.Generator().manual_seed(recipe.seed + i),
            arm.new_drafter and arm.new_drafter(),
            policy if arm.new_drafter else None,
            request.category,
        )
        for i, (request, policy) in enumerate(zip(group, policies, strict=True))
    ]
    sampling = Sampling(temperature, speculation.top_k, speculation.top_p)
    return generate_batch(arm.target, prompts, sampling, eos_ids, speculation.draft_length.by_batch)


def _rate(group: Sequence[Generation]) -> float:
    """Tokens per second of all requests together; a step's seconds are shared out, so they add up to the clock's."""
    steps = [step for generation in group for step in generation.steps]
    seconds = sum(s.t_draft + s.t_verify + s.t_other for s in steps)
    return sum(s.accepted + 1 for s in steps) / seconds if seconds else 0.0


def _summary(
    name: str, plain: str, batch: int, temperature: float, answers: Mapping[str, Answers], repeats: int
) -> BatchSpeed:
    rates, base = [_rate(group) for group in answers[name]], [_rate(group) for group in answers[plain]]
    q1, mid, q3 = quartiles(rates)
    drafts = [step.drafted for group in answers[name] for generation in group for step in generation.steps]
    speedup, ratios = None, _ratios(rates, base, len(rates) // repeats)
    if name != plain and ratios:
        value, ci = geometric_mean(ratios)
        metric = "tokens per second, arm / baseline (geometric mean over groups of prompts)"
        least = detectable_ratio(ratios)
        speedup = Measurement(metric=metric, value=value, unit="x", n=len(ratios), ci=ci, detectable=least)
    pairs = [
        (mine.tokens, other.tokens)
        for group, others in zip(answers[name], answers[plain], strict=True)
        for mine, other in zip(group, others, strict=True)
        if temperature == 0
    ]
    return BatchSpeed(
        arm=name,
        baseline=plain,
        batch=batch,
        temperature=temperature,
        rate=Spread(median=mid, q1=q1, q3=q3, n=len(rates), unit="tokens/s"),
        speedup=speedup,
        draft_length=mean(drafts or [0]),
        equal=sum(mine == other for mine, other in pairs),
        answers=len(pairs),
    )


def _ratios(rates: Sequence[float], base: Sequence[float], groups: int) -> list[float]:
    """Paired ratio of every group of prompts; its repeats are averaged, as they are no new prompts."""
    pairs = [rates[i::groups] for i in range(groups)], [base[i::groups] for i in range(groups)]
    by_group = [[a / b for a, b in zip(*pair, strict=True) if a and b] for pair in zip(*pairs, strict=True)]
    return [geometric_mean(ratios)[0] for ratios in by_group if ratios]
