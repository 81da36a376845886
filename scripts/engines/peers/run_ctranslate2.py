"""CTranslate2: its tokens are strings: `vocabulary.json` of the converted folder maps ids to them."""

from collections.abc import Sequence
import json
from pathlib import Path

import ctranslate2
import numpy as np
from wire import Clock, Options, Prompts, serve


class CTranslate2:
    def __init__(self, options: Options) -> None:
        folder = Path(options["weights"])
        self._tokens = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        compute = options.get("compute_type", "default")
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute, inter_threads=1, intra_threads=options["threads"]
        )
        size = (folder / "model.bin").stat().st_size
        self.facts = {"version": ctranslate2.__version__, "weight_bytes": size}

    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        assert not speculation, f"no speculation here: {speculation}"

        def clocked(step: ctranslate2.GenerationStepResult) -> bool:
            clock.add(1, step.batch_id)
            return False

        results = self._generator.generate_batch(
            [[self._tokens[i] for i in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            end_token=[self._tokens[0]],
            include_prompt_in_result=False,
            callback=clocked,
        )
        return [result.sequences_ids[0] for result in results]

    def write_logits(self, ids: Sequence[int], path: str) -> None:
        logits = self._generator.forward_batch([[self._tokens[i] for i in ids]])
        np.array(logits)[0].astype(np.float32).tofile(path)


if __name__ == "__main__":
    serve(CTranslate2)
