"""The results of a run: every number with its unit, count, spread and condition. `results.json` is exactly this.

Arms are called `original` and `quantized`; intervals are 95 %.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from qspec.errors import IntegrityError
from qspec.plain_files import read_bytes

Scalar = str | int | float | bool | None


class Record(BaseModel):
    """Base of all results: unknown fields refused, values immutable, infinities survive JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Measurement(Record):
    """One number. `n` counts what was averaged, `ci` is its 95 % interval, `condition` what it was measured under.

    `detectable`, of differences and ratios: the smallest true distance from no effect (0, or 1) that such a measurement
    shows in 4 of 5 cases.
    """

    metric: str
    value: float
    unit: str
    n: int
    ci: tuple[float, float] | None = None
    detectable: float | None = None
    condition: dict[str, Scalar] = {}


class Provenance(Record):
    """The origin of a measurement: files, settings, machine.

    `files`: sha256 of every file of the halves that it ran, by path inside the pair; `settings`: sections of the recipe
    that decide what these compute. A measurement speaks of a pair only while both are that pair's.
    """

    files: dict[str, str]
    settings: dict[str, Any]
    environment: dict[str, str]


class Measured(Record):
    """A measurement that is made by itself, and made again by itself. `provenance` None: nobody has noted it."""

    provenance: Provenance | None = None


M = TypeVar("M", bound=Measured)


class Window(Record):
    """Means over the tokens of one window, in nats and as a share."""

    original_nll: float
    quantized_nll: float
    kl: float
    agreement: float


class Fidelity(Measured):
    """How close the quantized model is to the original on the same windows of held-out text."""

    original_perplexity: Measurement
    quantized_perplexity: Measurement
    perplexity_ratio: Measurement
    kl: Measurement
    top1_agreement: Measurement
    windows: tuple[Window, ...] = ()

    @property
    def data(self) -> str:
        """Name of the text."""
        return str(self.kl.condition.get("data", "text"))

    def measurements(self) -> tuple[Measurement, ...]:
        ratio = (self.original_perplexity, self.quantized_perplexity, self.perplexity_ratio)
        return (*ratio, self.kl, self.top1_agreement)


class TaskRow(Record):
    """One item of a task, answered by both arms to the same prompt (hash of the prompt's text).

    `…_answer`: hash of what an arm wrote, where items are answered in words. `…_likelihood`: log-likelihood of the
    right answer (nats), where answers are given and scored.
    """

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    original: float
    quantized: float
    original_cut: bool = False  # the answer hit the token limit
    quantized_cut: bool = False
    original_answer: str = ""
    quantized_answer: str = ""
    original_likelihood: float | None = None
    quantized_likelihood: float | None = None
    prompt_cut: bool = False  # the prompt did not fit the context and lost its beginning


class SubTask(Record):
    """Scores of one sub-task (a subject). `difference` is quantized - original; `p_value` is corrected for looking at
    all sub-tasks (Holm)."""

    task: str
    n: int
    original: float
    quantized: float
    difference: Measurement | None = None
    p_value: float | None = None


class TaskResult(Measured):
    """A task on both arms, paired item by item.

    `p_value` is McNemar's exact test (None: items are not right or wrong); `detectable` is the smallest true
    difference that these items would show with 80 % power; `verdict` says in words what the numbers carry. `recovery`
    is the quantized score over the original's. `likelihood` is quantized - original of the log-likelihood of right
    answers (nats/item), where answers are given and scored.
    """

    task: str
    backend: str
    original: Measurement
    quantized: Measurement
    difference: Measurement
    recovery: float | None
    recovery_ci: tuple[float, float] | None = None
    only_original: int
    only_quantized: int
    p_value: float | None
    detectable: float
    likelihood: Measurement | None = None
    verdict: str
    original_cut: float
    quantized_cut: float
    prompts_cut: int
    sub_tasks: tuple[SubTask, ...]
    rows: tuple[TaskRow, ...]


class NeedleRow(Record):
    """A number hidden at `depth` (a share) of `length` tokens: whether each arm found it, and how likely it was.

    Arms: `original`, `quantized`, and `float_kv`, the quantized target with its KV cache in floats; nll in nats/token.
    """

    length: int
    depth: float
    hits: dict[str, float]
    nll: dict[str, float]


class Retrieval(Record):
    """Hidden numbers of one context length (0: of all): found by each arm, and what the quantized target lost.

    `difference`, `recovery`, `nll`: quantized against original; `kv_…`: against the same target with a float KV cache.
    """

    length: int
    found: dict[str, Measurement]
    difference: Measurement
    p_value: float | None
    recovery: float | None
    recovery_ci: tuple[float, float] | None
    verdict: str
    nll: Measurement
    kv_difference: Measurement | None = None
    kv_p_value: float | None = None
    kv_nll: Measurement | None = None


class Needles(Measured):
    """Numbers hidden in running text, by context length."""

    condition: dict[str, Scalar]
    pooled: Retrieval
    lengths: tuple[Retrieval, ...]
    rows: tuple[NeedleRow, ...]


class Answer(Record):
    """A short greedy answer of each arm to the beginning of a held-out text.

    `…_loop`: the largest share of its tokens that are those a few places before (1: a loop, or no answer); `finite`:
    whether every logit of the quantized arm was a number.
    """

    original: str
    quantized: str
    original_loop: float
    quantized_loop: float
    finite: bool = True


class Answers(Measured):
    """Short answers, of texts that both arms were given the beginnings of."""

    rows: tuple[Answer, ...]


class DraftFidelity(Measured):
    """How close the packaged draft is to the one that it was made from, on held-out text.

    `acceptance`, `unrounded_acceptance`: mean sum of minima of two distributions behind every token: the quantized
    target's, and that of the packaged draft, or of the draft as it came. A speculator head speaks by its first stage.
    """

    kl: Measurement
    top1_agreement: Measurement
    acceptance: Measurement
    unrounded_acceptance: Measurement


class Accuracy(Record):
    """Results of `evaluate`. `domains`: fidelity on further texts."""

    fidelity: Fidelity | None = None
    domains: tuple[Fidelity, ...] = ()
    answers: Answers | None = None
    draft: DraftFidelity | None = None
    needles: Needles | None = None
    tasks: tuple[TaskResult, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[Fidelity, ...]:
        """Fidelity on all texts."""
        return (*((self.fidelity,) if self.fidelity else ()), *self.domains)

    def parts(self) -> list[tuple[str, Measured]]:
        """Measurements, each with what people call it."""
        named: list[tuple[str, Measured]] = [(f"fidelity on {text.data}", text) for text in self.texts]
        others = {"short answers": self.answers, "the draft's fidelity": self.draft, "needles": self.needles}
        named += [(name, part) for name, part in others.items() if part is not None]
        return named + [(f"{task.task} ({task.backend})", task) for task in self.tasks]

    def measured_on(self, provenance: Provenance) -> "Accuracy":
        """The same, with `provenance` on every part that is of the target; the draft's is of both halves."""

        def noted(part: M) -> M:
            return part.model_copy(update={"provenance": provenance})

        return Accuracy(
            fidelity=self.fidelity and noted(self.fidelity),
            domains=tuple(map(noted, self.domains)),
            answers=self.answers and noted(self.answers),
            draft=self.draft,
            needles=self.needles and noted(self.needles),
            tasks=tuple(map(noted, self.tasks)),
            skipped=self.skipped,
        )

    def updated(self, new: "Accuracy") -> "Accuracy":
        """The measurements of `new`, and those of this one that `new` has not made again."""
        again = {name for name, _ in new.parts()}
        stay = [part for name, part in self.parts() if name not in again]
        texts = (*new.texts, *(part for part in stay if isinstance(part, Fidelity)))
        return Accuracy(
            fidelity=texts[0] if texts else None,
            domains=texts[1:],
            answers=new.answers or self.answers,
            draft=new.draft or self.draft,
            needles=new.needles or self.needles,
            tasks=(*new.tasks, *(part for part in stay if isinstance(part, TaskResult))),
            skipped=new.skipped if new.tasks else self.skipped,
        )


class Spread(Record):
    """Median and quartiles of `n` values."""

    median: float
    q1: float
    q3: float
    n: int
    unit: str


class ArmSpeed(Record):
    """Speed of one arm at one temperature.

    `tpot` is milliseconds per token after the first; `bytes_per_token` what one output token must read (weights and
    KV cache, draft included), `ceiling_tokens_s` the memory bandwidth over it; None where sizes are not known.
    `time_share`: draft, verify and other as shares of the decoding time.
    """

    arm: str
    speculative: bool
    temperature: float
    ttft: Spread
    tpot: Spread
    decode_rate: Spread
    total_rate: Spread
    weight_bytes: int
    draft_bytes: int
    kv_bytes_per_token: float
    bytes_per_token: float | None
    ceiling_tokens_s: float | None
    time_share: dict[str, float]


class Ratio(Record):
    """`arm` against `baseline` on the same prompts: baseline's time per token over the arm's (above 1: faster).

    `speedup` is the geometric mean over prompts, `per_prompt` the ratios behind it (medians over repeats) and `prompts`
    their places in `Speed.prompts`.
    """

    arm: str
    baseline: str
    temperature: float
    speedup: Measurement
    per_prompt: tuple[float, ...]
    prompts: tuple[int, ...] = ()


class SourceCounts(Record):
    """Draft tokens of one source of a drafter that has several."""

    source: str
    steps: int
    drafted: int
    accepted: int


class Acceptance(Record):
    """How drafts fared. `alpha` is per draft token examined; `tokens_per_step` = 1 + accepted / steps.

    `per_position[i]` is the share of steps that drafted position i whose token there was accepted. `teacher_forced`:
    alpha from both distributions behind every token of the plain answers, without drafting (None: no draft model).
    Of trees, positions are depths, and `nodes_per_step` counts every token that was verified. Intervals of `alpha`,
    `tokens_per_step` and `teacher_forced` are over prompts, whose tokens resemble each other (None: one prompt).
    """

    arm: str
    temperature: float
    category: str
    prompts: int
    steps: int
    drafted: int
    accepted: int
    alpha: Measurement
    tokens_per_step: float
    tokens_per_step_ci: tuple[float, float] | None = None
    per_position: tuple[float, ...]
    per_position_ci: tuple[tuple[float, float], ...] = ()
    teacher_forced: Measurement | None = None
    nodes_per_step: float | None = None
    sources: tuple[SourceCounts, ...] = ()


class Prediction(Record):
    """Speedup of speculation from measured alpha, draft length and costs, beside the measured one.

    `draft_cost` (c) is one draft token and `verify_cost` one verification, both over one plain step, `verify_costs` the
    latter by number of rows. `expected_tokens` per step follow from alpha. `best_length` (0: plain decoding) predicts
    the largest speedup, `best`. `operations`: arithmetic per token over plain decoding's (theorem 3.11); None: unknown.
    `idle_share` of the steps had no drafts; drafter, policy and bookkeeping added `idle_cost` plain steps to each.
    """

    arm: str
    baseline: str
    temperature: float
    alpha: float
    draft_length: float
    draft_cost: float
    verify_cost: float
    predicted: float
    measured: float
    expected_tokens: float | None = None
    verify_costs: dict[int, float] = {}
    best_length: int | None = None
    best: float | None = None
    operations: float | None = None
    idle_share: float | None = None
    idle_cost: float | None = None


class BatchSpeed(Record):
    """Several requests at once, one pass for all: tokens per second of all together, after their first tokens.

    `speedup` over the plain arm of the same target in a batch of the same size (geometric mean over groups of prompts);
    `draft_length`: mean of all steps; `equal` of `answers` greedy ones are those of the plain batch (0 of 0: sampled).
    """

    arm: str
    baseline: str
    batch: int
    temperature: float
    rate: Spread
    speedup: Measurement | None = None
    draft_length: float = 0.0
    equal: int = 0
    answers: int = 0


class Mismatch(Record):
    """First token where a text with drafts differs from the plain one.

    `margin`: the logit gap between both tokens, by the target itself; a near tie when rounding can explain it. Of
    seeded text the seed's numbers are added to the logits.
    """

    prompt: int
    category: str
    position: int
    margin: float
    near_tie: bool


class Equality(Record):
    """Greedy answers, or texts of fixed seeds: with drafts against plain, token for token."""

    arm: str
    baseline: str
    n: int
    equal: int
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether every difference sits at a near tie."""
        return all(m.near_tie for m in self.mismatches)


class PromptFacts(Record):
    """A prompt of the benchmark."""

    category: str
    tokens: int


class Marginals(Record):
    """Text sampled with drafts against the target's own distribution.

    There are `samples` texts of `positions` tokens, behind `prompts`. `p_value`: chance of tokens that differ at least
    as much, if they follow that distribution (`measure.prove`). `drafted`: tokens that a draft was judged for;
    `detectable`: the shift towards what drafts favour that they would show in 4 of 5 cases. Both are None in results of
    an earlier test, which compared two samples.
    """

    prompts: int
    samples: int
    positions: int
    temperature: float
    p_value: float
    drafted: int | None = None
    detectable: float | None = None


class Speed(Measured):
    """Results of `bench`."""

    prompts: tuple[PromptFacts, ...] = ()
    arms: tuple[ArmSpeed, ...]
    ratios: tuple[Ratio, ...]
    acceptance: tuple[Acceptance, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    equality: tuple[Equality, ...] = ()
    marginals: Marginals | None = None
    seeded: Equality | None = None
    batches: tuple[BatchSpeed, ...] = ()
    bandwidth: Measurement
    condition: dict[str, Scalar] = {}


class Results(Record):
    """Everything a report says. `notes` are the quantizer's sentences by model (`target`, `draft`).

    `environment` is that of the speed if there is one: each part says in its `provenance` where it was measured.
    despite: why the pair is to be used although it is not ready, by whoever made it. seconds: of each stage of the run,
    in the process that ended it: what an earlier one had finished is not counted.
    """

    format_version: Literal[1] = 1
    name: str
    recipe: dict[str, Any]
    environment: dict[str, str]
    accuracy: Accuracy = Accuracy()
    speed: Speed | None = None
    notes: dict[str, tuple[str, ...]] = {}
    limits: tuple[str, ...] = ()
    despite: str = ""
    seconds: dict[str, float] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_digests(cls, data: Any) -> Any:
        """Files of before parts had a provenance name digests of all together, which say nothing of any of them."""
        return {k: v for k, v in data.items() if k != "digests"} if isinstance(data, dict) else data

    def parts(self) -> list[tuple[str, Measured]]:
        """Measurements, each with what people call it: any can be out of date by itself."""
        return [*self.accuracy.parts(), *([("speed", self.speed)] if self.speed else [])]

    def updated(self, new: "Results") -> "Results":
        """The results of `new` for the same pair, and those of this one that `new` has not measured again."""
        stays = {"evaluation": not new.accuracy.parts(), "benchmark": new.speed is None}
        settings = {section: self.recipe.get(section) for section, kept in stays.items() if kept}
        update = {
            "recipe": new.recipe | settings,
            "environment": self.environment if new.speed is None and self.speed else new.environment,
            "accuracy": self.accuracy.updated(new.accuracy),
            "speed": new.speed or self.speed,
            "limits": tuple(dict.fromkeys((*self.limits, *new.limits))),
            "seconds": new.seconds or self.seconds,
        }
        return new.model_copy(update=update)

    @classmethod
    def read(cls, path: str | Path) -> "Results":
        """Results from a `results.json`; raises `IntegrityError` when the file is not one."""
        try:
            fix = "give a run's or a pair's folder, or its results.json"
            return cls.model_validate_json(read_bytes(Path(path), IntegrityError, fix))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            rule = f"is not a results file ({'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']})"
            raise IntegrityError(str(path), rule, "give a results.json, or run the recipe again") from error

    def dump(self) -> str:
        """JSON text that `read` takes back equal."""
        return self.model_dump_json(indent=2) + "\n"
