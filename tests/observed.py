"""Calibration statistics of a tiny model, collected with transformers' own forward pass."""

from pathlib import Path
from typing import Any

import torch

from qspec.bridges.hf import load_folder
from qspec.records import LayerStats, LoadedModel

ROWS = [[1, *torch.randint(5, 300, (31,), generator=torch.Generator().manual_seed(seed)).tolist()] for seed in range(4)]


def load(folder: Path) -> LoadedModel:
    """`folder` as qspec loads it, with its tensors in memory."""
    model = load_folder(folder)
    return LoadedModel(model.arch, dict(model.tensors), model.config, model.tokenizer, model.source)


def observe(folder: Path, rows: list[list[int]] | None = None) -> LayerStats:
    """What `quantization.calibrate` would see. Keys count before rotation: their range is close enough for tests."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}

    def record(name: str) -> Any:
        def hook(_module: Any, args: Any, out: Any) -> None:
            inputs.setdefault(name, []).append(args[0].detach().reshape(-1, args[0].shape[-1]))
            if name.endswith(("k_proj", "v_proj")):
                outputs.setdefault(name, []).append(out.detach().reshape(-1, out.shape[-1]))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(record(name))
    rows = ROWS if rows is None else rows
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    heads = {name: torch.cat(x).abs().amax(0).reshape(-1, head_dim).amax(1) for name, x in outputs.items()}
    return LayerStats(
        {name: torch.cat(x).abs().amax(0) for name, x in inputs.items()},
        {name: torch.cat(x) for name, x in inputs.items()},
        {name.removesuffix(".k_proj"): amax for name, amax in heads.items() if name.endswith("k_proj")},
        {name.removesuffix(".v_proj"): amax for name, amax in heads.items() if name.endswith("v_proj")},
        sum(len(row) for row in rows),
    )
