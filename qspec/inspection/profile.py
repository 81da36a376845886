"""Where the time of a token goes, and how far each part is from what this machine's memory allows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from qspec.bridges.text import prompt_tokens
from qspec.errors import RecipeError
from qspec.measure.bench import bandwidth
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.engines import AnyDecoder, engine_name
from qspec.pair.open import LoadedPair, compute_dtype
from qspec.readable import number, percent, size
from qspec.records import QuantizedModel
from qspec.report.document import Block, Document, Heading, Paragraph, Table
from qspec.schemes.build import resolve_plan
from qspec.schemes.footprint import footprint, weight_bytes
from qspec.speculation import engine
from qspec.speculation.types import Drafter, DraftLength, Generation, Sampling

PROMPT = "Explain step by step how a bicycle stays upright, and then write the steps down again as a list."
WARM_UP, TURNS = 4, 3
_KINDS = {
    "q_proj": "q/k/v",
    "k_proj": "q/k/v",
    "v_proj": "q/k/v",
    "o_proj": "o",
    "gate_proj": "gate/up",
    "up_proj": "gate/up",
    "down_proj": "down",
    "lm_head": "head",
}


@dataclass(frozen=True)
class TimedPart:
    """Milliseconds per token (median of the turns, and their least and most), the share, and the floor.

    floor_ms: what reading the part's stored bytes takes at the best rate that was measured beside the turns.
    """

    name: str
    ms: float
    ms_range: tuple[float, float]
    share: float
    bytes: float
    floor_ms: float


@dataclass(frozen=True)
class Speculation:
    """The same with drafts, in milliseconds per token; `speedup` over plain decoding in the same run."""

    draft_ms: float
    verify_ms: float
    other_ms: float
    tokens_per_step: float
    speedup: float


@dataclass(frozen=True)
class Profile:
    """Plain decoding by part in several turns, and speculation.

    tokens: of a turn. timers: what measuring added to a token, as a share of it. bandwidth: the best of the turns.
    """

    tokens: int
    prompt_tokens: int
    plain_ms: float
    timers: float
    parts: tuple[TimedPart, ...]
    bandwidth: float
    bytes_per_token: float
    ceiling_tokens_s: float
    engine: str
    speculation: Speculation

    @property
    def of_ceiling(self) -> float:
        """Plain decoding's speed as a share of the bandwidth ceiling."""
        return 1000 / self.plain_ms / self.ceiling_tokens_s


@dataclass(frozen=True)
class _Turn:
    """One after another: memory read in bytes per second, a plain decode, and one under timers in seconds by part."""

    bandwidth: float
    plain_ms: float
    timed_ms: float
    seconds: Mapping[str, float]


def profile(pair: LoadedPair, tokens: int = 64, prompt: str = PROMPT) -> Profile:
    """Decode `tokens` greedily: plainly and under timers in turns, then with drafts.

    Raises `RecipeError` where they do not fit.
    """
    target, start = pair.target, prompt_tokens(pair.model.tokenizer, prompt)[0]
    if not isinstance(target, NativeDecoder):
        rule = f"times the parts of the C++ core, and this pair runs on another engine ({engine_name(target)})"
        raise RecipeError("profile", rule, "measure it as a whole: qspec bench")
    if len(start) + tokens > target.max_length:
        rule = f"with a prompt of {len(start)} tokens passes the cache of {target.max_length}"
        raise RecipeError(f"--tokens {tokens}", rule, "ask for fewer tokens")
    _decode(target, start, WARM_UP)
    turns = [_turn(target, start, tokens) for _ in range(TURNS)]
    plain_ms = median(turn.plain_ms for turn in turns)
    rate = max(turn.bandwidth for turn in turns)
    read = _bytes(pair.model, compute_dtype(pair.recipe.dtype), len(start) + tokens / 2)
    times = {part: [1000 * turn.seconds.get(part, 0.0) for turn in turns] for part in turns[0].seconds}
    total = sum(map(median, times.values()))
    return Profile(
        tokens=tokens,
        prompt_tokens=len(start),
        plain_ms=plain_ms,
        timers=median(turn.timed_ms for turn in turns) / plain_ms - 1,
        parts=tuple(
            TimedPart(
                name,
                median(ms),
                (min(ms), max(ms)),
                median(ms) / total,
                read.get(name, 0.0),
                1000 * read.get(name, 0.0) / rate,
            )
            for name, ms in times.items()
        ),
        bandwidth=rate,
        bytes_per_token=sum(read.values()),
        ceiling_tokens_s=rate / sum(read.values()),
        engine=engine_name(target),
        speculation=_speculation(pair, start, tokens, plain_ms),
    )


def _turn(target: NativeDecoder, start: list[int], tokens: int) -> _Turn:
    rate, plain_ms = bandwidth().value, _ms(_decode(target, start, tokens))
    _decode(target, start, 1)
    begun = target.seconds()
    _decode(target, start, 1)  # the prompt's pass, which the next one makes too
    prefilled = target.seconds()
    run = _decode(target, start, tokens)
    ended = target.seconds()
    steps = len(run.steps)
    seconds = {part: max(0.0, s - 2 * prefilled[part] + begun[part]) / steps for part, s in ended.items() if s}
    seconds["sampling"] = max(0.0, sum(s.t_verify for s in run.steps) / steps - sum(seconds.values()))
    seconds["bookkeeping"] = sum(s.t_other for s in run.steps) / steps
    return _Turn(rate, plain_ms, _ms(run), seconds)


def as_data(profile: Profile) -> dict[str, Any]:
    return asdict(profile) | {"of_ceiling": profile.of_ceiling}


def document(profile: Profile, name: str) -> Document:
    """The profile as a page for the terminal."""
    rows = tuple(
        (p.name, number(p.ms), percent(p.share), size(p.bytes) if p.bytes else "", _times(p)) for p in profile.parts
    )
    columns = ("part", "ms/token", "share", "reads", "times its floor")
    caption = (
        f"{profile.tokens} tokens behind {profile.prompt_tokens}, medians and ranges of {TURNS} turns, "
        f"{profile.engine}. Floor: the stored bytes over {size(profile.bandwidth)}/s, the best memory read beside the "
        f"turns; what is below 1× in every turn was read faster, as from a cache. "
        f"Timers added {percent(profile.timers)}."
    )
    s = profile.speculation
    ceiling = (
        f"Plain decoding takes {number(profile.plain_ms)} ms per token, {_share(profile.of_ceiling)} of the ceiling of "
        f"{number(profile.ceiling_tokens_s)} tokens/s ({size(profile.bytes_per_token)} per token)."
    )
    drafting = (("drafting", s.draft_ms), ("verification", s.verify_ms), ("bookkeeping", s.other_ms))
    whole = sum(ms for _, ms in drafting) or 1.0
    shares = tuple((part, number(ms), percent(ms / whole)) for part, ms in drafting)
    summary = f"{number(s.tokens_per_step)} tokens per step, {number(s.speedup)}× plain decoding."
    blocks: tuple[Block, ...] = (
        Paragraph(ceiling),
        Heading("Plain decoding"),
        Table(caption, columns, rows),
        Heading("With drafts"),
        Table(summary, ("part", "ms/token", "share"), shares),
    )
    return Document(f"{name}: where the time goes", "", blocks)


def _decode(
    target: AnyDecoder, start: list[int], tokens: int, drafter: Drafter | None = None, policy: DraftLength | None = None
) -> Generation:
    generator = torch.Generator().manual_seed(0)
    return engine.generate(target, drafter, policy, start, tokens, Sampling(), (), generator)


def _ms(run: Generation) -> float:
    return 1000 * run.seconds / (len(run.tokens) - 1)


def _speculation(pair: LoadedPair, start: list[int], tokens: int, plain_ms: float) -> Speculation:
    _decode(pair.target, start, tokens, pair.drafter, pair.policy)
    run = _decode(pair.target, start, tokens, pair.drafter, pair.policy)
    made = len(run.tokens) - 1
    draft, verify, other = (
        1000 * sum(getattr(s, t) for s in run.steps) / made for t in ("t_draft", "t_verify", "t_other")
    )
    return Speculation(draft, verify, other, made / len(run.steps), plain_ms / _ms(run))


def _bytes(model: QuantizedModel, dtype: torch.dtype, context: float) -> Mapping[str, float]:
    """Stored bytes that a plain step reads, by part."""
    arch, schemes = model.arch, resolve_plan(model.plan, model.arch)
    read: dict[str, float] = {}
    for layer, scheme in schemes.items():
        kind, used = _KINDS.get(layer.rpartition(".")[2], "rest of the pass"), 1.0
        if ".experts." in layer:
            kind, used = "activation", arch.experts_per_token / arch.n_experts
        read[kind] = read.get(kind, 0.0) + used * weight_bytes(arch.linear_shape(layer), scheme, dtype.itemsize)
    read["attention"] = context * footprint(arch, schemes, model.plan.kv, dtype.itemsize).cost.kv_bytes
    return read


def _share(of_ceiling: float) -> str:
    return percent(of_ceiling) if of_ceiling < 1 else "within noise"


def _times(part: TimedPart) -> str:
    """How often the part's time holds its floor, from the least to the most of all turns."""
    if not part.floor_ms:
        return ""
    low, high = (ms / part.floor_ms for ms in part.ms_range)
    span = f"{number(low)}…{number(high)}×"
    return f"within noise ({span})" if low <= 1 <= high else span
