"""llama.cpp, through the bindings of cyllama: one `llama_decode` per step, its own greedy sampler."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from cyllama.llama import llama_cpp as c
import numpy as np
from wire import Clock, Options, Prompts, serve

ROOM = 1024


class Model(c.LlamaModel):  # type: ignore[misc, unused-ignore]  # carries no types
    """The binding's logits ask their model for `n_vocab`, which it has under its vocabulary only."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


class LlamaCpp:
    def __init__(self, options: Options) -> None:
        c.disable_logging()
        c.llama_backend_init()
        path = Path(options["weights"])
        self._batches, threads = options["batch"], options["threads"]
        self._model = Model(str(path), c.LlamaModelParams())
        params = c.LlamaContextParams()
        params.n_ctx = ROOM * self._batches
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = self._batches
        params.n_threads = params.n_threads_batch = threads
        self._context = c.LlamaContext(self._model, params)
        self._batch = c.LlamaBatch(n_tokens=params.n_batch, embd=0, n_seq_max=self._batches)
        self._sampler = c.LlamaSampler(c.LlamaSamplerChainParams())
        self._sampler.add_greedy()
        name = f"{c.ggml_version()} ({c.ggml_commit()}, cyllama {version('cyllama')})"
        self.facts = {"version": name, "weight_bytes": path.stat().st_size}

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        assert not speculation, f"no speculation here: {speculation}"
        self._context.kv_cache_clear()
        answers: list[list[int]] = []
        for i, prompt in enumerate(prompts):
            answers.append([self._read(prompt, i)])
            clock.add(1, i)
        for step in range(new - 1):
            self._batch.clear()
            for i, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
                self._batch.add(tokens[-1], len(prompt) + step, [i], True)
            self._context.decode(self._batch)
            for i, tokens in enumerate(answers):
                tokens.append(self._sampler.sample(self._context, i))
                clock.add(1, i)
        return answers

    def write_logits(self, ids: Sequence[int], path: str) -> None:
        self._context.kv_cache_clear()
        self._read(ids, 0, every=True)
        with open(path, "wb") as file:
            for i in range(len(ids)):
                np.asarray(self._context.get_logits_ith(i), dtype=np.float32).tofile(file)

    def _read(self, ids: Sequence[int], sequence: int, every: bool = False) -> int:
        """Reads a prompt and returns the likeliest next token."""
        self._batch.clear()
        for i, token in enumerate(ids):
            self._batch.add(token, i, [sequence], every or i == len(ids) - 1)
        self._context.decode(self._batch)
        return int(self._sampler.sample(self._context, len(ids) - 1))


if __name__ == "__main__":
    serve(LlamaCpp)
