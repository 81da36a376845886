"""What `gpu_bench` times: decoding with and without drafts, reading prompts, and acceptance on real weights.

Weights of the large shapes are random, so drafts of theirs stand with a chance that is set (`Synthetic`), and rows say
so. Decoding is timed from the middle of an answer on: caches hold what they hold, only lengths matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.loop import CudaLoop, DraftRule, Greedy, Sampled, Synthetic
from qspec.nn.cuda.model import CudaModel
from qspec.nn.cuda.passes import Passes, head
from qspec.numerics.quantization.formats import FP8_E4M3, NumFormat
from qspec.numerics.roofline import PassCost, Rates, pass_seconds, prefill_seconds
from qspec.numerics.speculation.probs import target_probs
from qspec.numerics.speculation.speedup import expected_tokens
from qspec.records import ArchMap
from qspec.speculation.batch import GenerationRequest
from qspec.speculation.device import generate_on_device
from scripts.gpu import models as gpu_models
from scripts.gpu.ceilings import Ceilings, wait
from scripts.gpu.models import kv_bytes, weight_bytes

Row = dict[str, Any]
ALPHAS = (0.6, 0.7, 0.8)
"""Acceptance rates in the range that arXiv 2211.17192, table 3, reports for small drafts: assumed, not measured."""
ALPHA = 0.8
"""That of the timed runs; rates at the others follow from their step times."""
DRAFTS = 4


@dataclass(frozen=True)
class Settings:
    """How long a cell is timed: `repeats` turns of all arms, `steps` steps each."""

    repeats: int = 5
    steps: int = 16


@dataclass(frozen=True)
class Half:
    """Weights and cache of a target or draft, by name."""

    arch: ArchMap
    scheme: str
    kv: NumFormat | None = None

    def cost(self) -> PassCost:
        a = self.arch
        ops = 2.0 * sum(o * k for o, k in map(a.linear_shape, a.linears()))
        attention = 4.0 * a.n_layers * a.n_heads * a.head_dim
        return PassCost(weight_bytes(a, self.scheme), kv_bytes(a, self.kv), ops, attention)

    @property
    def products(self) -> str:
        return {"FP8": "fp8", "W8A8": "int8"}.get(self.scheme, "bf16")


@dataclass(frozen=True)
class Arm:
    """What a row is called, the kind of loop that it runs in, and its drafts; None: as many as pay best."""

    name: str
    loop: str
    drafts: int | None

    @property
    def plain(self) -> bool:
        return self.drafts == 0


LOOPS = {"BF16": ("BF16", None, "BF16"), "FP8": ("FP8", None, "BF16"), "FP8+KV8": ("FP8", FP8_E4M3, "FP8")}
"""Target scheme, cache format of both halves, draft scheme."""
ARMS = (
    Arm("BF16", "BF16", 0),
    Arm("FP8", "FP8", 0),
    Arm("FP8+KV8", "FP8+KV8", 0),
    Arm("BF16 + spec", "BF16", DRAFTS),
    Arm("FP8 + spec", "FP8", DRAFTS),
    Arm("FP8 both ends + KV8 + spec", "FP8+KV8", DRAFTS),
    Arm("FP8 both ends + KV8 + spec + schedule", "FP8+KV8", None),
)


@dataclass(frozen=True)
class Cell:
    """One condition: tokens of prompt and answer, sequences at once."""

    prompt: int
    new: int
    batch: int

    @property
    def context(self) -> int:
        return self.prompt + self.new // 2

    def positions(self, settings: Settings) -> int:
        """Of a sequence's caches: the timed steps at their longest."""
        return max(self.prompt + self.new, self.context + settings.steps * (DRAFTS + 1)) + DRAFTS + 1


class Rig:
    """The models of one target shape, and what is timed with them."""

    def __init__(
        self,
        name: str,
        target: ArchMap,
        draft: ArchMap,
        kinds: Sequence[str],
        device: torch.device,
        ceilings: Ceilings,
        settings: Settings,
    ) -> None:
        self.name, self._device, self._ceilings, self._settings = name, device, ceilings, settings
        self._halves = {
            kind: (Half(target, own, kv), Half(draft, small, kv))
            for kind, (own, kv, small) in LOOPS.items()
            if kind in kinds
        }
        self.arms = [arm for arm in ARMS if arm.loop in kinds]
        self._weights: dict[tuple[ArchMap, str], CudaModel] = {}

    def model(self, half: Half) -> CudaModel:
        """Weights are made once for all cache formats."""
        key = half.arch, half.scheme
        if key not in self._weights:
            source = gpu_models.random_source(self._device, torch.bfloat16)
            self._weights[key] = gpu_models.build(half.arch, half.scheme, source, self._device)
        return gpu_models.with_kv(self._weights[key], half.kv)

    def cache_bytes(self, cell: Cell) -> int:
        """Of all loops of a cell."""
        rows = cell.batch * (cell.positions(self._settings) + 1)
        return rows * sum(kv_bytes(half.arch, half.kv) for pair in self._halves.values() for half in pair)

    def decode(self, cell: Cell) -> list[Row]:
        """All arms in turns, so that a clock that changes changes it for all."""
        loops = {kind: self._loop(pair, cell) for kind, pair in self._halves.items()}
        drafts = {
            arm.name: self._best(loops[arm.loop], cell) if arm.drafts is None else arm.drafts for arm in self.arms
        }
        for arm in self.arms:
            self._timed(loops[arm.loop], drafts[arm.name], cell)  # captures, compiles, warms up
        runs: dict[str, list[tuple[float, int]]] = {arm.name: [] for arm in self.arms}
        for turn in range(self._settings.repeats):
            shift = turn % len(self.arms)
            for arm in self.arms[shift:] + self.arms[:shift]:
                runs[arm.name].append(self._timed(loops[arm.loop], drafts[arm.name], cell))
        return [self._row(arm, cell, drafts[arm.name], runs) for arm in self.arms]

    def prefill(self, length: int) -> list[Row]:
        """Time to the first token of one prompt, arms without drafts in turns."""
        cell = Cell(length, 1, 1)
        plain = {
            kind: Passes(self.model(pair[0]), CudaCache(self.model(pair[0]), 1, length))
            for kind, pair in self._halves.items()
        }
        tokens_T = torch.randint(0, next(iter(self._halves.values()))[0].arch.vocab_size, (length,))
        runs: dict[str, list[float]] = {kind: [] for kind in plain}
        for turn in range(self._settings.repeats + 1):
            for kind, passes in plain.items():
                seconds = self._read(passes, tokens_T)
                if turn:
                    runs[kind].append(seconds)
        base = next(iter(plain))
        return [self._prefill_row(kind, base, cell, runs) for kind in plain]

    def _loop(self, pair: tuple[Half, Half], cell: Cell) -> CudaLoop:
        models = [self.model(half) for half in pair]
        target, draft = (Passes(m, CudaCache(m, cell.batch, cell.positions(self._settings))) for m in models)
        return CudaLoop(target, draft, Synthetic(ALPHA), DRAFTS, steps=self._settings.steps)

    def _timed(self, loop: CudaLoop, drafts: int, cell: Cell) -> tuple[float, int]:
        """Seconds of the steps and of reading what they made, and how many tokens that is."""
        state, steps = loop.state, self._settings.steps
        state.lengths_B.fill_(cell.context)
        state.left_B.fill_(steps * (DRAFTS + 1))
        state.uniforms_SBU.uniform_()
        wait(self._device)
        begin = perf_counter()
        loop.run(drafts, cell.batch, steps)
        made, _ = loop.read(cell.batch, steps)
        return perf_counter() - begin, sum(len(step) for own in made for step in own)

    def _best(self, loop: CudaLoop, cell: Cell) -> int:
        """What a schedule would say of this batch: the length of most tokens a second at `ALPHA`; 0 is one of them."""

        def rate(drafts: int) -> float:
            self._timed(loop, drafts, cell)
            return expected_tokens(ALPHA, drafts) / median(self._timed(loop, drafts, cell)[0] for _ in range(3))

        return max((0, 1, 2, DRAFTS), key=rate)

    def _read(self, passes: Passes, tokens_T: torch.Tensor) -> float:
        wait(self._device)
        begin = perf_counter()
        with torch.inference_mode():
            hidden_TH = passes.read(0, tokens_T, 0)
            head(passes.model, hidden_TH[None, -1:])[0].argmax(-1).item()
        return perf_counter() - begin

    def floor(self, kind: str, cell: Cell, drafts: int) -> float:
        """Seconds that a step takes at least, at the measured ceilings: a pass of the target and one for each draft."""
        target, draft = self._halves[kind]
        seconds = pass_seconds(target.cost(), self._rates(target), cell.batch, cell.context, drafts + 1)
        return seconds + drafts * pass_seconds(draft.cost(), self._rates(draft), cell.batch, cell.context, 1)

    def _rates(self, half: Half) -> Rates:
        bf16 = self._ceilings.products["bf16"] or float("inf")
        return Rates(self._ceilings.bandwidth, self._ceilings.products[half.products] or float("inf"), bf16)

    def _row(self, arm: Arm, cell: Cell, drafts: int, runs: Mapping[str, list[tuple[float, int]]]) -> Row:
        mine, steps = runs[arm.name], self._settings.steps
        rates = [made / seconds for seconds, made in mine]
        step = median(seconds for seconds, _ in mine) / steps
        plain = next(other.name for other in self.arms if other.loop == arm.loop and other.plain)
        floor = self.floor(arm.loop, cell, drafts)
        return {
            "part": "decode",
            "target": self.name,
            "arm": arm.name,
            "prompt": cell.prompt,
            "new": cell.new,
            "batch": cell.batch,
            "drafts": drafts,
            "synthetic_alpha": ALPHA if drafts else None,
            "repeats": len(mine),
            "steps": steps,
            "tokens_s": _spread(rates),
            "step_ms": _spread([1e3 * seconds / steps for seconds, _ in mine]),
            "tokens_per_step": sum(made for _, made in mine) / (len(mine) * steps * cell.batch),
            "over": self.arms[0].name,
            "speedup": _spread(_ratios(rates, runs[self.arms[0].name])),
            "speedup_own": _spread(_ratios(rates, runs[plain])),
            "floor_ms": 1e3 * floor,
            "of_ceiling": floor / step,
            "computed_tokens_s": {str(a): cell.batch * expected_tokens(a, drafts) / step for a in ALPHAS}
            if drafts
            else None,
        }

    def _prefill_row(self, kind: str, base: str, cell: Cell, runs: Mapping[str, list[float]]) -> Row:
        half, mine = self._halves[kind][0], runs[kind]
        cost = half.cost()
        floor = prefill_seconds(cost, self._rates(half), cell.prompt)
        return {
            "part": "prefill",
            "target": self.name,
            "arm": kind,
            "prompt": cell.prompt,
            "batch": 1,
            "repeats": len(mine),
            "ttft_ms": _spread([1e3 * seconds for seconds in mine]),
            "tokens_s": _spread([cell.prompt / seconds for seconds in mine]),
            "over": base,
            "speedup": _spread([a / b for a, b in zip(runs[base], mine, strict=True)]),
            "floor_ms": 1e3 * floor,
            "of_ceiling": floor / median(mine),
        }


def _spread(values: Sequence[float]) -> Row:
    return {"median": median(values), "low": min(values), "high": max(values)}


def _ratios(rates: Sequence[float], plain: Sequence[tuple[float, int]]) -> list[float]:
    """Turn by turn."""
    return [rate / (made / seconds) for rate, (seconds, made) in zip(rates, plain, strict=True)]


def acceptance(
    kept: tuple[ArchMap, Mapping[str, torch.Tensor], list[list[int]]], new: int, device: torch.device
) -> Iterator[Row]:
    """Drafts of a model's own 4-bit copy, on its own text: what stands, and how fast. Such a draft is no smaller."""
    arch, tensors, prompts = kept
    source = gpu_models.kept_source(tensors)
    length = max(map(len, prompts)) + new + DRAFTS + 1
    draft = gpu_models.build(arch, "W4A16", source, device)
    for scheme in ("BF16", "FP8"):
        target = gpu_models.build(arch, scheme, source, device)
        for name, rule in (("greedy", Greedy()), ("temperature 1", Sampled(lambda x: target_probs(x, 1.0)))):
            yield _accepted(target, draft, rule, prompts, new, length) | {
                "arm": f"{scheme}, drafts W4A16",
                "sampling": name,
            }


def _accepted(
    target: CudaModel, draft: CudaModel, rule: DraftRule, prompts: list[list[int]], new: int, length: int
) -> Row:
    rates: dict[int, float] = {}
    batch = min(len(prompts), 8)
    read, drafted = (Passes(m, CudaCache(m, batch, length)) for m in (target, draft))
    loop = CudaLoop(read, drafted, rule, DRAFTS, target.arch.eos_ids)
    for drafts in (0, DRAFTS):
        for _ in range(2):  # the first one captures
            requests = [
                GenerationRequest(tokens, new, torch.Generator().manual_seed(i)) for i, tokens in enumerate(prompts)
            ]
            begin = perf_counter()
            answers = generate_on_device(loop, requests, ((1, 1, drafts),))
            rates[drafts] = sum(len(answer.tokens) for answer in answers) / (perf_counter() - begin)
    steps = [step for answer in answers for step in answer.steps]
    tested = sum(min(step.drafted, step.accepted + 1) for step in steps)
    return {
        "part": "acceptance",
        "target": "weights of a file",
        "batch": batch,
        "drafts": DRAFTS,
        "alpha": sum(step.accepted for step in steps) / max(tested, 1),
        "tokens_per_step": 1 + sum(step.accepted for step in steps) / max(len(steps), 1),
        "n": len(steps),
        "tokens_s": rates[DRAFTS],
        "plain_tokens_s": rates[0],
    }
