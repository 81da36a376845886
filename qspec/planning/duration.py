"""How long a job takes, roughly: the operations and bytes of each stage over a CPU's rates, where the engine runs.

What is no matmul costs seconds per weight. These constants were measured once, on SmolLM2-135M and one core: they
order stages and tell minutes from hours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qspec.numerics.quantization.clipping import SHRINK
from qspec.numerics.roofline import PassCost
from qspec.quantization.calibrate import KEEP_ROWS
from qspec.quantization.sensitivity import TOKENS
from qspec.schema.devices import read_device
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import MMLU_PRO_SUBJECTS, Recipe, TaskSpec

TOKEN_OVERHEAD = 0.005
"""Seconds per decoded token outside matmuls (an eager torch loop spends 3.5 to 5.4 ms)."""
DISK = 1e9
"""Bytes per second when weights are read (assumed)."""
HANDLING, ROUNDING, FEEDBACK = 5e-8, 1e-8, 1e-7
"""Seconds per weight: read, check, store and read back; round to nearest once; round with error feedback once."""
FEEDBACK_RUNS, FEEDBACK_PASSES = 2, 3.2
"""The one that is judged and the final one; passes over the text, second moments included."""
UNITS = 4
"""Decisions per decoder layer: q/k/v, o, gate/up, down."""
SUBJECTS, TASK_ROWS, QUESTION_TOKENS, ANSWER_TOKENS = len(MMLU_PRO_SUBJECTS), 12_032, 250, 300
"""MMLU-Pro: subjects and rows; assumed tokens of a question (or example) and of an answer."""
PROMPT_TOKENS, CATEGORIES, PER_CATEGORY = 300, 6, 80
"""Spec-Bench: assumed tokens of a prompt; its categories and their prompts, where the recipe names no number."""


@dataclass(frozen=True)
class Step:
    """One stage of the job and its estimated seconds."""

    stage: str
    work: str
    seconds: float


@dataclass(frozen=True)
class HalfCost:
    """What `steps` knows of one half.

    stored: bytes of all weights before quantization, as they are read; cost: of a pass then. weights, rounded: how many
    there are, and how many are quantized. reasons: why it sees calibration text, none if it does not. kv_candidates:
    scales that are tried for every layer's KV cache, 0 where the recipe says them.
    """

    stored: float
    cost: PassCost
    spec: QuantSpec
    weights: int
    rounded: int
    layers: int
    reasons: tuple[str, ...] = ()
    kv_candidates: int = 0


def steps(recipe: Recipe, halves: list[HalfCost]) -> list[Step]:
    """Estimate by stage; `halves` are the target and, if it has weights to quantize, the draft."""
    rate, bandwidth = speeds()
    moved = sum(half.stored for half in halves)
    found = [Step("load", "read the weights", moved / DISK), *_quantization(recipe, halves, rate)]
    if recipe.evaluation.fidelity is not None:
        fidelity = recipe.evaluation.fidelity
        tokens = (1 + len(fidelity.domains)) * fidelity.windows * fidelity.length
        ops = halves[0].cost.ops + sum(half.cost.ops for half in halves)
        found.append(Step("fidelity", f"{tokens:,} held-out tokens", tokens * ops / rate))
    if (needle := recipe.evaluation.needle) is not None:
        tokens = sum(needle.lengths) * len(needle.depths) * needle.repeats
        arms = 2 + (recipe.target.quantization.kv is not None)
        found.append(Step("needle", f"{tokens:,} tokens, {arms} arms", arms * tokens * halves[0].cost.ops / rate))
    found += [_task_step(task, halves[0].cost, rate, bandwidth) for task in recipe.evaluation.tasks]
    return [*found, _bench_step(recipe, halves[0].cost, rate, bandwidth)] if recipe.device == "cpu" else found


def speeds() -> tuple[float, float]:
    """Operations/s and bytes/s that the estimate uses."""
    sheet = read_device("cpu")
    return (sheet.estimate_tflops or 1) * 1e12, (sheet.estimate_tb_s or 1) * 1e12


def basis(recipe: Recipe) -> str:
    """One sentence on where the seconds come from."""
    rate, bandwidth = speeds()
    rates = f"{rate / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.0f} GB/s (two server cores)"
    text = f"an estimate: assumed {rates}, not measured here"
    return text if recipe.device == "cpu" else f"{text}; models are made on the CPU whatever the device"


def _quantization(recipe: Recipe, halves: list[HalfCost], rate: float) -> Iterator[Step]:
    tokens = recipe.calibration.samples * recipe.calibration.length
    own = [half for half in halves if half.spec.engine == "qspec"]
    if seen := sum(half.cost.ops for half in own if set(half.reasons) - {"gptq"}):
        yield Step("calibrate", f"{tokens:,} tokens", tokens * seen / rate)
    if seconds := sum(_sensitivity(half, tokens, rate) for half in halves):
        yield Step("sensitivity", "each candidate in each layer alone", seconds)
    if seconds := sum(_kv_choice(half, tokens, rate) for half in halves):
        yield Step("KV choice", "each layer's cache alone", seconds)
    rounding = sum(HANDLING * half.weights + _rounds(half.spec) * ROUNDING * half.rounded for half in halves)
    searches = sum(_searches(half, rate) for half in halves)
    yield Step("quantize", "round, store, read back" + "; searches" * bool(searches), rounding + searches)
    if feedback := sum(_feedback(half, tokens, rate) for half in halves):
        yield Step("gptq", f"{FEEDBACK_RUNS} runs of error feedback per layer", feedback)
    if elsewhere := sum(2 * tokens * half.cost.ops for half in halves if half.spec.engine == "llmcompressor"):
        yield Step("llmcompressor", "passes over the text, in the other library", elsewhere / rate)


def _rounds(spec: QuantSpec) -> int:
    """Roundings that one call makes: a clip by error tries every range."""
    return 1 + len(SHRINK) * (spec.clip.method == "mse")


def _searches(half: HalfCost, rate: float) -> float:
    """Seconds of smoothing strengths and of variants: each is rounded once, and run on a sample."""
    smoothing, tried = half.spec.smoothing, 0
    if smoothing is not None and smoothing.strength == "auto":
        tried += smoothing.grid + 1  # leaving the layer alone is one of them
    variants = 2 ** (half.spec.activation_scales == "auto") * 4 ** (half.spec.fp8_format == "adaptive")
    tried += variants if variants > 1 else 0
    share = half.rounded / half.weights if half.weights else 0.0
    return tried * (_rounds(half.spec) * ROUNDING * half.rounded + share * KEEP_ROWS * half.cost.ops / rate)


def _feedback(half: HalfCost, tokens: int, rate: float) -> float:
    if half.spec.engine != "qspec" or half.spec.method != "gptq":
        return 0.0
    return FEEDBACK_RUNS * FEEDBACK * half.rounded + FEEDBACK_PASSES * tokens * half.cost.ops / rate


def _sensitivity(half: HalfCost, tokens: int, rate: float) -> float:
    """Two passes in float; then each unit under each candidate alone, and for `kl` all layers behind it."""
    mixed = half.spec.mixed
    if mixed is None:
        return 0.0
    sample = min(tokens, TOKENS[mixed.metric])
    candidates = sum(name != "none" for name in mixed.candidates)
    alone = UNITS * candidates * (half.layers / 2 if mixed.metric == "kl" else 1)
    return candidates * _rounds(half.spec) * ROUNDING * half.weights + (2 + alone) * sample * half.cost.ops / rate


def _kv_choice(half: HalfCost, tokens: int, rate: float) -> float:
    """Ranges of the whole text; then each layer's cache alone, and all layers behind it."""
    if not half.kv_candidates:
        return 0.0
    sample = min(tokens, TOKENS["kl"])
    return (tokens + (2 + half.kv_candidates * half.layers / 2) * sample) * half.cost.ops / rate


def _task_step(task: TaskSpec, cost: PassCost, rate: float, bandwidth: float) -> Step:
    subjects = SUBJECTS if task.subjects is None else len(task.subjects)
    rows = TASK_ROWS * subjects // SUBJECTS if task.limit is None else task.limit * subjects
    prompt, answer = QUESTION_TOKENS * (task.num_fewshot + 1), min(task.max_gen_toks or ANSWER_TOKENS, ANSWER_TOKENS)
    seconds = rows * (prompt * cost.ops / rate + answer * _token_seconds(cost, rate, bandwidth))
    return Step(task.name, f"{rows:,} questions, both arms", 2 * len({*task.backends} & {"qspec", "hf"}) * seconds)


def _bench_step(recipe: Recipe, cost: PassCost, rate: float, bandwidth: float) -> Step:
    bench = recipe.benchmark
    prompts = (bench.per_category or PER_CATEGORY) * (CATEGORIES if bench.categories is None else len(bench.categories))
    arms = 4 + recipe.draft.beside_lookup  # prompt lookup joins the others
    batched = sum(max(size, prompts // size * size) for size in bench.batch_sizes if size > 1)
    runs = (arms * prompts + 2 * batched) * bench.repeats * len(bench.temperatures)
    token = bench.max_new_tokens * _token_seconds(cost, rate, bandwidth)
    return Step("benchmark", f"{runs:,} generations", runs * (PROMPT_TOKENS * cost.ops / rate + token))


def _token_seconds(cost: PassCost, rate: float, bandwidth: float) -> float:
    return max(cost.ops / rate, cost.weight_bytes / bandwidth) + TOKEN_OVERHEAD
