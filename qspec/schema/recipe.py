"""The recipe: one complete job in one YAML file.

Every field has a default except the models, so a recipe says only what it means. Names of schemes are the ones that
compressed-tensors and vLLM use.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from qspec.errors import RecipeError
from qspec.numerics.speculation.probs import fits_float32
from qspec.schema.drafts import Draft
from qspec.schema.overrides import set_value
from qspec.schema.problems import closest, rule, short, validate
from qspec.schema.quantization import MOST, ModelSpec, QuantSpec, Strict
from qspec.schema.text import dump_yaml, parse_yaml, read_text
from qspec.schema.tuning import TuneSpec

Device = Literal["cpu", "h100", "h200", "h20", "l40s", "rtx4090", "a100", "b200"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MOST_SEED = 2**32 - 1
"""The largest seed that every random generator in use takes."""


def _in_float32(value: float) -> float:
    if not fits_float32(value):
        raise ValueError(f"{value} is lost in float32; give 0, or a number between 1.2e-38 and 3.4e38")
    return value


Float32 = Annotated[float, AfterValidator(_in_float32)]


class DataSpec(Strict):
    """Rows of a named data set (see `eval/datasets.yaml`) or of a `.jsonl` / `.parquet` / `.txt` file."""

    name: str
    weight: float = Field(default=1.0, gt=0, le=1e30, description="share among the calibration sources")


class CalibrationSpec(Strict):
    """Text that activation and KV ranges are measured on, tokenised exactly as the model is served."""

    data: tuple[DataSpec, ...] = Field(
        default=(DataSpec(name="gutenberg"), DataSpec(name="self_instruct")), min_length=1
    )
    samples: int = Field(default=64, ge=1, le=MOST)
    length: int = Field(default=512, ge=8, le=MOST)
    chat_template: bool = False


class FusionSpec(Strict):
    """`share_scales`: one scale for q/k/v and gate/up. `fold_norms`: RMSNorm gains go into the next linear."""

    share_scales: bool = True
    fold_norms: bool = False


BatchRange = tuple[
    Annotated[int, Field(ge=1, le=MOST)], Annotated[int, Field(ge=1, le=MOST)], Annotated[int, Field(ge=0, le=64)]
]


class DraftLengthSpec(Strict):
    """How many tokens to draft.

    `fixed`: `k`. `heuristic`: from `k`, +2 when all were accepted and -1 otherwise. `confidence`: until the draft's own
    probability of a token is below `threshold`, which adapts. `optimal`: what gains most at measured acceptance and
    costs, down to none. All but `fixed` stay within `max_k`. `by_batch`: `[lo, hi, K]`, at most K from batch size lo to
    hi (vLLM's num_speculative_tokens_per_batch_size).
    """

    policy: Literal["fixed", "heuristic", "confidence", "optimal"] = "heuristic"
    k: int = Field(default=5, ge=1, le=64)
    max_k: int = Field(default=16, ge=1, le=64)
    threshold: float = Field(default=0.4, gt=0, lt=1, description="of confidence, at first")
    by_batch: tuple[BatchRange, ...] = ()

    @property
    def longest(self) -> int:
        """The most that may be drafted at once."""
        return self.k if self.policy == "fixed" else self.max_k

    @rule
    def _ordered(self) -> None:
        if self.policy != "fixed" and self.k > self.max_k:
            raise ValueError(f"k {self.k} is above max_k {self.max_k}; raise max_k")

    @rule
    def _has_a_use(self) -> None:
        if self.threshold != 0.4 and self.policy != "confidence":
            raise ValueError(f"threshold {self.threshold} is for policy: confidence; omit it, or change the policy")

    @rule
    def _covers_batches(self) -> None:
        last = 0
        for lo, hi, _ in self.by_batch:
            if not last < lo <= hi or (last == 0 and lo != 1):
                fix = "give [lo, hi, K] in order, from batch size 1, that do not overlap"
                raise ValueError(f"by_batch [{lo}, {hi}] does not continue what ends at {last}; {fix}")
            last = hi


class SpeculationSpec(Strict):
    """Draft length, the sampling that requests use by default, and the longest context."""

    draft_length: DraftLengthSpec = DraftLengthSpec()
    temperature: Float32 = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0, le=MOST)
    top_p: Float32 = Field(default=1.0, gt=0, le=1)
    max_length: int | None = Field(default=None, ge=16, description="cache positions; default: the model's own")


class FidelitySpec(Strict):
    """Held-out text on which both arms are compared: perplexity, KL, top-1 agreement.

    `domains`: further texts, as many windows of each; a loss in code or another language hides in a mean.
    """

    data: str = "wikitext2"
    domains: tuple[str, ...] = ()
    windows: int = Field(default=16, ge=1, le=MOST)
    length: int = Field(default=512, ge=16, le=MOST)


MMLU_PRO_SUBJECTS = (
    "biology",
    "business",
    "chemistry",
    "computer_science",
    "economics",
    "engineering",
    "health",
    "history",
    "law",
    "math",
    "other",
    "philosophy",
    "physics",
    "psychology",
)


Backend = Literal["qspec", "hf", "vllm", "api"]
"""Who answers a task: qspec's engine, transformers, a vLLM that is started for it, servers that run already."""


class TaskSpec(Strict):
    """An lm-eval task. `limit` rows per subject (None: what fits `evaluation.task_minutes`, all where that is None).

    `max_gen_toks`: tokens per answer (None: the harness's own).

    `run_code`: allows tasks that run what the model writes.
    """

    name: str = "mmlu_pro"
    num_fewshot: int = Field(default=5, ge=0, le=MOST)
    limit: int | None = Field(default=None, ge=1, le=MOST)
    subjects: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_gen_toks: int | None = Field(default=None, ge=1, le=MOST)
    chat_template: bool = False
    run_code: bool = False
    backends: tuple[Backend, ...] = Field(default=("qspec",), min_length=1)

    @rule
    def _known_subjects(self) -> None:
        for subject in self.subjects or () if self.name == "mmlu_pro" else ():
            if subject.replace(" ", "_") not in MMLU_PRO_SUBJECTS:
                near = closest(subject, list(MMLU_PRO_SUBJECTS))
                raise ValueError(
                    f"subject {short(subject)} is none of MMLU-Pro; {near}valid: {', '.join(MMLU_PRO_SUBJECTS)}"
                )


class NeedleSpec(Strict):
    """A number hidden in running text and asked for at its end, at growing lengths: what a quantized KV cache loses.

    `repeats` numbers at each of the `depths` (shares of the text) of each of the `lengths` (tokens).
    """

    data: str = "gutenberg"
    lengths: tuple[Annotated[int, Field(ge=128, le=MOST)], ...] = Field(default=(512, 1024, 2048), min_length=1)
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(default=(0.1, 0.5, 0.9), min_length=1)
    repeats: int = Field(default=4, ge=1, le=MOST)


class ApiSpec(Strict):
    """Servers with an OpenAI-style API, one for each arm, for tasks of backend `api`; addresses end in `/v1`.

    `original_model`, `quantized_model`: None: the first that the server names. `chat`: chat completions, with the
    server's template, instead of completions. `context`: tokens (None: the least that the servers state).
    """

    original: str = Field(pattern="^https?://")
    quantized: str = Field(pattern="^https?://")
    original_model: str | None = None
    quantized_model: str | None = None
    chat: bool = False
    context: int | None = Field(default=None, ge=16, le=MOST)
    concurrency: int = Field(default=8, ge=1, le=1024, description="requests at once")


class EvaluationSpec(Strict):
    """Checks of accuracy; None switches a part off. `api`: who answers tasks of that backend.

    `task_minutes`: tasks without a `limit` ask as many questions of each subject as are estimated to fit into it,
    together, and at least one; None: all questions.
    """

    fidelity: FidelitySpec | None = FidelitySpec()
    needle: NeedleSpec | None = None
    tasks: tuple[TaskSpec, ...] = (TaskSpec(),)
    task_minutes: float | None = Field(default=60, gt=0)
    api: ApiSpec | None = None

    @property
    def off(self) -> bool:
        """Whether nothing is measured."""
        return not (self.fidelity or self.needle or self.tasks)


class BenchmarkSpec(Strict):
    """Speed: {original, quantized} x {plain, speculative}, alternating, on real prompts.

    `per_category`: None: all. `batch_sizes` above 1: the pair with and without drafts, so many prompts at once.
    """

    prompts: str = "spec_bench"
    per_category: int | None = Field(default=1, ge=1, le=MOST)
    categories: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_new_tokens: int = Field(default=64, ge=2, le=MOST)
    repeats: int = Field(default=3, ge=1, le=MOST)
    temperatures: tuple[Float32, ...] = (0.0,)
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1,)

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or min(value) < 0:
            raise ValueError("temperatures need at least one value, none below 0; use [0.0] for greedy")
        return value


class BudgetSpec(Strict):
    """Limits that `plan` checks before compute (memory, minutes) and the report after it (the rest)."""

    memory_gb: float | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=24 * 60, gt=0)
    max_kl: float | None = Field(default=None, gt=0, description="nats per token against the original")
    min_agreement: float | None = Field(default=None, gt=0, le=1, description="share of equal most likely tokens")
    min_recovery: float | None = Field(default=None, gt=0, le=1.5, description="task score / original's")
    ttft_s: float | None = Field(default=None, gt=0)


_OFF: dict[str, dict[str, Any]] = {
    "evaluation": {"fidelity": None, "tasks": []},
    "fusion": {"share_scales": False},
    "budget": {"minutes": None},
    "target.quantization": {"scheme": "none"},
    "draft.quantization": {"scheme": "none"},
}
"""The meaning of `null` for parts that it switches off but that are never absent; `benchmark` and `tune` may be."""


class Recipe(Strict):
    """One complete job: quantize, pair, package, prove, measure. `evaluation`, `benchmark`: None measures nothing."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)
    description: str = ""
    device: Device = "cpu"
    dtype: Dtype = "auto"
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    target: ModelSpec
    draft: Draft
    calibration: CalibrationSpec = CalibrationSpec()
    fusion: FusionSpec = FusionSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    benchmark: BenchmarkSpec | None = BenchmarkSpec()
    budget: BudgetSpec = BudgetSpec()
    tune: TuneSpec[Draft] | None = None

    @property
    def quantized(self) -> dict[str, QuantSpec]:
        """How the halves that are models are quantized, by name: `target` and, if it is one, `draft`."""
        halves = {"target": self.target.quantization, "draft": self.draft.quantized}
        return {name: spec for name, spec in halves.items() if spec is not None}

    @property
    def asks_transformers(self) -> bool:
        """Whether a task is answered through transformers, which then has to load the target."""
        return any("hf" in task.backends for task in self.evaluation.tasks)

    @property
    def timing(self) -> BenchmarkSpec:
        """The benchmark; of a recipe whose `run` measures no speed the default one, for whoever measures it later."""
        return self.benchmark or BenchmarkSpec()

    def whole(self) -> "Recipe":
        """The recipe with every question of its tasks."""
        tasks = tuple(task.model_copy(update={"limit": None}) for task in self.evaluation.tasks)
        spec = self.evaluation.model_copy(update={"tasks": tasks, "task_minutes": None})
        return self.model_copy(update={"evaluation": spec})

    @rule
    def _held_out(self) -> None:
        fidelity = self.evaluation.fidelity
        used = {source.name for source in self.calibration.data}
        for text in (fidelity.data, *fidelity.domains) if fidelity is not None else ():
            if text in used:
                raise ValueError(f"evaluation.fidelity: {text!r} is calibration text too; compare on other text")

    @rule
    def _text_to_judge_by(self) -> None:
        fed_back = any(spec.engine == "qspec" and spec.method == "gptq" for spec in self.quantized.values())
        if fed_back and self.calibration.samples < 2:
            raise ValueError("method gptq judges by a text that it is not fitted to; raise calibration.samples to 2")

    @rule
    def _groups_are_committed(self) -> None:
        longest = self.speculation.draft_length.longest
        for kv in (spec.kv for spec in self.quantized.values()):
            if kv is not None and kv.by_channel and kv.residual < longest:
                rule = f"residual {kv.residual} is below the longest draft ({longest}), which may be rolled back"
                raise ValueError(f"kv: {rule}; channel scales need residual: {longest} or more (64 is always enough)")

    @rule
    def _caches_take_trees(self) -> None:
        for name, spec in self.quantized.items() if self.draft.branching else ():
            kv = spec.kv
            if kv is not None and (kv.by_channel or kv.residual):
                rule = "channel scales and residual round tokens by positions, which the nodes of a tree share"
                raise ValueError(f"{name} kv: {rule}; draft chains, or omit them")

    @classmethod
    def read(cls, path: str | Path, overrides: tuple[str, ...] = ()) -> "Recipe":
        """Parse a YAML file; `overrides` are `dotted.key=yaml value`. Raises `RecipeError` naming field and fix."""
        where = str(path)
        data = parse_yaml(read_text(Path(path), "recipe"), where)
        if not isinstance(data, dict):
            raise RecipeError(
                where,
                "must be a mapping of fields",
                "start with name:, target: and draft:",
            )
        return cls.of(data, overrides, where)

    @classmethod
    def of(cls, data: dict[str, Any], overrides: tuple[str, ...], where: str) -> "Recipe":
        """Plain data with `overrides` put into it. `null` switches a section off."""
        for override in overrides:
            set_value(data, override)
        for path, off in _OFF.items():
            parent, _, name = path.rpartition(".")
            holder = data.get(parent) if parent else data
            if isinstance(holder, dict) and name in holder and holder[name] is None:
                holder[name] = dict(off)
        for name in ("calibration", "speculation"):
            if data.get(name, {}) is None:
                raise RecipeError(f"{where}: {name} null", "is no stage that can be switched off", "omit the section")
        return validate(cls, data, where)

    def dump(self) -> str:
        """YAML text that `read` takes back unchanged (plain scalars only)."""
        return dump_yaml(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain data (JSON types only), every default written out."""
        return self.model_dump(mode="json")
