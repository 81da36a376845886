"""qspec: an original (`original`: a model as recipes name it) or a quantized checkpoint, plain or with drafts.

Speculation: {"draft": {"kind": "ngram" | "suffix" | "self", …}, "policy": draft length, "weights": the draft's folder}.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from wire import Clock, Options, Prompts, serve

from qspec.bridges import compressed
from qspec.models.load import load
from qspec.models.vocab import real_vocab
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.pair.drafters.kind import Weights
from qspec.pair.drafters.registry import draft_policy, kind_of
from qspec.provenance import environment
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.drafts import DRAFTS
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schema.recipe import DraftLengthSpec
from qspec.schemes.build import build_plan, resolve_plan
from qspec.schemes.footprint import footprint
from qspec.speculation.batch import GenerationRequest, generate_batch
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.engine import generate
from qspec.speculation.types import Drafter, Sampling

ROOM = 1024


class Qspec:
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options["threads"])
        self._target, self._vocab, size = opened(options)
        self._drafts: dict[str, ModelDrafter] = {}
        version = f"{environment()['qspec']} ({engine_name(self._target)})"
        self.facts = {"version": version, "weight_bytes": size}

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        greedy, random = Sampling(), torch.Generator()
        if len(prompts) == 1:
            drafter, policy = self._drafting(speculation)

            def tell(tokens: list[int]) -> None:
                clock.add(len(tokens))

            return [generate(self._target, drafter, policy, prompts[0], new, greedy, (), random, tell).tokens]
        batch = [GenerationRequest(tokens, new, random, *self._drafting(speculation)) for tokens in prompts]

        def tell_of(i: int, tokens: list[int]) -> None:
            clock.add(len(tokens), i)

        return [done.tokens for done in generate_batch(self._target, batch, greedy, (), (), tell_of)]

    def _drafting(self, speculation: Options) -> tuple[Drafter | None, Any]:
        """A drafter that remembers no earlier request, and its policy; nothing for plain decoding."""
        if not speculation:
            return None, None
        policy = draft_policy(DraftLengthSpec(**speculation["policy"]))
        draft = DRAFTS[speculation["draft"]["kind"]](**speculation["draft"])
        if draft.drafts_from == "text":
            return kind_of(draft).drafter(Weights(), self._target.arch, self._vocab), policy
        folder = speculation["weights"]
        if folder not in self._drafts:
            decoder, arch = opened({"weights": folder})[0], self._target.arch
            self._drafts[folder] = ModelDrafter(decoder, arch.vocab_size, arch.eos_ids, self._vocab)
        return self._drafts[folder], policy

    @torch.no_grad()
    def write_logits(self, ids: Sequence[int], path: str) -> None:
        self._target.truncate(0)
        self._target.forward(torch.tensor(ids)).numpy().tofile(path)


def opened(options: Options) -> tuple[AnyDecoder, int, int]:
    """A decoder, the ids of its vocabulary that are no padding, and the bytes of weights that a step of it reads."""
    model: LoadedModel | QuantizedModel
    if original := options.get("original"):
        model, plan = load(ModelSpec(model=original)), build_plan(QuantSpec(scheme="none"))
        width = next(iter(model.tensors.values())).itemsize
    else:
        model = compressed.read(Path(options["weights"]))
        plan, width = model.plan, torch.float32.itemsize
    size = footprint(model.arch, resolve_plan(plan, model.arch), plan.kv, width).cost.weight_bytes
    return open_decoder(model, max_length=ROOM), real_vocab(model.tokenizer), int(size)


if __name__ == "__main__":
    serve(Qspec)
