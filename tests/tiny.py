"""Tiny random models of every supported kind, with a small real tokenizer, saved as an ordinary model folder."""

from pathlib import Path
from typing import Any

import torch

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma")
NEWER_KINDS = ("gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe")
"""Post-norms, windows and rotary bases by layer, layers stored as one, mixtures of experts."""
VOCAB_SIZE = 300
SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<|user|>", "<|assistant|>")  # ids 0 … 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the dog chases the fox around the old oak tree. "
    "A speculative draft proposes the next tokens; the target verifies them all in one forward pass. "
    "Numbers such as 0, 12 and 345 appear here, and so do words from elsewhere: naïve, Größe, 模型, 모델. "
) * 4

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What sets each kind apart: head sizes other than hidden / heads, windows, tied embeddings, biases.
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 32},
    "gemma": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 32,
        "sliding_window": 16,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 32,
        "sliding_window": 16,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    },
    "phi3": {
        "tie_word_embeddings": False,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "mixtral": {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
    },
}


def tiny_model(kind: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Build a random two-layer model of `kind`, save it and its tokenizer into `folder`, and return `folder`.

    `overrides` are fields of the transformers config (`tie_word_embeddings=True`, `rope_parameters={…}`, …).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**_SHAPE, **_OWN[kind], **overrides})
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32)
    _randomize(model, torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Train the fixed byte-level BPE tokenizer (300 entries, BOS added to every text) and save it into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend: Any = PreTrainedTokenizerFast
    backend(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=_SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of unit output scale; norm gains and biases that are not the identity (so that folds are visible)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif name.endswith("norm.weight"):
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.1 * noise)
