"""A matrix of speed: arms by lengths of prompt and answer and by batch (`eval/matrices/speed*.yaml`)."""

from pathlib import Path

from pydantic import Field, model_validator

from qspec.schema.drafts import Draft, NgramDraft
from qspec.schema.problems import validate
from qspec.schema.quantization import ModelSpec, QuantSpec, Strict
from qspec.schema.recipe import Device, DraftLengthSpec, Recipe, SpeculationSpec
from qspec.schema.text import parse_yaml, read_text


class Lengths(Strict):
    """Tokens of a prompt and of its answer."""

    prompt: int = Field(ge=8)
    new: int = Field(ge=2)


class PromptSource(Strict):
    """Real text of a named data set, cut to length; several in a row where one is short. random: tokens at random."""

    name: str = "spec_bench"
    category: str = "summarization"
    random: bool = False


class SpeedArm(Strict):
    """One way to serve. `synthetic`: no draft, but the target's own tokens, each right with that chance, for free."""

    quantization: QuantSpec = QuantSpec(scheme="none")
    draft: Draft | None = None
    synthetic: float | None = Field(default=None, ge=0, le=1)
    policy: DraftLengthSpec = DraftLengthSpec(policy="fixed", k=4)

    @model_validator(mode="after")
    def _one_draft(self) -> "SpeedArm":
        if self.draft is not None and self.synthetic is not None:
            raise ValueError("draft and synthetic exclude each other; measure two arms")
        return self


class SpeedSubject(Strict):
    """A model, and all that is asked of every arm. The first arm is the baseline of all.

    `batches`: prompts at once in qspec's own engine, requests at once of a server. `ttft_s`: the limit that decides the
    largest batch. `device`: whose data sheet gives the ceiling; of `cpu` its bandwidth is measured.
    """

    model: str
    device: Device = "cpu"
    prompts: PromptSource = PromptSource()
    shapes: dict[str, Lengths] = Field(min_length=1)
    batches: tuple[int, ...] = Field(min_length=1)
    repeats: int = Field(default=3, ge=1)
    ttft_s: float = Field(default=2.0, gt=0)
    seed: int = 0
    arms: dict[str, SpeedArm] = Field(min_length=1)

    @property
    def max_length(self) -> int:
        return max(lengths.prompt + lengths.new for lengths in self.shapes.values())

    @model_validator(mode="after")
    def _real_text_for_drafts(self) -> "SpeedSubject":
        drafting = [name for name, arm in self.arms.items() if arm.draft is not None]
        if self.prompts.random and drafting:
            rule = "random prompts have random answers, whose acceptance is nobody's"
            raise ValueError(f"arm {drafting[0]!r} drafts: {rule}; use real text, or synthetic acceptance")
        return self

    def recipe(self, arm: str) -> Recipe:
        """The job of one arm. A plain one gets a draft without weights, which is not used."""
        own = self.arms[arm]
        return Recipe(
            name="speed",
            device=self.device,
            seed=self.seed,
            target=ModelSpec(model=self.model, quantization=own.quantization),
            draft=own.draft or NgramDraft(kind="ngram"),
            speculation=SpeculationSpec(draft_length=own.policy, max_length=self.max_length),
        )


def read_speed_matrix(path: Path) -> dict[str, SpeedSubject]:
    """The subjects of a matrix file by name; raises `RecipeError` for what is no matrix."""
    data = parse_yaml(read_text(path, "matrix"), str(path))
    return {name: validate(SpeedSubject, subject, f"{path}: {name}") for name, subject in data.items()}
