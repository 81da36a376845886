"""vLLM's engine, stepped by hand; `speculative_config` goes to it as it is."""

from collections.abc import Sequence
import os
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from wire import Clock, Options, Prompts, serve


class VLLM:
    def __init__(self, options: Options) -> None:
        folder = Path(options["weights"])
        self._llm = LLM(
            str(folder),
            dtype=options["dtype"],
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=options["batch"],
            kv_cache_memory_bytes=400 << 20,
            enable_prefix_caching=False,
            speculative_config=options.get("speculative_config"),
            skip_tokenizer_init=True,
        )
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self.facts = {"version": vllm.__version__, "weight_bytes": size}

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        assert not speculation, f"no speculation here: {speculation}"
        engine, sampling = self._llm.llm_engine, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        sampling.detokenize = False
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), sampling)
        answers: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer, tokens = answers[int(output.request_id)], list(output.outputs[0].token_ids)
                clock.add(len(tokens) - len(answer), int(output.request_id))
                answer[:] = tokens
        return answers

    def write_logits(self, ids: Sequence[int], path: str) -> None:
        raise NotImplementedError("vLLM gives no logits of a prompt")


if __name__ == "__main__":
    serve(VLLM)
