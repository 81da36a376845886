"""Open a packaged pair: the engine runs exactly the files that were packaged."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
import hashlib
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from qspec.bridges.text import prompt_tokens
from qspec.errors import RecipeError
from qspec.memory import Need, require_memory
from qspec.models.vocab import real_vocab
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.offload import OffloadedDecoder
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.engines import AnyDecoder, gpu_for, open_decoder, settings_obstacle
from qspec.nn.lm import BatchLM
from qspec.ops.select import Kernels
from qspec.pair.check import read_pair
from qspec.pair.drafters.kind import Weights
from qspec.pair.drafters.registry import (
    draft_policy,
    kind_of,
    request_policy,
)
from qspec.pair.head import check_scales
from qspec.pair.text_stream import TextStream
from qspec.readable import parse_bytes
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.manifest import Manifest
from qspec.schema.recipe import MOST_SEED, Dtype, Recipe
from qspec.schemes.footprint import decoder_need
from qspec.speculation import engine
from qspec.speculation.batch import GenerationRequest, generate_batch as run_batch
from qspec.speculation.stats import SpecStats
from qspec.speculation.types import Drafter, DraftLength, Generation, Sampling, randomness

_TIMED_STEPS = 5
_TIMED_TOKENS = 41
_MORE = "give it more memory, or take a smaller model"
_LESS = "give it more memory, or read layers from disk: qspec generate --memory-limit SIZE, load_pair(memory_limit=…)"


@dataclass(frozen=True)
class Completion:
    """Answer to one prompt. `stats` is None when nothing was decoded speculatively."""

    text: str
    generation: Generation
    stats: SpecStats | None

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token."""
        return (len(self.generation.tokens) - 1) / self.generation.seconds if self.generation.seconds else 0.0


@dataclass(frozen=True)
class LoadedPair:
    """A target, its drafter and the draft-length policy, ready to run on this machine."""

    folder: Path
    manifest: Manifest
    recipe: Recipe
    model: QuantizedModel
    target: AnyDecoder
    draft: Weights
    drafter: Drafter
    policy: DraftLength
    batch_policies: dict[int, list[DraftLength]] = field(default_factory=dict)  # by the size of batches

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = 0,
        speculative: bool = True,
        on_text: Callable[[str], None] | None = None,
        domain: str = "",
    ) -> Completion:
        """Answer `prompt` (by the chat template, if there is one); the distribution is the target's, drafts or not.

        Sampling defaults are the recipe's. A seed gives the same text again, also without drafts; None is another text
        every time, of which somewhat more drafts are accepted (`speculation.types.Repeatable`). `on_text` receives text
        as soon as it is certain, from another thread while the next pass runs. `domain` names the kind of request, for
        draft lengths that learn (`confidence`, `optimal`).
        """
        _check_seed(seed)
        sampling, context = self._sampling(temperature, top_k, top_p), prompt_tokens(self.model.tokenizer, prompt)[0]
        with ThreadPoolExecutor(1, "qspec-text") as worker:
            stream = TextStream(self.model.tokenizer.decode, worker, on_text)
            generation = engine.generate(
                self.target,
                self.drafter if speculative else None,
                self.policy,
                context,
                max_new_tokens,
                sampling,
                self.model.arch.eos_ids,
                randomness(seed),
                stream.add,
                domain,
            )
            text = stream.finish()
        stats = None
        if any(step.drafted for step in generation.steps):
            stats = SpecStats.from_steps(generation.steps, self._plain_step_seconds(context))
        return Completion(text, generation, stats)

    def generate_batch(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = 0,
        speculative: bool = True,
        on_text: Callable[[int, str], None] | None = None,
        domain: str = "",
    ) -> list[Completion]:
        """Answer several prompts together, every step one pass of the target for all of them; results in their order.

        Each has a drafter, a policy and a seed (`seed` + its number) of its own, so answers are those of one by one
        where rows are computed as if alone; policies that learn keep it for the next batch of as many prompts.
        `draft_length.by_batch` caps drafts by the number of requests that still run. `on_text` is told the prompt's
        number too, from one other thread. Completions have no `stats`: a batch has no plain step to compare with.
        Raises `RecipeError` for a target that serves one request at a time.
        """
        _check_seed(seed)
        if not isinstance(self.target, BatchLM):
            rule = f"{type(self.target).__name__} serves one request at a time"
            raise RecipeError(f"a batch of {len(prompts)} prompts", rule, "call generate for each")
        length = self.recipe.speculation.draft_length
        if len(prompts) not in self.batch_policies:
            self.batch_policies[len(prompts)] = [request_policy(length) for _ in prompts]
        policies = self.batch_policies[len(prompts)]
        batch = [
            GenerationRequest(
                prompt_tokens(self.model.tokenizer, prompt)[0],
                max_new_tokens,
                randomness(None if seed is None else (seed + i) % (MOST_SEED + 1)),
                self.new_drafter() if speculative else None,
                policy,
                domain,
            )
            for i, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))
        ]
        sampling = self._sampling(temperature, top_k, top_p)
        with ThreadPoolExecutor(1, "qspec-text") as worker:
            callbacks = (_numbered(i, on_text) for i in range(len(prompts)))
            streams = [TextStream(self.model.tokenizer.decode, worker, one) for one in callbacks]
            answers = run_batch(
                self.target,
                batch,
                sampling,
                self.model.arch.eos_ids,
                length.by_batch,
                lambda i, tokens: streams[i].add(tokens),
            )
            return [Completion(stream.finish(), answer, None) for stream, answer in zip(streams, answers, strict=True)]

    def new_drafter(self) -> Drafter:
        """A drafter on the same draft weights, with a cache and a memory of its own."""
        return _drafter(self.recipe, self.model, self.draft.fork())

    def _sampling(self, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
        """Sampling of a request, by the recipe's settings where it gives none."""
        speculation = self.recipe.speculation
        return Sampling(
            speculation.temperature if temperature is None else temperature,
            speculation.top_k if top_k is None else top_k,
            speculation.top_p if top_p is None else top_p,
        )

    def _plain_step_seconds(self, prompt: list[int]) -> float:
        """Median time of one plain decoding step: at the present context length, but on a GPU right after the prompt.

        On a GPU a plain answer runs in a loop without the host; one further pass from here would not show that time.
        """
        if isinstance(self.target, CudaDecoder):
            plain = engine.generate(self.target, None, None, prompt, _TIMED_TOKENS, Sampling(), (), torch.Generator())
            return median(step.t_verify for step in plain.steps)
        seconds = []
        for _ in range(1 if isinstance(self.target, OffloadedDecoder) else _TIMED_STEPS):
            self.target.truncate(self.target.length - 1)
            begin = perf_counter()
            self.target.forward(torch.tensor([0]))
            seconds.append(perf_counter() - begin)
        return median(seconds)


def open_pair(
    folder: str | Path,
    kernels: Kernels = "auto",
    memory_limit: str | int | None = None,
    direct_io: bool = False,
    recipe: Recipe | None = None,
) -> LoadedPair:
    """Load a pair from its folder. Raises `IntegrityError` if there is none, or for what `read_pair` and scales refuse.

    memory_limit: of the target, in bytes or as `2GiB`; layers beyond it are read from disk for every pass, past the
    system's file cache if `direct_io`. recipe: in place of the pair's own, with other `speculation` of the same halves.
    `pair.check` verifies every byte.
    """
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory limit")
    if direct_io and limit is None:
        rule = "reads layers that a memory limit keeps out of memory, and there is none"
        raise RecipeError("direct_io", rule, "give memory_limit too, or leave direct_io off")
    folder = Path(folder)
    content = read_pair(folder)
    manifest, recipe = content.manifest, recipe or content.recipe
    options: dict[str, Any] = engine_options(recipe) | {"kernels": kernels}
    model, half = content.halves["target"], content.halves.get("draft")
    for name in filter(None, ("target", recipe.draft.folder)):
        check_scales(folder / name)
    most = recipe.speculation.max_length
    if options["gpu"] is None:
        need = decoder_need(model, most, options["dtype"])
        need = need if limit is None else Need(min(need.held, limit))
        require_memory(str(folder), need + (decoder_need(half, most, options["dtype"]) if half else Need(0)), _LESS)
    if limit is None:
        target = open_decoder(model, max_length=most, **options)
    else:
        _refuse_torch(compute_dtype(recipe.dtype), kernels)
        target = OffloadedDecoder.open(model, _weights_name(manifest), limit, most, direct_io)
    decoder = None
    if half is not None:
        decoder = open_decoder(half, max_length=min(target.max_length, half.arch.max_positions), **options)
    draft = kind_of(recipe.draft).open(folder / "draft", model, half, decoder)
    return LoadedPair(
        folder,
        manifest,
        recipe,
        model,
        target,
        draft,
        _drafter(recipe, model, draft),
        draft_policy(recipe.speculation.draft_length),
    )


def open_fitting(
    what: str, model: LoadedModel | QuantizedModel, max_length: int | None = None, **options: Any
) -> AnyDecoder:
    """`open_decoder` for a model that fits into memory; raises `OutOfMemory`, naming `what`, for one that does not."""
    if options.get("gpu") is None:
        require_memory(what, decoder_need(model, max_length, options.get("dtype")), _MORE)
    return open_decoder(model, max_length=max_length, **options)


def _weights_name(manifest: Manifest) -> str:
    """Name under which a target's packed weights are kept: a digest of the files that they are made from."""
    files = [f"{file.path} {file.sha256}" for file in manifest.files if file.path.startswith("target/")]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def _refuse_torch(dtype: torch.dtype, kernels: Kernels) -> None:
    """Layers are read from disk by the C++ core alone."""
    if obstacle := settings_obstacle(dtype, kernels) or NativeDecoder.missing():
        rule = f"layers are read from disk by the C++ core, which does not run here: {obstacle}"
        raise RecipeError("memory_limit", rule, "open the pair without one")


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """Options of `open_decoder` beside model and length: a pair for a GPU runs on this machine's, if there is one."""
    own = None if recipe.dtype == "auto" else compute_dtype(recipe.dtype)
    return {"dtype": own, "gpu": gpu_for(recipe.device)}


def compute_dtype(name: Dtype) -> torch.dtype:
    """The dtype of a CPU's activations; `auto` is float32, the fastest exact choice where it lacks bfloat16 units."""
    return torch.float32 if name == "auto" else getattr(torch, name)


def _drafter(recipe: Recipe, target: QuantizedModel, draft: Weights) -> Drafter:
    drafter: Drafter = kind_of(recipe.draft).drafter(draft, target.arch, real_vocab(target.tokenizer))
    return drafter


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise RecipeError(f"seed {seed}", f"must lie in 0 to {MOST_SEED}", "choose another")


def _numbered(i: int, on_text: Callable[[int, str], None] | None) -> Callable[[str], None] | None:
    return None if on_text is None else lambda text: on_text(i, text)
