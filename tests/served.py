"""Checkpoints as transformers loads and runs them, and what they should compute."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qspec.numerics.quantization.blocks import to_blocks
from qspec.ops.reference import fake_quantize
from qspec.records import QLinear, QuantizedModel
from tests.observed import ROWS

IDS = torch.tensor([ROWS[0]])


def transformers_model(folder: Path) -> Any:
    """The checkpoint in transformers; every tensor must have found its place."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    return model.eval()


def reference_logits(source: Path, model: QuantizedModel) -> Tensor:
    """The float model with dequantized weights and inputs rounded as the schemes say; the KV cache stays float."""
    plain = transformers_model(source)
    for name, module in plain.named_modules():
        if name in model.linears:
            module.weight.data = model.linears[name].weight.dequantize()
            module.register_forward_pre_hook(_rounds_input(model.linears[name]))
    return logits(plain)


def _rounds_input(linear: QLinear) -> Any:
    def hook(_module: Any, args: tuple[Tensor, ...]) -> Tensor | None:
        scheme, scale = linear.activation, linear.input_scale
        if scheme is None:
            return None
        if scheme.dynamic and not scheme.fmt.is_float:  # compressed-tensors maps amax to 127.5, vLLM and qspec to 127
            blocks = to_blocks(args[0][0], scheme.granularity)
            scale = blocks.abs().amax(-1) / ((scheme.fmt.qmax - scheme.fmt.qmin) / 2)
        return fake_quantize(args[0][0], scheme, scale).unsqueeze(0)

    return hook


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits[0]
    return out


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
