"""The recipe: one complete job in one YAML file.

Every field has a default except the models, so a recipe says only what it means. Names of schemes are the ones that
compressed-tensors and vLLM use.
"""

from pathlib import Path
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from qspec.errors import RecipeError
from qspec.schema.overrides import set_value
from qspec.schema.problems import closest, validate
from qspec.schema.text import dump_yaml, parse_yaml, read_text

Scheme = Literal["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "none"]
Device = Literal["cpu", "h100", "h200", "h20", "l40s", "rtx4090", "a100", "b200"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MOST = 1_000_000
"""Of anything that is counted: what is above it is a slip, and would fill the memory or never end."""
MOST_SEED = 2**32 - 1
"""What every random generator that is used takes."""


class Strict(BaseModel):
    """Base of all recipe parts: unknown fields refused, values immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ClipSpec(Strict):
    """Range of a block: its maximum, a percentile of |x|, or the clip of least squared error."""

    method: Literal["absmax", "percentile", "mse"] = "absmax"
    percentile: float = Field(default=99.9, gt=50, le=100)


class SmoothingSpec(Strict):
    """Move activation outliers into weights (SmoothQuant). `auto` searches the strength per layer by output error."""

    strength: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    grid: int = Field(default=5, ge=2, le=20, description="strengths tried by `auto`, evenly over [0, 1)")


class KVSpec(Strict):
    """KV-cache format. INT8 exists as `token_head` only, FP8 also with stored scales per tensor or head."""

    format: Literal["fp8_e4m3", "int8"] = "fp8_e4m3"
    granularity: Literal["tensor", "head", "token_head"] = "tensor"
    scales: Literal["calibrated", "cast"] = "calibrated"

    @model_validator(mode="after")
    def _int8_is_dynamic(self) -> "KVSpec":
        if self.format == "int8" and self.granularity != "token_head":
            raise ValueError("int8 KV has no static scales in any runtime; set granularity: token_head, or fp8_e4m3")
        return self


def _pattern(match: str) -> str:
    """A layer pattern as `plan.Rule` reads it; `re:` must compile."""
    try:
        re.compile(match.removeprefix("re:") if match.startswith("re:") else "")
    except re.error as e:
        raise ValueError(f"{match!r} is no regular expression ({e}); mend it, or drop re: for a plain name") from None
    return match


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]


class RuleSpec(Strict):
    """Another scheme for the linear layers that `match`: a name, its last part, or `re:` and a pattern."""

    match: Pattern
    scheme: Scheme
    group_size: int | None = Field(default=None, gt=0, le=MOST)


class QuantSpec(Strict):
    """How one model is quantized."""

    engine: Literal["qspec", "llmcompressor"] = "qspec"
    scheme: Scheme = "W8A8"
    method: Literal["rtn", "gptq", "smoothquant+gptq", "awq", "autoround"] = "rtn"
    group_size: int = Field(default=128, gt=0, le=MOST, description="W4A16 only")
    clip: ClipSpec = ClipSpec()
    smoothing: SmoothingSpec | None = None
    rules: tuple[RuleSpec, ...] = ()
    ignore: tuple[Pattern, ...] = ("lm_head",)
    kv: KVSpec | None = None

    @model_validator(mode="after")
    def _engine_has_method(self) -> "QuantSpec":
        if self.engine == "qspec" and self.method not in ("rtn", "gptq"):
            fix = "smoothing and method: gptq" if self.method == "smoothquant+gptq" else "engine: llmcompressor"
            raise ValueError(f"engine qspec has the methods rtn and gptq; for {self.method} set {fix}")
        if self.engine == "llmcompressor" and self.smoothing is not None:
            raise ValueError("smoothing belongs to engine qspec; with llmcompressor set method: smoothquant+gptq")
        if self.engine == "llmcompressor" and self.scheme == "none":
            raise ValueError("scheme none leaves llmcompressor nothing to do; set engine: qspec, or another scheme")
        if self.method == "awq" and self.scheme != "W4A16":
            raise ValueError("method awq is for 4-bit weights; set scheme: W4A16")
        if self.method == "smoothquant+gptq" and self.scheme == "W4A16":
            raise ValueError("smoothquant helps quantized activations, W4A16 keeps them; set method: gptq")
        return self


class ModelSpec(Strict):
    """A model and its quantization.

    `model`: Hub id, local folder, `*.gguf` file, or `package:<import name>/<file>` for weights that an installed
    Python package carries.
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    quantization: QuantSpec = QuantSpec()


class ModelDraft(ModelSpec):
    """A smaller model with the same tokenizer."""

    kind: Literal["model"]


class SelfDraft(Strict):
    """A copy of the target under its own plan; `layers` keeps only the first so many."""

    kind: Literal["self"]
    layers: int | None = Field(default=None, ge=1)
    quantization: QuantSpec = QuantSpec(scheme="W4A16", group_size=64)


class NgramDraft(Strict):
    """Prompt lookup: continue the longest recent match of the last tokens. No weights."""

    kind: Literal["ngram"]
    min_ngram: int = Field(default=1, ge=1)
    max_ngram: int = Field(default=3, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> "NgramDraft":
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; swap them")
        return self


class MlpDraft(Strict):
    """A combined token/embedding speculator (arXiv 2404.19124), pretrained; sizes as in its `config.json`."""

    kind: Literal["mlp_speculator"]
    model: str
    revision: str | None = None
    n_predict: int = Field(default=3, ge=1, le=64)
    inner_dim: int = Field(default=0, ge=0, le=MOST, description="0: the target's hidden size")
    tie_weights: bool = False
    scale_input: bool = False


Draft = Annotated[ModelDraft | SelfDraft | NgramDraft | MlpDraft, Field(discriminator="kind")]


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


class DraftLengthSpec(Strict):
    """How many tokens to draft: always `k`, or from `k` with +2 when all were accepted and -1 otherwise."""

    policy: Literal["fixed", "heuristic"] = "heuristic"
    k: int = Field(default=5, ge=1, le=64)
    max_k: int = Field(default=16, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> "DraftLengthSpec":
        if self.policy == "heuristic" and self.k > self.max_k:
            raise ValueError(f"k {self.k} is above max_k {self.max_k}; raise max_k")
        return self


class SpeculationSpec(Strict):
    """Draft length, the sampling law that requests use by default, and the longest context."""

    draft_length: DraftLengthSpec = DraftLengthSpec()
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0, le=MOST)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_length: int | None = Field(default=None, ge=16, description="cache positions; default: the model's own")


class FidelitySpec(Strict):
    """Held-out text on which both arms are compared: perplexity, KL, top-1 agreement."""

    data: str = "wikitext2"
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


class TaskSpec(Strict):
    """An lm-eval task. `limit` rows per subject, `max_gen_toks` tokens per answer (None: the harness's own)."""

    name: str = "mmlu_pro"
    num_fewshot: int = Field(default=5, ge=0, le=MOST)
    limit: int | None = Field(default=None, ge=1, le=MOST)
    subjects: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_gen_toks: int | None = Field(default=None, ge=1, le=MOST)
    chat_template: bool = False
    backends: tuple[Literal["qspec", "hf"], ...] = Field(default=("qspec",), min_length=1)

    @model_validator(mode="after")
    def _known_subjects(self) -> "TaskSpec":
        for subject in self.subjects or () if self.name == "mmlu_pro" else ():
            if subject.replace(" ", "_") not in MMLU_PRO_SUBJECTS:
                near = closest(subject, list(MMLU_PRO_SUBJECTS))
                raise ValueError(
                    f"subject {subject!r} is none of MMLU-Pro; {near}valid: {', '.join(MMLU_PRO_SUBJECTS)}"
                )
        return self


class EvaluationSpec(Strict):
    """What is checked about accuracy; None switches a part off."""

    fidelity: FidelitySpec | None = FidelitySpec()
    tasks: tuple[TaskSpec, ...] = (TaskSpec(),)


class BenchmarkSpec(Strict):
    """Speed: {original, quantized} x {plain, speculative}, alternating, on real prompts."""

    prompts: str = "spec_bench"
    per_category: int = Field(default=1, ge=1, le=MOST)
    categories: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_new_tokens: int = Field(default=64, ge=2, le=MOST)
    repeats: int = Field(default=3, ge=1, le=MOST)
    temperatures: tuple[float, ...] = (0.0,)

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or min(value) < 0:
            raise ValueError("temperatures need at least one value, none below 0; use [0.0] for greedy")
        return value


class BudgetSpec(Strict):
    """Limits that `plan` checks before compute (memory, minutes) and the report after it (the rest)."""

    memory_gb: float | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=None, gt=0)
    max_kl: float | None = Field(default=None, gt=0, description="nats per token against the original")
    min_recovery: float | None = Field(default=None, gt=0, le=1.5, description="task score / original's")
    ttft_s: float | None = Field(default=None, gt=0)


class Recipe(Strict):
    """One complete job: quantize, pair, package, prove, measure."""

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
    benchmark: BenchmarkSpec = BenchmarkSpec()
    budget: BudgetSpec = BudgetSpec()

    @model_validator(mode="after")
    def _held_out(self) -> "Recipe":
        held_out = self.evaluation.fidelity and self.evaluation.fidelity.data
        if any(source.name == held_out for source in self.calibration.data):
            raise ValueError(f"evaluation.fidelity.data {held_out!r} is calibration text too; compare on other text")
        return self

    @model_validator(mode="after")
    def _text_to_judge_by(self) -> "Recipe":
        halves = [self.target, self.draft] if isinstance(self.draft, ModelDraft | SelfDraft) else [self.target]
        specs = [half.quantization for half in halves]
        fed_back = any(spec.engine == "qspec" and spec.method == "gptq" for spec in specs)
        if fed_back and self.calibration.samples < 2:
            raise ValueError("method gptq judges by a text that it is not fitted to; raise calibration.samples to 2")
        return self

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
        for override in overrides:
            set_value(data, override)
        return validate(cls, data, where)

    def dump(self) -> str:
        """YAML text that `read` takes back unchanged (plain scalars only)."""
        return dump_yaml(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain data (JSON types only), every default written out."""
        return self.model_dump(mode="json")
