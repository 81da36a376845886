"""How long a job takes, roughly: the operations and bytes of each stage over a CPU's rates, where the engine runs.

What is no matmul costs seconds per weight. These constants were measured once, on SmolLM2-135M and one core: they
order stages and tell minutes from hours. Tasks that name no number of questions get one that fits a stated time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qspec.nn.engines import gpu_for
from qspec.numerics.quantization.clipping import SHRINK
from qspec.numerics.roofline import PassCost
from qspec.provenance import usable_cores
from qspec.quantization.calibrate import KEEP_ROWS
from qspec.quantization.sensitivity import TOKENS
from qspec.quantization.smooth import STRENGTHS
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
CORES = 2
"""Cores of the machine that the rates of `eval/devices.yaml` are for; more are taken to be faster in proportion."""
GPU_SHARE = 0.5
"""The share of a data sheet's rates that a GPU is assumed to reach."""
PROMPT_TOKENS, CATEGORIES, PER_CATEGORY = 300, 6, 80
"""Spec-Bench: assumed tokens of a prompt; its categories and their prompts, where the recipe names no number."""


@dataclass(frozen=True)
class TaskSize:
    """A task's parts (subjects) and rows; assumed tokens of a question, and of an answer (0: choices are scored)."""

    parts: int
    rows: int
    question: int = 250
    answer: int = 300


TASKS = {
    "mmlu_pro": TaskSize(len(MMLU_PRO_SUBJECTS), 12_032),
    "leaderboard_mmlu_pro": TaskSize(1, 12_032, 300, 0),
    "gsm8k": TaskSize(1, 1_319, 150, 200),
    "humaneval": TaskSize(1, 164, 150, 250),
    "wikitext": TaskSize(1, 60, 5_000, 0),
    "last_words": TaskSize(1, 503, 36, 0),
    "next_sentence": TaskSize(1, 469, 90, 0),
    "hellaswag": TaskSize(1, 10_042, 250, 0),
    "mmlu": TaskSize(57, 14_042, 120, 0),
    "arc_challenge": TaskSize(1, 1_172, 80, 0),
    "winogrande": TaskSize(1, 1_267, 50, 0),
}
UNKNOWN = TaskSize(1, 10_000)
"""Any other task, until its rows are read."""


def size_of(task: TaskSpec) -> TaskSize:
    """The size of the task's chosen subjects."""
    whole = TASKS.get(task.name, UNKNOWN)
    parts = whole.parts if task.subjects is None else len(task.subjects)
    return replace(whole, parts=parts, rows=whole.rows * parts // whole.parts)


def questions(task: TaskSpec) -> int:
    """Questions that each arm gets, as far as the task is known."""
    size = size_of(task)
    return size.rows if task.limit is None else min(size.rows, task.limit * size.parts)


@dataclass(frozen=True)
class Machine:
    """operations, bandwidth: per second, of operations and bytes."""

    operations: float
    bandwidth: float

    def read(self, cost: PassCost, tokens: float) -> float:
        """Seconds of passes over so many tokens, many at a time."""
        return tokens * cost.ops / self.operations

    def write(self, cost: PassCost, tokens: float) -> float:
        """Seconds of decoding so many tokens, one at a time."""
        return tokens * (max(cost.ops / self.operations, cost.weight_bytes / self.bandwidth) + TOKEN_OVERHEAD)


@dataclass(frozen=True)
class Step:
    """One stage of the job and its estimated seconds."""

    stage: str
    work: str
    seconds: float


@dataclass(frozen=True)
class HalfCost:
    """Everything that `steps` needs of one half.

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


def steps(recipe: Recipe, halves: list[HalfCost], counted: Mapping[TaskSpec, int] | None = None) -> list[Step]:
    """Estimate by stage; `halves` are the target and, if it has weights to quantize, the draft.

    counted: questions of tasks, where they were counted.
    """
    maker, tester, cost = maker_here(), tester_here(recipe), halves[0].cost
    moved = sum(half.stored for half in halves)
    listed = [Step("load", "read the weights", moved / DISK), *_quantization(recipe, halves, maker.operations)]
    if (fidelity := recipe.evaluation.fidelity) is not None:
        tokens = (1 + len(fidelity.domains)) * fidelity.windows * fidelity.length
        seconds = sum(tester.read(half, tokens) for half in (cost, *(half.cost for half in halves)))
        listed.append(Step("fidelity", f"{tokens:,} held-out tokens", seconds))
    if (needle := recipe.evaluation.needle) is not None:
        tokens = sum(needle.lengths) * len(needle.depths) * needle.repeats
        arms = 2 + (recipe.target.quantization.kv is not None)
        listed.append(Step("needle", f"{tokens:,} tokens, {arms} arms", arms * tester.read(cost, tokens)))
    for task in recipe.evaluation.tasks:
        time = TaskTime(task, cost, tester)
        count = (counted or {}).get(task, questions(task))
        of_all = questions(task.model_copy(update={"limit": None}))
        share = f"{count:,} questions" if count == of_all else f"{count:,} of {of_all:,} questions"
        listed.append(Step(task.name, f"{share}, both arms", time.seconds(count)))
    timed = recipe.device == "cpu" or gpu_for(recipe.device) is not None
    return [*listed, *_bench_step(recipe, cost, tester)] if timed else listed


def settled(recipe: Recipe, cost: PassCost) -> Recipe:
    """The recipe with a `limit` for each task that names none and does not fit its part of `evaluation.task_minutes`.

    cost: of a pass of the original target. Tasks that only servers elsewhere answer are left as they are.
    """
    spec, tester = recipe.evaluation, tester_here(recipe)
    open_to = [task for task in spec.tasks if task.limit is None and {*task.backends} != {"api"}]
    if spec.task_minutes is None or not open_to:
        return recipe
    share = 60 * spec.task_minutes / len(open_to)
    tasks = (TaskTime(task, cost, tester).fitted(share) if task in open_to else task for task in spec.tasks)
    return recipe.model_copy(update={"evaluation": spec.model_copy(update={"tasks": tuple(tasks)})})


@dataclass(frozen=True)
class TaskTime:
    """How long a task takes on a machine. cost: a pass of the model that answers."""

    task: TaskSpec
    cost: PassCost
    machine: Machine

    def seconds(self, questions: int) -> float:
        """Seconds of both arms, through the engines of this process."""
        own = {*self.task.backends} & {"qspec", "hf"}
        return 2 * len(own) * (size_of(self.task).parts * self._examples + questions * self._question)

    def fitted(self, seconds: float) -> TaskSpec:
        """The task with as many questions of each subject as fit, or one each of as many subjects as do, at least one.

        A server that is started here is taken to be as fast.
        """
        size, room = size_of(self.task), seconds / (2 * len({*self.task.backends} - {"api"}))
        if room >= size.parts * self._examples + size.rows * self._question:
            return self.task
        limit = int((room / size.parts - self._examples) / self._question)
        subjects = self.task.subjects or (MMLU_PRO_SUBJECTS if self.task.name == "mmlu_pro" else None)
        if limit < 1 and subjects is not None:
            most = max(1, int(room / (self._examples + self._question)))
            return self.task.model_copy(update={"limit": 1, "subjects": subjects[:most]})
        return self.task.model_copy(update={"limit": max(1, limit)})

    @property
    def _examples(self) -> float:
        """Seconds of a part's worked examples, which its questions share."""
        return self.machine.read(self.cost, self.task.num_fewshot * size_of(self.task).question)

    @property
    def _question(self) -> float:
        size = size_of(self.task)
        answer = min(self.task.max_gen_toks or size.answer, size.answer)
        return self.machine.read(self.cost, size.question) + self.machine.write(self.cost, answer)


def maker_here() -> Machine:
    """This machine's CPU, which makes pairs for every device, as the estimate takes it to be."""
    sheet, scale = read_device("cpu"), usable_cores() / CORES * 1e12
    return Machine((sheet.estimate_tflops or 1) * scale, (sheet.estimate_tb_s or 1) * scale)


def tester_here(recipe: Recipe) -> Machine:
    """The machine that measures a pair: this one's GPU for a pair that is for one, else its CPU."""
    sheet = read_device(recipe.device)
    if gpu_for(recipe.device) is None or not (sheet.bf16_tflops and sheet.bandwidth_tb_s):
        return maker_here()
    return Machine(GPU_SHARE * sheet.bf16_tflops * 1e12, GPU_SHARE * sheet.bandwidth_tb_s * 1e12)


def basis(recipe: Recipe) -> str:
    """One sentence on where the seconds come from."""
    here, cores = maker_here(), usable_cores()
    rates = f"{here.operations / 1e9:,.0f} GFLOP/s and {here.bandwidth / 1e9:,.0f} GB/s on {cores} cores"
    text = f"an estimate: assumed {rates}, not measured here"
    if recipe.device == "cpu":
        return text
    where = "on the GPU" if gpu_for(recipe.device) is not None else "there too, this machine has no GPU"
    return f"{text}; pairs are made on the CPU whatever the device, and measured {where}"


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
    """Seconds of smoothing strengths: each is rounded once, and run on a sample."""
    smoothing, tried = half.spec.smoothing, 0
    if smoothing is not None and smoothing.strength == "auto":
        tried += STRENGTHS + 1  # leaving the layer alone is one of them
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


def _bench_step(recipe: Recipe, cost: PassCost, tester: Machine) -> Iterator[Step]:
    bench = recipe.benchmark
    if bench is None:
        return
    prompts = (bench.per_category or PER_CATEGORY) * (CATEGORIES if bench.categories is None else len(bench.categories))
    arms = 4 + recipe.draft.beside_lookup  # prompt lookup joins the others
    batched = sum(max(size, prompts // size * size) for size in bench.batch_sizes if size > 1)
    runs = (arms * prompts + 2 * batched) * bench.repeats * len(bench.temperatures)
    each = tester.read(cost, PROMPT_TOKENS) + tester.write(cost, bench.max_new_tokens)
    yield Step("benchmark", f"{runs:,} generations", runs * each)
