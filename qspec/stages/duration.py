"""How long a job takes, roughly: the operations and bytes of each stage over a CPU's rates, where the engine runs."""

from dataclasses import dataclass

from qspec.numerics.roofline import PassCost
from qspec.schema.devices import read_device
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import MMLU_PRO_SUBJECTS, NgramDraft, Recipe, TaskSpec

TOKEN_OVERHEAD = 0.005
"""Seconds per decoded token outside matmuls (an eager torch loop spends 3.5 to 5.4 ms)."""
DISK = 1e9
"""Bytes per second when weights are read (assumed)."""
SAMPLE_ROWS = 128
"""Input rows per layer on which smoothing strengths are tried."""
SUBJECTS, TASK_ROWS, QUESTION_TOKENS, ANSWER_TOKENS = len(MMLU_PRO_SUBJECTS), 12_032, 250, 300
"""MMLU-Pro: subjects and rows; assumed tokens of a question (or example) and of an answer."""
PROMPT_TOKENS, CATEGORIES = 300, 6
"""Assumed tokens of a benchmark prompt, and categories where the recipe names none."""


@dataclass(frozen=True)
class Step:
    """One stage of the job and its estimated seconds."""

    stage: str
    work: str
    seconds: float


@dataclass(frozen=True)
class HalfCost:
    """What `steps` knows of one half: its spec, and whether it sees calibration text.

    weights: bytes of all before quantization; cost: of a pass then.
    """

    weights: float
    cost: PassCost
    spec: QuantSpec
    calibrated: bool


def steps(recipe: Recipe, halves: list[HalfCost]) -> list[Step]:
    """Estimate by stage; `halves` are the target and, if it has weights to quantize, the draft."""
    rate, bandwidth = speeds()
    moved = sum(half.weights for half in halves)
    found = [Step("load", "read the weights", moved / DISK), *_quantization(recipe, halves, rate, bandwidth)]
    if recipe.evaluation.fidelity is not None:
        tokens = recipe.evaluation.fidelity.windows * recipe.evaluation.fidelity.length
        ops = halves[0].cost.ops + sum(half.cost.ops for half in halves)
        found.append(Step("fidelity", f"{tokens:,} held-out tokens", tokens * ops / rate))
    found += [_task_step(task, halves[0].cost, rate, bandwidth) for task in recipe.evaluation.tasks]
    return [*found, _bench_step(recipe, halves[0].cost, rate, bandwidth)] if recipe.device == "cpu" else found


def speeds() -> tuple[float, float]:
    """Operations/s and bytes/s that the estimate uses."""
    sheet = read_device("cpu")
    return (sheet.estimate_tflops or 1) * 1e12, (sheet.estimate_tb_s or 1) * 1e12


def basis(recipe: Recipe) -> str:
    """One sentence on where the seconds come from."""
    rate, bandwidth = speeds()
    text = f"assumed {rate / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.0f} GB/s (two server cores), not measured here"
    return text if recipe.device == "cpu" else f"{text}; the engine computes on the CPU whatever the device"


def _quantization(recipe: Recipe, halves: list[HalfCost], rate: float, bandwidth: float) -> list[Step]:
    tokens = recipe.calibration.samples * recipe.calibration.length
    seen = sum(half.cost.ops for half in halves if half.calibrated)
    found = [Step("calibrate", f"{tokens:,} tokens", tokens * seen / rate)] if seen else []
    passes = 8 * sum(half.weights for half in halves) / bandwidth
    search = sum(half.spec.smoothing.grid * SAMPLE_ROWS * half.cost.ops for half in halves if half.spec.smoothing)
    second_order = sum(2 * tokens * half.cost.ops for half in halves if half.spec.method != "rtn")
    return [*found, Step("quantize", "8 passes over the weights, searches", passes + (search + second_order) / rate)]


def _task_step(task: TaskSpec, cost: PassCost, rate: float, bandwidth: float) -> Step:
    subjects = SUBJECTS if task.subjects is None else len(task.subjects)
    rows = TASK_ROWS * subjects // SUBJECTS if task.limit is None else task.limit * subjects
    prompt, answer = QUESTION_TOKENS * (task.num_fewshot + 1), min(task.max_gen_toks or ANSWER_TOKENS, ANSWER_TOKENS)
    seconds = rows * (prompt * cost.ops / rate + answer * _token_seconds(cost, rate, bandwidth))
    return Step(task.name, f"{rows:,} questions, both arms", 2 * len(task.backends) * seconds)


def _bench_step(recipe: Recipe, cost: PassCost, rate: float, bandwidth: float) -> Step:
    bench = recipe.benchmark
    prompts = bench.per_category * (CATEGORIES if bench.categories is None else len(bench.categories))
    arms = 4 if isinstance(recipe.draft, NgramDraft) else 5  # prompt lookup joins the others
    runs = arms * prompts * bench.repeats * len(bench.temperatures)
    token = bench.max_new_tokens * _token_seconds(cost, rate, bandwidth)
    return Step("benchmark", f"{runs:,} generations", runs * (PROMPT_TOKENS * cost.ops / rate + token))


def _token_seconds(cost: PassCost, rate: float, bandwidth: float) -> float:
    return max(cost.ops / rate, cost.weight_bytes / bandwidth) + TOKEN_OVERHEAD
