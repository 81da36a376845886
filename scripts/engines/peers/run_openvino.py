"""OpenVINO GenAI's pipeline at its defaults; logits come from the same model file through the runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from wire import Clock, Options, Prompts, serve


class OpenVINO:
    def __init__(self, options: Options) -> None:
        self._folder = Path(options["weights"])
        self._settings = {"INFERENCE_NUM_THREADS": options["threads"]}
        self._pipeline = genai.LLMPipeline(str(self._folder), "CPU", **self._settings)
        size = (self._folder / "openvino_model.bin").stat().st_size
        self.facts = {"version": genai.__version__, "weight_bytes": size}

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        assert not speculation, f"no speculation here: {speculation}"
        config = genai.GenerationConfig(max_new_tokens=new, do_sample=False, ignore_eos=True)
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        if len(prompts) > 1:  # no streamer for several at once: the pipeline's own clock tells the first tokens
            result = self._pipeline.generate(inputs, config)
            clock.ttft_s, clock.first = result.perf_metrics.get_ttft().mean / 1000, len(prompts)
            return [list(tokens) for tokens in result.tokens]

        class Clocked(genai.StreamerBase):  # type: ignore[misc, unused-ignore]  # may carry no types
            def write(self, tokens: Any) -> genai.StreamingStatus:
                clock.add(len(tokens) if isinstance(tokens, list) else 1)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        return [list(tokens) for tokens in self._pipeline.generate(inputs, config, Clocked()).tokens]

    def write_logits(self, ids: Sequence[int], path: str) -> None:
        core = ov.Core()
        request = core.compile_model(self._folder / "openvino_model.xml", "CPU", self._settings).create_infer_request()
        row = np.array([ids], dtype=np.int64)
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
        names = {name for port in request.model_inputs for name in port.names}
        inputs["beam_idx"] = np.zeros(1, dtype=np.int32)
        outputs = request.infer({name: value for name, value in inputs.items() if name in names})
        next(iter(outputs.values()))[0].astype(np.float32).tofile(path)


if __name__ == "__main__":
    serve(OpenVINO)
