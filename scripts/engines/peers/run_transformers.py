"""transformers' `generate`, and its assisted generation: `{"prompt_lookup": n}` or `{"assistant": folder}`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from wire import Clock, Options, Prompts, serve


class Transformers:
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options["threads"])
        transformers.logging.set_verbosity_error()
        self._dtype = getattr(torch, options["dtype"])
        self._model = self._load(options["weights"])
        self._model.generation_config.eos_token_id = None
        self._assistants: dict[str, Any] = {}
        size = sum(p.nbytes for p in self._model.parameters())
        self.facts = {"version": transformers.__version__, "weight_bytes": size}

    def _load(self, folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(Path(folder), dtype=self._dtype).eval()

    @torch.no_grad()
    def generate(self, prompts: Prompts, new: int, speculation: Options, clock: Clock) -> list[list[int]]:
        length, seen = len(prompts[0]), [len(prompts[0])]

        def tell(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            for i in range(len(ids)):
                clock.add(ids.shape[1] - seen[0], i)
            seen[0] = ids.shape[1]
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            stopping_criteria=[tell],
            pad_token_id=0,
            **self._assistance(speculation),
        )
        answers: list[list[int]] = out[:, length : length + new].tolist()
        return answers

    def _assistance(self, speculation: Options) -> dict[str, Any]:
        if folder := speculation.get("assistant"):
            if folder not in self._assistants:
                self._assistants[folder] = self._load(folder)
            return {"assistant_model": self._assistants[folder]}
        if tokens := speculation.get("prompt_lookup"):
            return {"prompt_lookup_num_tokens": tokens}
        return {}

    @torch.no_grad()
    def write_logits(self, ids: Sequence[int], path: str) -> None:
        self._model(torch.tensor([ids])).logits[0].float().numpy().tofile(path)


if __name__ == "__main__":
    serve(Transformers)
