"""Speed: the same real prompts through every arm, in turns, so that drift of the machine hits all of them alike."""

from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from qspec.bridges.text import origin, prompt_tokens, prompts
from qspec.measure import stats as bench_stats
from qspec.measure.arm import Arm, Run, TokenizedPrompt
from qspec.measure.batch import measure_batches
from qspec.measure.prove import marginals, parting, seeded
from qspec.measure.stats import ArmFacts
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.engines import device_of
from qspec.pair.drafters.registry import draft_lm
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import BenchmarkSpec, Recipe
from qspec.schema.results import Measurement, Mismatch, Scalar, Speed
from qspec.speculation.device import obstacle
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.engine import generate
from qspec.speculation.request import GenerationRequest
from qspec.speculation.stats import teacher_forced_betas
from qspec.speculation.types import Generation, Sampling

WARM_UP_TOKENS = 4
BANDWIDTH_BYTES = 256 << 20
"""Larger than any last-level cache in reach, small enough for a laptop."""
GPU_BANDWIDTH_BYTES = 4 << 30
FORCED_PROMPTS = 32
"""Prompts whose answers teacher-forced acceptance is measured on."""


def bench(
    arms: Mapping[str, Arm],
    tokenizer: Tokenizer,
    recipe: Recipe,
    progress: Progress,
    *,
    eos_ids: Collection[int],
    prove: str | None = None,
) -> Speed:
    """Time every arm on the recipe's prompts at its temperatures. The first plain arm is the baseline of all.

    A speculative arm is also compared with the plain arm that holds the same target object: for speed, and at
    temperature 0 token for token.
    prove: the plain arm for which the first arm that drafts samples text, to be held against the target's distribution
    and, with seeds, against the plain arm's text.
    """
    spec = recipe.timing
    room = min(arm.target.max_length for arm in arms.values()) - spec.max_new_tokens
    requests, templated = load_requests(spec, tokenizer, room)
    condition: dict[str, Scalar] = {
        "prompts": len(requests),
        "data": Path(spec.prompts).name,
        "source": origin(spec.prompts),
        "prompt_tokens": f"{min(len(r.tokens) for r in requests)} to {max(len(r.tokens) for r in requests)}",
        "max_new_tokens": spec.max_new_tokens,
        "repeats": spec.repeats,
        "chat_template": templated,
        "batch": 1,
        "threads": torch.get_num_threads(),
        "seed": recipe.seed,
        **_looped(arms, requests[0], spec.max_new_tokens),
    }
    runs = list(measure(arms, requests, recipe, eos_ids, progress))
    facts = {name: arm_facts(name, arms) for name in arms}
    mismatches = find_mismatches(arms, facts, requests, runs)
    betas = _teacher_forced(arms, facts, requests, runs, recipe)
    rate = bandwidth(device_of(next(iter(arms.values())).target))
    speed = bench_stats.summarize(facts, requests, runs, mismatches, rate, condition, betas)
    batches = measure_batches(arms, facts, requests, recipe, eos_ids, progress)
    if prove is None:
        return speed.model_copy(update={"batches": batches})
    drafting = next(name for name in arms if facts[name].speculative and facts[name].plain == prove)
    tokens_drafted = marginals(arms[drafting], requests, recipe.seed, progress)
    repeated = seeded(arms[drafting], prove, drafting, requests, recipe.seed)
    return speed.model_copy(update={"batches": batches, "marginals": tokens_drafted, "seeded": repeated})


def load_requests(spec: BenchmarkSpec, tokenizer: Tokenizer, room: int) -> tuple[list[TokenizedPrompt], bool]:
    """Prompts of at most `room` tokens, and whether they went through a chat template (a base model has none)."""

    def fits(text: str) -> bool:
        return len(prompt_tokens(tokenizer, text)[0]) <= room

    chosen = prompts(spec.prompts, spec.per_category, spec.categories, fits)
    served = [prompt_tokens(tokenizer, prompt.text) for prompt in chosen]
    requests = [TokenizedPrompt(prompt.category, tokens) for prompt, (tokens, _) in zip(chosen, served, strict=True)]
    return requests, all(templated for _, templated in served)


def measure(
    arms: Mapping[str, Arm],
    requests: list[TokenizedPrompt],
    recipe: Recipe,
    eos_ids: Collection[int],
    progress: Progress,
    done: Container[tuple[float, int, int]] = (),
) -> Iterator[Run]:
    """Warm every arm up, then run repeat by repeat, prompt by prompt, all arms in turns (the first one rotates).

    done: (temperature, repeat, prompt) that are left out: they were measured earlier.
    """
    spec = recipe.timing

    def run(name: str, request: TokenizedPrompt, temperature: float, seed: int, most: int) -> Generation:
        arm, generator = arms[name], torch.Generator().manual_seed(seed)
        sampling = Sampling(temperature, recipe.speculation.top_k, recipe.speculation.top_p)
        return generate(
            arm.target,
            arm.drafter,
            arm.policy,
            request.tokens,
            most,
            sampling,
            eos_ids,
            generator,
            domain=request.category,
        )

    for name, arm in arms.items():
        for temperature in spec.temperatures if isinstance(arm.target, CudaDecoder) else (0.0,):  # each has its graphs
            run(name, requests[0], temperature, recipe.seed, min(WARM_UP_TOKENS, spec.max_new_tokens))
    jobs = [job for job in _turns(list(arms), len(requests), spec) if job[:3] not in done]
    current: tuple[float, int] | None = None
    for temperature, repeat, index, name in progress.track(jobs, "benchmark", len(jobs), "run"):
        if current != (temperature, repeat):
            current = temperature, repeat
            _forget(arms)
        seed = recipe.seed + repeat * len(requests) + index
        generation = run(name, requests[index], temperature, seed, spec.max_new_tokens)
        yield Run(name, temperature, repeat, index, generation)


def _looped(arms: Mapping[str, Arm], request: TokenizedPrompt, most: int) -> dict[str, Scalar]:
    """Which arms run in the loop on a GPU, beside those that the host steps there."""
    names = list[str]()
    for name, arm in arms.items():
        prompt = GenerationRequest(request.tokens, most, torch.Generator(), arm.drafter, arm.policy)
        if isinstance(arm.target, CudaDecoder) and obstacle(arm.target, [prompt], Sampling()) is None:
            names.append(name)
    return {"in the loop on the GPU": ", ".join(names)} if names else {}


def _forget(arms: Mapping[str, Arm]) -> None:
    for arm in arms.values():
        if isinstance(arm.drafter, SuffixDrafter | CombinedDrafter):
            arm.drafter.forget()


def bandwidth(device: torch.device | None = None, repeats: int = 5) -> Measurement:
    """Bytes per second that a device (or this CPU) reads from memory: the best of `repeats` sums over a tensor."""
    size = GPU_BANDWIDTH_BYTES if device is not None and device.type == "cuda" else BANDWIDTH_BYTES
    data = torch.ones(size // 4, device=device)
    rates: list[float] = []
    for _ in range(repeats):
        begin = perf_counter()
        data.sum().item()
        rates.append(size / (perf_counter() - begin))
    condition: dict[str, Scalar] = {"bytes": size, "threads": torch.get_num_threads()}
    return Measurement(metric="memory read", value=max(rates), unit="B/s", n=repeats, condition=condition)


def _turns(names: list[str], prompts: int, spec: BenchmarkSpec) -> Iterator[tuple[float, int, int, str]]:
    """(temperature, repeat, prompt, arm) in the order of measurement."""
    for temperature in spec.temperatures:
        for repeat in range(spec.repeats):
            for index in range(prompts):
                first = (repeat + index) % len(names)
                for name in names[first:] + names[:first]:
                    yield temperature, repeat, index, name


def arm_facts(name: str, arms: Mapping[str, Arm]) -> ArmFacts:
    """Facts of an arm that the statistics need; `plain` names the plain arm of the same target."""
    arm = arms[name]
    plain = [other for other, a in arms.items() if a.drafter is None and a.target is arm.target]
    return ArmFacts(
        speculative=arm.drafter is not None,
        plain=plain[0] if plain else None,
        weight_bytes=arm.weight_bytes,
        draft_bytes=arm.draft_bytes,
        kv_bytes_per_token=arm.kv_bytes_per_token,
        c_hat=arm.c_hat,
    )


def _teacher_forced(
    arms: Mapping[str, Arm],
    facts: Mapping[str, ArmFacts],
    requests: list[TokenizedPrompt],
    runs: list[Run],
    recipe: Recipe,
) -> dict[tuple[str, float, str], list[Tensor]]:
    """Acceptance rates of draft models behind every token of the plain arms' first answers.

    By arm, temperature and category; `all` is every one.
    """
    rates: dict[tuple[str, float, str], list[Tensor]] = {}
    models = {name: model for name, arm in arms.items() if (model := draft_lm(arm.drafter)) is not None}
    for run in runs:
        if run.repeat == 0 and run.prompt < FORCED_PROMPTS:
            sampling = Sampling(run.temperature, recipe.speculation.top_k, recipe.speculation.top_p)
            prompt, answer = requests[run.prompt].tokens, run.generation.tokens
            for name in (name for name in models if facts[name].plain == run.arm):
                betas = teacher_forced_betas(arms[name].target, models[name], prompt, answer, sampling)
                for category in ("all", requests[run.prompt].category):
                    rates.setdefault((name, run.temperature, category), []).append(betas)
    return rates


def find_mismatches(
    arms: Mapping[str, Arm], facts: Mapping[str, ArmFacts], requests: list[TokenizedPrompt], runs: list[Run]
) -> dict[str, list[Mismatch]]:
    """Speculative arms' greedy answers that differ from the plain arm of the same target, by arm."""
    answers = {(r.arm, r.repeat, r.prompt): r.generation.tokens for r in runs if r.temperature == 0}
    mismatches: dict[str, list[Mismatch]] = {}
    for (name, repeat, index), tokens in answers.items():
        plain = facts[name].plain
        if facts[name].speculative and plain is not None:
            expected = answers[plain, repeat, index]
            if tokens != expected:
                mismatch = parting(arms[name].target, requests[index], index, expected, tokens)
                mismatches.setdefault(name, []).append(mismatch)
    return mismatches
