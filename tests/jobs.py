"""Complete small jobs on tiny models and text of the user's own, for tests that need a whole run."""

import json
from pathlib import Path
from typing import Any

from qspec.schema.recipe import Recipe
from tests.tiny import TEXT

INT8 = {"scheme": "W8A8", "smoothing": {"strength": "auto"}, "kv": {"format": "fp8_e4m3"}}
INT4 = {"scheme": "W4A16", "group_size": 32}
SELF_DRAFT = {"kind": "self", "quantization": INT4}
NGRAM_DRAFT = {"kind": "ngram"}


def job(folder: Path, model: Path, draft: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """A recipe that runs in a second or two; `sections` replace its own."""
    calibration, held_out, prompts = folder / "calibration.txt", folder / "held_out.txt", folder / "prompts.jsonl"
    for path in (calibration, held_out):
        path.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    requests = {"The quick brown fox": "prose", "0, 12 and": "numbers", "the lazy dog": "prose", "3, 5 and": "numbers"}
    rows = [json.dumps({"text": text, "category": category}) for text, category in requests.items()]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    recipe = {
        "name": "tiny",
        "target": {"model": str(model), "quantization": INT8},
        "draft": draft or SELF_DRAFT,
        "calibration": {"data": [{"name": str(calibration)}], "samples": 4, "length": 32},
        "evaluation": {"fidelity": {"data": str(held_out), "windows": 2, "length": 32}, "tasks": []},
        "benchmark": {"prompts": str(prompts), "max_new_tokens": 8, "repeats": 1},
    }
    return Recipe.model_validate(recipe | sections)


def training_data(folder: Path, text_tokens: int) -> dict[str, Any]:
    """Text and prompts of a draft's training: enough for a tiny model to learn something."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"the quick fox {i} jumps over the dog and {i + 1} cats" for i in range(60)))
    return {
        "text": [{"name": str(text)}],
        "prompts": [{"texts": ["foxes", "dogs", "cats"], "ask": ["Tell of {text}.", "What are {text}?"]}],
        "text_tokens": text_tokens,
        "text_length": 32,
        "prompt_tokens": 64,
        "answer_tokens": 16,
        "answers": 10,
        "top": 8,
        "held_out": 0.2,
        "batch": 3,
    }
