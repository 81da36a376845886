"""Time the arms of a matrix in turns, by lengths and batch, in qspec's engine or through servers; print speedups.

Speed by lengths of prompt and answer, batch and way to serve: eval/matrices/speed_cpu.yaml in qspec's own engine, or,
with --server, what running servers do with as many requests at once (--matrix eval/matrices/speed.yaml --out FILE).
Arms take turns; cells are kept in runs/bench_speed and not timed again; rows go to eval/baselines/speed_cpu.json.
  --only PATTERN   subjects by name    --again   begin anew    --list   what is kept    --rows   rows of what is kept
  --pair DIR: a pair, its target and its original; rows go to DIR.speed.json, where qspec report looks
  --server ARM=URL (repeatable; URL up to and with /v1)    --out FILE    --report DIR    --threads N
"""

import argparse
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product
import json
from pathlib import Path
import re
import shutil
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from qspec.bridges.openai_api import Api
from qspec.bridges.text import prompts
from qspec.errors import RecipeError, SourceError
from qspec.measure.arms import load_originals
from qspec.measure.bench import bandwidth
from qspec.models.vocab import real_vocab
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.pair.check import read_manifest
from qspec.pair.drafters.registry import Drafters, kind_of, request_policy
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.quantization.job import Calibration, quantize_model
from qspec.records import LoadedModel, Tokenizer
from qspec.report.files import study_file
from qspec.report.page import write
from qspec.report.study import document
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec, Recipe
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.types import Drafter, Generation, Sampling
from scripts.common import digest, read_options, write_baseline
from scripts.engines.cells import served_in
from scripts.speed.journal import WORK, Measure, Study
from scripts.speed.matrix import Lengths, SpeedArm, SpeedSubject, read_speed_matrix
from scripts.speed.study import Timed, largest_batches, load_server, timed
from scripts.speed.synthetic import SyntheticDrafter

CALIBRATION = CalibrationSpec(samples=8, length=256)
WARM_UP_TOKENS = 4
CUTS = 8
"""Prompts that are cut out of one text, one behind the other, where every text has given its first."""
LOADS = 4
"""Requests of a server, times how many it gets at once: it must be busy for longer than it takes to start."""


class Engine:
    """The models of a subject in memory; arms of equal formats share theirs."""

    def __init__(self, subject: SpeedSubject, progress: Progress) -> None:
        self.subject, self.progress = subject, progress
        self.model = load_originals(subject.recipe(next(iter(subject.arms))), progress).target
        self._decoders: dict[str, AnyDecoder] = {}
        self._drafters = Drafters(self.model)
        self._answers: dict[str, list[Generation]] = {}

    @cached_property
    def text(self) -> Calibration:
        return Calibration(CALIBRATION, self.model.tokenizer, self.subject.seed, self.progress)

    def measure(self, arm: str, lengths: Lengths, batch: int, repeat: int) -> Timed:
        prompts, target = self.prompts(lengths, batch, repeat), self.target(arm)
        drafters = [self.drafter(arm, lengths, tokens) for tokens in prompts]
        before = peak_memory(reset=True)
        begin = perf_counter()
        answers = self._run(target, arm, prompts, drafters, lengths.new)
        return timed(answers, perf_counter() - begin, max(0, peak_memory() - before))

    def prompts(self, lengths: Lengths, batch: int, repeat: int) -> list[list[int]]:
        return make_prompts(self.subject, self.model.tokenizer, lengths, batch, repeat)

    def target(self, arm: str) -> AnyDecoder:
        return self._decoder(self.model, self.subject.arms[arm].quantization)

    def drafter(self, arm: str, lengths: Lengths, prompt: list[int]) -> Drafter | None:
        """One that has learned nothing, for one request."""
        spec, real = self.subject.arms[arm], real_vocab(self.model.tokenizer)
        if spec.synthetic is not None:
            key = digest([spec.quantization.model_dump(mode="json"), prompt, lengths.new])
            if key not in self._answers:
                self._answers[key] = self._run(self.target(arm), arm, [prompt], [None], lengths.new)
            return SyntheticDrafter(prompt, self._answers[key][0].tokens, spec.synthetic, real)
        if spec.draft is None:
            return None
        return self._drafters.new(spec.draft, partial(self._draft, arm))

    def _draft(self, arm: str) -> AnyDecoder:
        draft = self.subject.recipe(arm).draft
        model, quantization = kind_of(draft).original(self.model), draft.quantized
        assert model is not None
        assert quantization is not None
        return self._decoder(model, quantization)

    def _run(
        self,
        target: AnyDecoder,
        arm: str,
        prompts: Sequence[list[int]],
        drafters: Sequence[Drafter | None],
        new: int,
    ) -> list[Generation]:
        policy = self.subject.arms[arm].policy
        requests = [
            GenerationRequest(
                tokens, new, torch.Generator().manual_seed(i), drafter, request_policy(policy) if drafter else None
            )
            for i, (tokens, drafter) in enumerate(zip(prompts, drafters, strict=True))
        ]
        none_ends = ()  # as many tokens from every arm
        return generate_batch(target, requests, Sampling(), none_ends, policy.by_batch)

    def _decoder(self, model: LoadedModel, spec: QuantSpec) -> AnyDecoder:
        key = digest([spec.model_dump(mode="json"), model.source, model.arch.n_layers])
        if key not in self._decoders:
            with TemporaryDirectory(dir=WORK) as work:
                quantized = quantize_model(model, spec, FusionSpec(), self.text, Path(work), torch.float32)
                length = min(self.subject.max_length + 1, model.arch.max_positions)
                self._decoders[key] = open_decoder(quantized, max_length=length)
        return self._decoders[key]


def make_prompts(
    subject: SpeedSubject, tokenizer: Tokenizer, lengths: Lengths, size: int, group: int
) -> list[list[int]]:
    """The `group`-th group of `size` prompts, all different and of exactly that length: real text in the chat template,
    or tokens at random.
    """
    return _first_prompts(subject, tokenizer, lengths, (group + 1) * size)[-size:]


def _first_prompts(subject: SpeedSubject, tokenizer: Tokenizer, lengths: Lengths, count: int) -> list[list[int]]:
    source = subject.prompts
    if source.random:
        generator = torch.Generator().manual_seed(subject.seed)
        drawn = torch.randint(real_vocab(tokenizer), (count, lengths.prompt), generator=generator)
        return [[int(token) for token in row] for row in drawn]
    texts = [prompt.text for prompt in prompts(source.name, None, [source.category])]
    cut: list[list[int]] = []
    enough = 8 * lengths.prompt
    for begun, i in product(range(CUTS), range(len(texts))):
        joined, text = i, texts[i][begun * enough :]
        while len(text) < enough and joined + 1 < len(texts):
            joined += 1
            text += "\n\n" + texts[joined]
        if (tokens := served_in(lengths.prompt, text, tokenizer)) is not None:
            cut.append(tokens)
        if len(cut) == count:
            return cut
    rule = f"has {len(cut)} prompts of {lengths.prompt} tokens"
    raise SourceError(f"{source.name} {source.category}", rule, f"{count} are needed: lower the batch or the length")


def peak_memory(reset: bool = False) -> int:
    """Bytes that this process has held at most since the last reset (Linux; 0 elsewhere)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    return 1024 * int(match[1]) if match else 0


def warm_up(subject: SpeedSubject, arms: Sequence[str], measure: Measure) -> None:
    shortest = min(subject.shapes.values(), key=lambda lengths: lengths.prompt)
    for arm in arms:
        measure(arm, Lengths(prompt=shortest.prompt, new=WARM_UP_TOKENS), 1, 0)


def by_servers(subject: SpeedSubject, servers: dict[str, Api], tokenizer: Tokenizer) -> Measure:
    def measure(arm: str, lengths: Lengths, at_once: int, repeat: int) -> Timed:
        prompts = make_prompts(subject, tokenizer, lengths, LOADS * at_once, repeat)
        return load_server(servers[arm], prompts, lengths.new, at_once)

    return measure


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", action="append", default=[], metavar="ARM=URL")
    parser.add_argument("--pair", type=Path, metavar="DIR", help="its arms, by the matrix's lengths and batches")
    parser.add_argument("--out", type=Path, help="default: the baseline, or PAIR.speed.json beside the pair")
    parser.add_argument("--report", type=Path, default=WORK / "report")
    parser.add_argument("--rows", action="store_true")


def of_pair(args: argparse.Namespace) -> dict[str, SpeedSubject]:
    """The pair beside its original and its target alone, made anew from its recipe, by the first matrix's lengths."""
    recipe = Recipe.model_validate(read_manifest(args.pair).recipe)
    target, drafting = recipe.target.quantization, recipe.speculation.draft_length
    arms = {
        "original": SpeedArm(),
        "quantized": SpeedArm(quantization=target),
        "quantized + draft": SpeedArm(quantization=target, draft=recipe.draft, policy=drafting),
    }
    first = next(iter(read_speed_matrix(args.matrix).values()))
    fields = {"model": recipe.target.model, "device": recipe.device, "seed": recipe.seed, "arms": arms}
    return {recipe.name: first.model_copy(update=fields)}


def baseline(args: argparse.Namespace) -> Path:
    """Where the rows go."""
    if args.out is not None or args.pair is None:
        return args.out or Path("eval/baselines/speed_cpu.json")
    return study_file(args.pair)


def studies(args: argparse.Namespace) -> list[Study]:
    """Of the matrix; with servers all of them take their arms' places."""
    chosen = []
    for name, subject in of_pair(args).items() if args.pair else read_speed_matrix(args.matrix).items():
        arms = tuple(option.partition("=")[0] for option in args.server) or tuple(subject.arms)
        for arm in arms:
            if arm not in subject.arms:
                raise RecipeError(f"--server {arm}=…", "is no arm of the matrix", f"one of: {', '.join(subject.arms)}")
        chosen.append(Study(name, subject, arms, "server" if args.server else "qspec"))
    return [study for study in chosen if re.search(args.only, study.name)]


def run(study: Study, servers: dict[str, Api], progress: Progress) -> None:
    """Time what is not kept yet."""
    if not study.todo:
        return
    if servers:
        model = load_originals(study.subject.recipe(study.arms[0]), progress).target
        measure = by_servers(study.subject, servers, model.tokenizer)
        place = ", ".join(f"{arm}: {api.facts().engine}" for arm, api in servers.items())
    else:
        engine = Engine(study.subject, progress)
        measure, place = engine.measure, engine_name(engine.target(study.arms[0]))
    warm_up(study.subject, study.arms, measure)
    study.run(measure, place, progress)


def main() -> None:
    args = read_options(__doc__, "speed_cpu.yaml", add_options)
    WORK.mkdir(parents=True, exist_ok=True)
    every, out, progress = studies(args), baseline(args), Progress()
    servers = {arm: Api(url) for arm, _, url in (option.partition("=") for option in args.server)}
    if args.list:
        print(*(f"{len(s.kept())} kept, {len(s.todo)} to do, {s.name}" for s in every), sep="\n")
        return
    facts: dict[str, Any] = environment() | {"torch threads": str(torch.get_num_threads())}
    if args.rows and out.exists():  # nothing is measured, so what was measured stays: the bandwidth too
        facts = json.loads(out.read_bytes())["environment"]
    for study in () if args.rows else every:
        if args.again:
            shutil.rmtree(study.folder, ignore_errors=True)
        run(study, servers, progress)
    progress.close()
    facts["engine"] = "; ".join(dict.fromkeys(e["engine"] for study in every for e in study.entries().values()))
    if not servers and all(study.subject.device == "cpu" for study in every):
        facts.setdefault("memory read, GB/s", f"{bandwidth().value / 1e9:.2f}")
    speed = 1e9 * float(facts["memory read, GB/s"]) if "memory read, GB/s" in facts else None
    by_study = [(study, list(study.rows(speed))) for study in every]
    rows = [each for _, own in by_study for each in own]
    limits = [each for study, own in by_study for each in largest_batches(own, study.subject.ttft_s)]
    write_baseline(out, facts, [*rows, *limits])
    page = write(document(facts, [*rows, *limits]), args.report)
    for each in rows:
        print(json.dumps({key: each.get(key) for key in ("shape", "batch", "arm", "tokens_s", "tpot_ms", "speedup")}))
    print(f"{page}: written")


if __name__ == "__main__":
    main()
