"""How a draft is trained: what text, whose answers, how long, and the settings of the optimizer."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from qspec.schema.problems import rule
from qspec.schema.quantization import MOST, Strict

Loss = Literal["cross_entropy", "kl", "overlap", "hybrid"]
"""Towards the tokens, the target's law, 1 - the sum of minima of both laws (what sampling accepts), or the last two."""
Layer = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]


class TextSource(Strict):
    """Running text of stage 1: a data set (`eval/datasets.yaml`) or a file."""

    name: str
    weight: float = Field(default=1.0, gt=0, le=1e30)


class PromptSource(Strict):
    """Short requests of stage 2: the first `words` of a data set's rows, or `texts`, put into each of `ask` in turn."""

    name: str | None = None
    texts: tuple[str, ...] = ()
    ask: tuple[str, ...] = Field(default=("{text}",), min_length=1)
    words: int = Field(default=60, ge=1, le=1000)
    weight: float = Field(default=1.0, gt=0, le=1e30)

    @rule
    def _one_origin(self) -> None:
        if (self.name is None) == (not self.texts):
            raise ValueError("a source of prompts needs either `name` or `texts`; give one of them")
        if any("{text}" not in ask for ask in self.ask):
            raise ValueError("ask needs {text}, the place of the row's own words; add it")


class TrainingData(Strict):
    """Text that the quantized target reads (stage 1) and writes (stage 2), and the `top` likeliest ids of each token.

    `states`: how its hidden states are kept; fp8_e4m3, with a scale each, takes half the disk. `greedy`: share of
    answers that are greedy, the others have temperature 1. `held_out`: share of the sequences that the head is judged
    on and never trained on.
    """

    text: tuple[TextSource, ...] = Field(default=(TextSource(name="gutenberg"),), min_length=1)
    text_tokens: int = Field(default=50_000, ge=1, le=MOST)
    text_length: int = Field(default=256, ge=16, le=MOST)
    prompts: tuple[PromptSource, ...] = Field(default=(PromptSource(name="self_instruct"),), min_length=1)
    prompt_tokens: int = Field(default=96, ge=8, le=MOST, description="longer prompts are left out")
    answer_tokens: int = Field(default=256, ge=16, le=MOST, description="most per answer")
    answers: int = Field(default=1000, ge=1, le=MOST, description="sequences that the target writes")
    greedy: Share = 0.5
    top: int = Field(default=32, ge=1, le=1024)
    states: Literal["float16", "fp8_e4m3"] = "float16"
    held_out: float = Field(default=0.03, gt=0, lt=1)
    batch: int = Field(default=16, ge=1, le=256, description="sequences that the target decodes at once")


class TrainingSpec(Strict):
    """Two stages of training; a head's defaults of optimizer and schedule are fms-fsdp's (`train_speculator.sh`).

    The budget is `positions` (states that a draft is trained on, each as often as it comes by) or `minutes`, from
    which the number of steps is made once, after the first few; `stage1` is the share of steps before stage 2.
    """

    data: TrainingData = TrainingData()
    loss: Loss = "cross_entropy"
    positions: int | None = Field(default=None, ge=1, le=10**12)
    minutes: float | None = Field(default=None, gt=0, le=10**6)
    stage1: float = Field(default=15 / 21, ge=0, le=1, description="share of all steps")
    batch: int = Field(default=512, ge=1, le=MOST, description="states per step")
    rate: float = Field(default=1e-3, gt=0, le=1)
    stage2_rate: float = Field(default=0.1, gt=0, le=1, description="of stage 1's")
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0, le=1e6, description="largest norm of a step's gradient")
    evaluate_every: int = Field(default=200, ge=1, le=MOST, description="steps; a checkpoint is written then")

    @rule
    def _one_budget(self) -> None:
        if (self.positions is None) == (self.minutes is None):
            raise ValueError("training needs a budget: either `positions` or `minutes`; give one of them")


class HeadSpec(TrainingSpec):
    """Training of a speculator head. `start`: `target` begins with the target's embedding and output rows, scaled."""

    start: Literal["random", "target"] = "random"


class DistillSpec(TrainingSpec):
    """The target without some of its layers, trained towards the target and written as an ordinary checkpoint.

    `layers`: the numbers of those that stay, or how many: then, one by one, that layer goes without which the law stays
    closest to the target's on `layer_tokens` of the text (as in SLEB, arXiv 2402.09025). `hidden`: weight of the
    squared error of the final state, relative to its size, beside `loss` (as in DistilBERT). `embeddings`: whether
    embedding and head, the target's, are trained too. `compute`: what passes compute in; weights stay float32.
    """

    layers: Annotated[int, Field(ge=1, le=MOST)] | tuple[Layer, ...]
    layer_tokens: int = Field(default=256, ge=16, le=MOST)
    loss: Loss = "kl"
    hidden: float = Field(default=0.0, ge=0, le=1e6)
    embeddings: bool = False
    compute: Literal["float32", "bfloat16"] = "float32"
    stage1: float = Field(default=0.2, ge=0, le=1, description="share of all steps")
    batch: int = Field(default=1024, ge=1, le=MOST, description="states per step, in whole sequences")
    rate: float = Field(default=5e-4, gt=0, le=1)
    stage2_rate: float = Field(default=0.5, gt=0, le=1, description="of stage 1's")
    evaluate_every: int = Field(default=50, ge=1, le=MOST, description="steps; a checkpoint is written then")

    @property
    def kept(self) -> int:
        """How many layers stay."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    @rule
    def _rising(self) -> None:
        numbers = self.layers if isinstance(self.layers, tuple) else (0,)
        if not numbers or any(low >= high for low, high in pairwise(numbers)):
            rule = "must name different layers in rising order"
            raise ValueError(f"layers {list(numbers)} {rule}; give those that should stay, or how many")


class Eagle3Spec(TrainingSpec):
    """Training of an EAGLE-3 head on chains of its own outputs, as it will draft (arXiv 2503.01840).

    `steps`: rows of a chain, of which the first reads the target's states and each other the output before. `decay`:
    weight of a step's loss over that of the step before. `output`: whether the output rows, which begin as the
    target's, are trained.
    """

    steps: int = Field(default=3, ge=1, le=16)
    decay: float = Field(default=0.8, gt=0, le=1)
    output: Literal["frozen", "trained"] = "frozen"
    loss: Literal["kl", "overlap", "hybrid"] = "kl"
    stage1: float = Field(default=0.0, ge=0, le=1, description="share of all steps")
    batch: int = Field(default=512, ge=1, le=MOST, description="states per step, in whole sequences")
    stage2_rate: float = Field(default=1.0, gt=0, le=1, description="of stage 1's")
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    evaluate_every: int = Field(default=100, ge=1, le=MOST, description="steps; a checkpoint is written then")
