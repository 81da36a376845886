"""Replay draft lengths on recorded drafts, with each constant of the policy halved, doubled and without effect.

Greedy texts do not depend on drafts. So every draft's tokens and confidences are recorded once, at every position of
the INT8 target's answers to Spec-Bench prompts (runs/draft_length), and `optimal` is replayed over them on a
simulated clock in several settings of cost, some of which are made to mislead. The policy sees seconds with noise; the
score counts them without. Rows go to eval/baselines/draft_length.json.
  --only PATTERN   settings whose name holds the regular expression    --again   record anew    --list   settings
  --beside MODULE:CLASS   another policy, made of the longest draft, in the same replay
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
import json
from math import inf
from pathlib import Path
from random import Random
import re
from typing import Any

import torch

from qspec.nn.lm import LM
from qspec.numerics.speculation.speedup import pass_cost
from qspec.numerics.statistics.paired import geometric_mean
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length import cost_aware
from qspec.speculation.length.cost_aware import CostAware
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import NOTHING, Drafter, DraftLength, Follower, More, Proposal, Randomness, Sampling
from scripts.common import digest, read_options, write_baseline
from scripts.drafts.matrix import SpecSubject, read_spec_matrix
from scripts.drafts.policies import Bench, Comparison

WORK = Path("runs/draft_length")
BASELINE = Path("eval/baselines/draft_length.json")
LONGEST = 8
Row = dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """A draft of one position: its length, how many tokens agree with the text, and confidences, if it states them."""

    length: int
    agreeing: int
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Record:
    """A prompt's answer of `tokens` tokens, and each draft behind 1 … `tokens` - 1 of them."""

    category: str
    prompt: int
    tokens: int
    drafts: Mapping[str, Sequence[Draft]]

    def behind(self, name: str, at: int) -> Draft:
        """A draft behind that many tokens."""
        listed = self.drafts[name]
        return listed[at - 1] if at <= len(listed) else Draft(0, 0)


class Recorder:
    """Asks all drafters at every position, and drafts nothing: the target decodes plainly."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters

    def reset(self) -> None:
        self.proposals: dict[str, list[tuple[list[int], list[float]]]] = {name: [] for name in self._drafters}
        for drafter in self._drafters.values():
            drafter.reset()

    def follow(self, target: LM) -> None:
        for drafter in self._drafters.values():
            if isinstance(drafter, Follower):
                drafter.follow(target)

    def propose(
        self, context: list[int], k: int, sampling: Sampling, generator: Randomness, more: More | None = None
    ) -> Proposal:
        for name, drafter in self._drafters.items():
            confidences = Everything()
            proposal = drafter.propose(context, LONGEST, sampling, generator, confidences)
            self.proposals[name].append((proposal.tokens_K.tolist(), confidences.stated))
        return NOTHING


class Everything:
    """Wants every token, and notes the confidences."""

    def __init__(self) -> None:
        self.stated: list[float] = []

    def begins(self, name: str) -> int:
        return LONGEST

    def __call__(self, confidence: float) -> bool:
        self.stated.append(round(confidence, 4))
        return True


@torch.no_grad()
def read_whole(lm: LM, prompt: list[int], answer: list[int]) -> list[Draft]:
    """Drafts of a model from one pass over the text.

    Behind a token that does not agree they are those that the model would draft behind the text's.
    """
    lm.truncate(0)
    probs_TV = lm.forward(torch.tensor([*prompt, *answer[:-1]]), last=len(answer) - 1).softmax(-1)
    sure, tokens = (part.tolist() for part in probs_TV.max(-1))
    right = [token == text for token, text in zip(tokens, answer[1:], strict=True)]
    drafts = []
    for at in range(len(right)):
        agreeing = ([*right[at:], False]).index(False)
        confidences = tuple(round(p, 4) for p in sure[at : at + LONGEST])
        drafts.append(Draft(len(confidences), min(agreeing, LONGEST), confidences))
    return drafts


def agreement(tokens: Sequence[int], text: Sequence[int]) -> int:
    pairs = zip(tokens, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(text)))


def record(subject: SpecSubject, done: int) -> Iterator[Record]:
    """Prompts one of each category after the other, from the first that is not `done`."""
    progress = Progress()
    bench = Bench(Comparison("record", subject), progress)
    policy = next(iter(subject.policies))
    drafters = {name: bench.drafter(subject.recipe(name, policy)) for name in subject.drafts}
    models = {name: drafter.lm for name, drafter in drafters.items() if isinstance(drafter, ModelDrafter)}
    recorder = Recorder({name: drafter for name, drafter in drafters.items() if name not in models})
    most, requests = subject.benchmark.max_new_tokens, bench.requests()[done:]
    for request in progress.track(requests, "record", len(requests), "prompt"):
        result = generate(
            bench.target, recorder, Fixed(LONGEST), request.tokens, most, Sampling(), bench.eos_ids, torch.Generator()
        )
        text = result.tokens
        drafts: dict[str, Sequence[Draft]] = {name: read_whole(lm, request.tokens, text) for name, lm in models.items()}
        for name, proposals in recorder.proposals.items():
            drafts[name] = [
                Draft(len(tokens), agreement(tokens, text[at:]), tuple(stated))
                for at, (tokens, stated) in enumerate(proposals, 1)
            ]
        yield Record(request.category, len(request.tokens), len(text), drafts)


def records(matrix: Path, again: bool) -> list[Record]:
    """All prompts of the matrix's subject; what is not recorded yet is recorded first, prompt by prompt."""
    (subject,) = read_spec_matrix(matrix, SpecSubject).values()
    path = WORK / f"{digest(subject.model_dump(mode='json'))}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if again:
        path.unlink(missing_ok=True)
    kept = path.read_text("utf-8").splitlines() if path.exists() else []
    prompts = (subject.benchmark.per_category or 0) * len(subject.benchmark.categories or ())
    with path.open("a", encoding="utf-8") as file:
        for one in record(subject, len(kept)) if len(kept) < prompts else ():
            kept.append(json.dumps(asdict(one)))
            file.write(kept[-1] + "\n")
            file.flush()
    return [read(line) for line in kept]


def read(line: str) -> Record:
    entry = json.loads(line)
    drafts = {
        name: [Draft(draft["length"], draft["agreeing"], tuple(draft["confidences"])) for draft in listed]
        for name, listed in entry["drafts"].items()
    }
    return Record(**entry | {"drafts": drafts})


@dataclass(frozen=True)
class Cost:
    """What a draft takes, in plain steps: asking it, each token that it looks at, each committed one it has to read."""

    ask: float
    token: float
    read: float = 0.0


COSTS = {"suffix": Cost(0.012, 0.002), "ngram": Cost(0.002, 0.001), "mlp": Cost(0.03, 0.03)}
COSTS["self"] = Cost(0.01, 0.2, 0.02)
"""Lookups and the head as in eval/baselines/spec_bench.json; of the copy the acceptance is real, its cost a model's."""
ROW = 0.27
"""A further row of a pass of INT8 in groups of 64 on AVX2 (eval/baselines/instruction_sets.json)."""


STEPS = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.05, 5: 1.54, 6: 1.58, 9: 2.01}
"""Passes of the float model by rows (eval/baselines/smollm2-135m-int8-cpu.json)."""


@dataclass(frozen=True)
class Setting:
    """Drafts, asked one after the other, and costs: of rows and of drafting, by the share of prompts that is done.

    steps: rows cost what they did beside the float model, nothing up to four. room: tokens that requests may ask for.
    held_up: how often a step takes ten times as long.
    """

    names: tuple[str, ...]
    row: Callable[[float], float] = lambda _: ROW
    drafting: Callable[[float], float] = lambda _: 1.0
    agrees: Callable[[float], bool] = lambda _: True
    room: int = 64
    held_up: float = 0.005
    pace: Callable[[float], float] = lambda _: 1.0
    steps: bool = False


HEAD = ("suffix", "mlp")
SETTINGS = {
    "the recipe": Setting(HEAD),
    "dear drafts": Setting(HEAD, lambda _: 0.4, lambda _: 4.0),
    "cheap drafts": Setting(HEAD, lambda _: 0.03, lambda _: 0.3),
    "rows in fours": Setting(HEAD, steps=True),
    "n-grams": Setting(("ngram",)),
    "n-grams, cheap rows": Setting(("ngram",), lambda _: 0.05),
    "model": Setting(("self",), lambda _: 0.05),
    "model, room for 1024": Setting(("self",), lambda _: 0.05, room=1024),
    "model behind suffixes": Setting(("suffix", "self"), lambda _: 0.05),
    "busy in the middle": Setting(HEAD, lambda done: 1.5 if 1 / 3 <= done < 2 / 3 else 0.1),
    "never right": Setting(HEAD, agrees=lambda _: False),
    "model never right": Setting(("self",), lambda _: 0.05, agrees=lambda _: False),
    "n-grams never right": Setting(("ngram",), agrees=lambda _: False),
    "right from the middle": Setting(HEAD, lambda _: 0.1, agrees=lambda done: done >= 0.5),
    "n-grams right from the middle": Setting(("ngram",), lambda _: 0.05, agrees=lambda done: done >= 0.5),
    "drift": Setting(HEAD, lambda done: 0.02 + 0.8 * done, lambda done: 4 - 3.9 * done),
    "faster machine from the middle": Setting(
        ("self",),
        lambda done: 0.05 if done < 0.5 else 0.3,
        lambda done: 1.0 if done < 0.5 else 5.0,
        pace=lambda done: 1.0 if done < 0.5 else 0.2,
    ),
    "held up": Setting(HEAD, lambda _: 0.1, held_up=0.05),
}


class Clock:
    """A request on a simulated clock: seconds as they are counted, and as a policy sees them."""

    def __init__(self, setting: Setting, done: float, number: int) -> None:
        self.setting, self.row, self.drafting = setting, setting.row(done), setting.drafting(done)
        self.agrees, self._noise, self.seconds = setting.agrees(done), Random(number), 0.0
        self._pace = setting.pace(done)

    def verify(self, drafted: int) -> float:
        return pass_cost(STEPS, drafted + 1) if self.setting.steps else 1 + self.row * drafted

    def seen(self, seconds: float) -> float:
        self.seconds += seconds
        busy = 10.0 if self._noise.random() < self.setting.held_up else 1.0
        return self._pace * busy * seconds * self._noise.uniform(0.9, 1.1)


def replay(policy: DraftLength, setting: Setting, record: Record, clock: Clock) -> float:
    """Seconds of a request after its first token, where a plain step takes one."""
    behind, at = dict.fromkeys(setting.names, record.prompt), 1
    policy.reset(record.category, record.prompt, setting.room)
    while at < record.tokens:
        k, drafted, agreeing, t_draft, named = policy.next(), 0, 0, 0.0, len(setting.names) > 1
        k = min(k, setting.room - at - 1)
        more = policy.judge() if k > 0 else None
        for name in setting.names if k > 0 else ():
            allowed = min(k, more.begins(name)) if named and more is not None else k
            if not allowed:
                continue
            draft, cost = record.behind(name, at), COSTS[name]
            drafted, looked = walk(draft, allowed, more)
            t_draft += clock.drafting * (cost.ask + cost.token * looked + cost.read * behind[name])
            agreeing, behind[name] = draft.agreeing * clock.agrees, -1
            if drafted:
                break
        accepted = min(drafted, agreeing, record.tokens - at - 1)
        if accepted < agreeing:  # the text ends
            drafted = accepted
        seen = clock.seen(t_draft) if t_draft else 0.0
        policy.update(drafted, accepted, seen, clock.seen(clock.verify(drafted)))
        at += accepted + 1
        behind = {name: 0 if count < 0 else count + accepted + 1 for name, count in behind.items()}
    return clock.seconds


def walk(draft: Draft, most: int, more: More | None) -> tuple[int, int]:
    """Tokens that are drafted, and that were looked at."""
    most = min(draft.length, most)
    if not draft.confidences or more is None:
        return most, most
    for n in range(most):
        if not more(draft.confidences[n]):
            return n, n + 1
    return most, most


AS_IT_IS, FIRST = "as it is", "the recipe"
VARIED = FIRST, "dear drafts", "n-grams, cheap rows", "model", "busy in the middle", "never right"
"""Settings in which constants are varied, too."""
WITHOUT: dict[str, tuple[float, ...]] = {
    "SHARE": (0.0, inf),
    "ALLOWANCE": (inf,),
    "FIRST_PLAIN": (1,),
    "PLAIN_EVERY": (inf,),
    "DECAY": (1.0,),
    "BINS": (1,),
    "WEIGHT": (1e-9,),
    "WINDOW": (1,),
    "HELD_UP": (inf,),
}
"""The policy's constants, each with values that leave it without effect."""


def speedups(policy: DraftLength, setting: Setting, recorded: Sequence[Record]) -> list[float]:
    """Plain seconds over a policy's of each prompt; one policy meets all of them after each other."""
    ratios = list[float]()
    for number, record in enumerate(recorded):
        clock = Clock(setting, number / len(recorded), number)
        ratios.append((record.tokens - 1) / replay(policy, setting, record, clock))
    return ratios


def variants() -> Iterator[tuple[str, str, float]]:
    """Every constant halved, doubled and without effect: how it is called, its name and value."""
    for name, values in WITHOUT.items():
        for times in (0.5, 2.0):
            yield f"{name} x {times:g}", name, scaled(getattr(cost_aware, name), times)
        for value in values:
            yield f"{name} = {value:g}", name, value


@contextmanager
def changed(name: str, value: float) -> Iterator[None]:
    """Another value of one of the policy's constants while the block runs."""
    before = getattr(cost_aware, name)
    setattr(cost_aware, name, value)
    try:
        yield
    finally:
        setattr(cost_aware, name, before)


def scaled(value: float, times: float) -> float:
    """Of a share that is kept (.97, of the last 33 steps) what is lost is scaled."""
    if 0.5 < value < 1:
        return 1 - (1 - value) / times
    return round(value * times) if isinstance(value, int) else value * times


def rows_of(name: str, recorded: Sequence[Record], beside: Callable[[int], DraftLength] | None) -> Iterator[Row]:
    """A setting's rows: the policy as it is, another one beside it, and every variant."""
    setting = SETTINGS[name]
    replayed = {AS_IT_IS: speedups(CostAware(LONGEST), setting, recorded)}
    if beside is not None:
        replayed["beside"] = speedups(beside(LONGEST), setting, recorded)
    for variant, constant, value in variants() if name in VARIED else ():
        with changed(constant, value):
            replayed[variant] = speedups(CostAware(LONGEST), setting, recorded)
    for variant, ratios in replayed.items():
        for category in dict.fromkeys(["all", *(one.category for one in recorded)] if name == FIRST else ["all"]):
            mine = [i for i, one in enumerate(recorded) if category in ("all", one.category)]
            yield {"setting": name, "policy": variant, "category": category, "n": len(mine)} | compared(
                [ratios[i] for i in mine], [replayed[AS_IT_IS][i] for i in mine]
            )


def compared(ratios: Sequence[float], present: Sequence[float]) -> Row:
    """Speedup over plain decoding, and over the policy as it is, paired by prompt."""
    speedup, ci = geometric_mean(ratios)
    ratio, ratio_ci = geometric_mean([a / b for a, b in zip(ratios, present, strict=True)])
    return {
        "speedup": round(speedup, 4),
        "ci": [round(end, 4) for end in ci or ()],
        "ratio": round(ratio, 4),
        "ratio_ci": [round(end, 4) for end in ratio_ci or ()],
    }


def main() -> None:
    args = read_options(__doc__, "draft_length.yaml", lambda p: p.add_argument("--beside", metavar="MODULE:CLASS"))
    names = [name for name in SETTINGS if re.search(args.only, name)]
    if args.list:
        print(*names, sep="\n")
        return
    module, _, kind = (args.beside or "").partition(":")
    beside = getattr(import_module(module), kind) if module else None
    recorded = records(args.matrix, args.again)
    rows = [row for name in names for row in rows_of(name, recorded, beside)]
    write_baseline(BASELINE, environment() | {"beside": args.beside or "nothing"}, rows)
    for row in rows:
        if row["category"] == "all":
            print(f"{row['setting']}, {row['policy']}: {row['speedup']} {row['ci']}, {row['ratio']} {row['ratio_ci']}")


if __name__ == "__main__":
    main()
