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
            self.cache.crop(length - self.length)  # negative: positions to drop

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        self.fed += len(tokens_T)
        with torch.no_grad():
            logits: Tensor = self.model(tokens_T[None], past_key_values=self.cache, use_cache=True).logits[0].float()
        return logits if last is None else logits[-last:]


class Letters:
    """A tokenizer of one token per byte: id = byte + 3 behind BOS 1; 2 ends a turn; 0 is unused."""

    vocab_size = 259

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [1] * special + [byte + 3 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if i >= 3).decode(errors="replace")

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        turns = [[*self.encode(f"{m['role']}:{m['content']}", special=False), 2] for m in messages]
        return [1, *(token for turn in turns for token in turn), *self.encode("assistant:", special=False)]

    def fingerprint(self) -> str:
        return "letters"

    def parts(self) -> dict[str, Any]:
        return {"chat template": "turns"}

    def save(self, folder: Path) -> None:
        raise NotImplementedError


class Parrot:
    """An LM that repeats `script` after any prompt, whatever was said; `logits` adds noise by position and token."""

    max_length = 4096

    def __init__(self, script: list[int], prompt_length: int = 0, noise: float = 0.0, vocab: int = 259) -> None:
        self.script, self.prompt_length, self.vocab_size = script, prompt_length, vocab
        self.length = 0
        self.noise_PV = noise * torch.randn(64, vocab, generator=torch.Generator().manual_seed(3))

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        if self.length == 0 and self.prompt_length == 0:
            self.prompt_length = len(tokens_T)
        positions = torch.arange(self.length, self.length + len(tokens_T))
        self.length += len(tokens_T)
        logits_TV = self.noise_PV[positions % 64].clone()
        for row, position in enumerate(positions.tolist()):
            at = (position + 1 - self.prompt_length) % len(self.script)
            logits_TV[row, self.script[at]] += 10
        return logits_TV if last is None else logits_TV[-last:]
