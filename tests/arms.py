"""Small language models and a tokenizer for tests of measurements: real transformers models, and a table LM."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class HFModel:
    """`nn.lm.LM` over a transformers causal model: the oracle that qspec's own decoder is compared with."""

    def __init__(self, folder: Path, max_length: int | None = None, noise: float = 0.0) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
        self.max_length = max_length or self.model.config.max_position_embeddings
        self.fed = 0
        self.truncate(0)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def truncate(self, length: int) -> None:
        from transformers import DynamicCache

        if length == 0:
            self.cache = DynamicCache(config=self.model.config)
        elif length < self.length:
            self.cache.crop(length)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        self.fed += len(tokens_T)
        with torch.no_grad():
            logits: Tensor = self.model(tokens_T[None], past_key_values=self.cache, use_cache=True).logits[0].float()
        return logits if last is None else logits[-last:]
