"""What a comparison of engines asks: who, which requests, with which speculation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qspec.bridges.text import prompts
from qspec.errors import QspecError
from qspec.records import Tokenizer
from scripts.common import digest
from scripts.engines.build_peers import weights_path
from scripts.engines.matrix import EngineMatrix, EngineSpec, Shape


@dataclass(frozen=True)
class Cell:
    """What one engine is asked: requests of one shape, with one speculation."""

    name: str
    engine: EngineSpec
    shape_name: str
    shape: Shape
    speculation: str
    threads: int

    @property
    def key(self) -> str:
        """By all that decides its numbers, so that a changed setting is a new cell."""
        own = self.engine.model_dump(mode="json", exclude={"speculations", "shapes", "logits"})
        settings = [own, self.shape.model_dump(), self.engine.speculations[self.speculation], self.threads]
        return f"{self.name}/{self.shape_name}/{self.speculation} {digest(settings)}"

    @property
    def speculation_options(self) -> dict[str, Any]:
        """The speculation as the worker reads it."""
        options = dict(self.engine.speculations[self.speculation])
        for field in ("weights", "assistant"):
            if field in options:
                options[field] = str(weights_path(options[field]))
        return options


def cells_of(matrix: EngineMatrix) -> Iterator[Cell]:
    for name, engine in matrix.engines.items():
        for shape_name in engine.shapes or matrix.shapes:
            for speculation in engine.speculations:
                if speculation == "none" or shape_name in matrix.speculate_on:
                    shape = matrix.shapes[shape_name]
                    yield Cell(name, engine, shape_name, shape, speculation, matrix.threads)


def requests_of(shape: Shape, source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The first `batch` prompts of the category that are long enough, each cut to be served in `prompt` tokens."""
    requests: list[list[int]] = []
    for prompt in prompts(source, None, [shape.category]):
        if (tokens := served_in(shape.prompt, prompt.text, tokenizer)) is not None:
            requests.append(tokens)
        if len(requests) == shape.batch:
            return requests
    rule = f"has {len(requests)} prompts that can be served in {shape.prompt} tokens"
    raise QspecError(f"{source} {shape.category}", rule, f"{shape.batch} are needed: lower the batch or the length")


def served_in(length: int, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """The start of a text as a chat of `length` tokens; None where the text is too short, or no cut gives as many."""
    words = tokenizer.encode(text, special=False)
    for most in range(min(len(words), length), 0, -1):
        served = tokenizer.chat([{"role": "user", "content": tokenizer.decode(words[:most])}])
        if len(served) <= length:
            return served if len(served) == length and most < len(words) else None
    return None
