"""vLLM as the server of a pair: explicit arguments, for an intact pair that vLLM can run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import os
from pathlib import Path
import re
import shlex

from qspec.errors import PairError
from qspec.memory import rooms
from qspec.numerics.quantization.formats import INT8
from qspec.pair.check import examine, measured, overridden, read_manifest, recipe_of, stale
from qspec.pair.exports import HALF, as_made, exports, vllm_arguments
from qspec.plan import KVScheme
from qspec.provenance import environment
from qspec.records import ArchMap, QuantizedModel
from qspec.schema.devices import read_device
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import kv_flag
from qspec.schemes.footprint import kv_bytes_per_token

SEQUENCES = 8
"""Requests of full length that KV is kept for on a CPU, where memory allows."""
_BLOCK = 256
"""Tokens by which vLLM may round a sequence's cache up, both halves."""
_CACHE = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization")
"""Arguments that set the memory of vLLM's cache."""
NEUTRAL = ("--generation-config", "vllm")
"""For measuring: stop tokens are the model's, but its sampling defaults (penalties, lengths) change no answers."""


@dataclass(frozen=True)
class Serving:
    """A server that can be started: the target's folder, and the arguments behind it.

    warnings: what was not measured of that. notes: how each part is served, and what of it vLLM does not do.
    """

    model: Path
    arguments: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return shlex.join(["vllm", "serve", str(self.model), *self.arguments])


def serving(pair: Path, *, draft: bool = True, more: Sequence[str] = ()) -> Serving:
    """Check a pair and say how vLLM serves it. `more`: arguments of the caller's own, which come last and so win.

    Nothing is taken from the commands that the manifest holds: they are made anew from the checked recipe. Raises
    `IntegrityError`, and `PairError` for what vLLM cannot serve of it.
    """
    manifest, (_, halves) = read_manifest(pair), examine(pair)
    target = halves["target"]
    recipe = as_made(recipe_of(manifest), target, halves.get("draft"))
    parts = [part for part in exports(recipe, read_device(recipe.device), target.arch) if part.runtime == "vllm"]
    parts = [part for part in parts if draft or part.part != "draft"]
    for part in parts:
        if not part.served:
            fix = "serve it without its draft: --no-draft, or by" if part.part == "draft" else "serve it by"
            rule = f"vLLM cannot serve it: {part.detail}"
            raise PairError(f"{part.part} of {pair}", rule, f"{fix} qspec's own engine: --engine qspec")
    sets = environment()["instruction_sets"] if recipe.device == "cpu" else None
    if sets is not None and kv_flag(target.plan.kv) == "fp8" and not _wide(sets):
        rule = "vLLM stores it on x86 with AVX-512 or AMX only, and this CPU has neither"
        raise PairError(f"FP8 KV of {pair}", rule, "serve it elsewhere, or by qspec's own engine: --engine qspec")
    drafting = halves if draft else {"target": target}
    _require_split(option(more, "--tensor-parallel-size", "-tp"), drafting)
    float32 = manifest.validity.dtype == "float32"
    arguments = vllm_arguments(recipe, str(pair), target.plan.kv, float32=float32, draft=draft)
    if recipe.device == "cpu":
        length = option(more, "--max-model-len", default=recipe.speculation.max_length or target.arch.max_positions)
        arguments += cpu_cache([(half.arch, half.plan.kv) for half in drafting.values()], length, more)
    results = measured(pair, manifest)
    unproven = ["nothing was measured of this pair"] if results is None else stale(manifest, results)
    if draft and recipe.speculation.draft_length.by_batch and option(more, "--data-parallel-size", "-dp") > 1:
        unproven.append("draft_length.by_batch is dropped by vLLM where requests are spread by --data-parallel-size")
    if sets is not None and _sums_in_16_bits(sets):
        int8 = " and the ".join(name for name, half in drafting.items() if _int8_inputs(half))
        if int8:
            unproven.append(f"INT8 products of the {int8} overflow in vLLM on this CPU, which has no VNNI")
    notes = tuple(f"{part.part}: {part.detail}" for part in parts)
    return Serving(pair / "target", (*arguments, *more), (*unproven, *overridden(more)), notes)


def cpu_cache(halves: Sequence[tuple[ArchMap, KVScheme | None]], length: int, more: Sequence[str]) -> list[str]:
    """Bytes of KV cache for vLLM on a CPU, unless the caller or the environment sets them.

    vLLM's own default is 92 % of the machine's memory, and it does not start where less is free. These bytes are room
    for some sequences of `length` tokens within half of the free memory, and for one in any case, the least that vLLM
    starts with.
    """
    given = {argument.partition("=")[0].replace("_", "-") for argument in more}
    if given & {*_CACHE} or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return []
    stored = [(arch, kv if kv is not None and kv_flag(kv).startswith("fp8") else None) for arch, kv in halves]
    sequence = (length + _BLOCK) * sum(kv_bytes_per_token(arch, kv, width=2) for arch, kv in stored)
    left = min((room.left for room in rooms()), default=SEQUENCES * 2 * sequence)
    return ["--kv-cache-memory-bytes", str(sequence * max(1, min(SEQUENCES, left // 2 // sequence)))]


def option(more: Sequence[str], *names: str, default: int = 1) -> int:
    """A number among the caller's own arguments, the last one given; `default` where it is not."""
    last = default
    for argument, behind in zip(more, [*more, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        number = value if equals else behind
        if name.replace("_", "-") in names and re.fullmatch("[0-9]{1,9}", number):
            last = int(number)
    return last


def _require_split(size: int, halves: Mapping[str, QuantizedModel]) -> None:
    """vLLM splits both halves alike, by heads, and says so only after it has started its workers."""
    for name, half in halves.items():
        if half.arch.n_heads % max(1, size):
            sizes = [n for n in range(1, half.arch.n_heads + 1) if half.arch.n_heads % n == 0]
            rule = f"cannot split the {half.arch.n_heads} heads of the {name}"
            fix = f"give one of {', '.join(map(str, sizes))}" + ("; or --no-draft" if name == "draft" else "")
            raise PairError(f"--tensor-parallel-size {size}", rule, fix)


def original_serving(model: Path, recipe: Recipe, arch: ArchMap, context: int, more: Sequence[str] = ()) -> Serving:
    """How vLLM serves the original, in `model`, on equal terms with the pair's target; `more` comes last."""
    arguments = ["--served-model-name", "original", "--max-model-len", str(context)]
    if recipe.device == "cpu":
        arguments += [*HALF, *cpu_cache([(arch, None)], context, more)]
    return Serving(model, (*arguments, *more), ())


def _int8_inputs(half: QuantizedModel) -> bool:
    return any(linear.activation is not None and linear.activation.fmt == INT8 for linear in half.linears.values())


def _sums_in_16_bits(instruction_sets: str) -> bool:
    """Whether oneDNN adds pairs of INT8 products in 16 bits: sums come out 2 to 3 % off (`scripts/vllm/int8.py`)."""
    return "avx2" in instruction_sets.split() and not any(name in instruction_sets for name in ("vnni", "amx"))


def _wide(instruction_sets: str) -> bool:
    return any(name.startswith(("avx512", "amx")) for name in instruction_sets.split())
