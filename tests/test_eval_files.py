"""The data folder is found, and what lies in it is what its sources say."""

import json

import pytest

from qspec.eval_files import eval_dir
from qspec.models.load import resolve_arch
from qspec.schema.quantization import ModelSpec
from qspec.schemes.footprint import footprint

PUBLISHED = {
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-0.6B": 596_049_920,
}
"""Parameters as the model cards' safetensors metadata count them (tied heads once)."""


def test_every_shape_is_listed_and_sourced():
    """Would catch a shape without a published count to check it against, or without a source."""
    files = sorted((eval_dir() / "shapes").glob("*.json"))
    assert {f.stem.replace("--", "/") for f in files} == set(PUBLISHED)
    assert all(json.loads(f.read_text(encoding="utf-8"))["_source"] for f in files)


@pytest.mark.parametrize("model", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(model: str):
    """Would catch one wrong digit in a shape, or a tensor that the memory estimate forgets."""
    arch = resolve_arch(ModelSpec(model=model))
    assert footprint(arch, dict.fromkeys(arch.linears()), None, 2).parameters == PUBLISHED[model]
