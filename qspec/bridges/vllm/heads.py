"""A vLLM plugin that serves MLP speculators, which vLLM itself no longer does: a proposer, and the states it needs.

vLLM loads a proposer of ours by its name (`--speculative-config`, method custom_class) and asks it for drafts, but
without the target's hidden states and the length that its schedule has for the batch; `register` (entry point
`vllm.general_plugins`) hands these over. This file runs in vLLM's environment, where qspec lies without its
dependencies: it needs torch and safetensors.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qspec.bridges.heads import speculator
from qspec.bridges.tensors import read_tensors
from qspec.errors import SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator

PROPOSER = f"{__name__}.HeadProposer"
FOLDER_KEY = "qspec_head"
"""The key of `--additional-config` for the folder of the head."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HANDED = ("scheduler_output", "sampled_token_ids", "sample_hidden_states", "spec_decode_metadata")
_TAKEN = "propose_draft_token_ids"
_SCHEDULE, _SCHEDULED = "num_speculative_tokens_per_batch_size", "num_spec_tokens_to_schedule"


class HeadProposer:
    """Drafts greedily with a stored head; vLLM's own rejection rule keeps the distribution."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises `SourceError` if the configuration names no folder, or fewer heads than tokens are asked for."""
        config = vllm_config.additional_config or {}
        if FOLDER_KEY not in config:
            fix = f'pass --additional-config \'{{"{FOLDER_KEY}": "<folder of the head>"}}\''
            raise SourceError("the head's folder", "is not told", fix)
        folder, target = Path(config[FOLDER_KEY]), Path(vllm_config.model_config.model)
        self._k: int = vllm_config.speculative_config.num_speculative_tokens
        n = speculator.read_shape(folder).n_predict
        if self._k > n:
            raise SourceError(f"num_speculative_tokens {self._k}", f"the head drafts {n}", f"ask for at most {n}")
        self._head = _load(folder, target)
        self._hidden: Tensor | None = None
        self._by_batch = getattr(vllm_config.speculative_config, _SCHEDULE, None) is not None
        self._now = self._k

    def load_model(self, target_model: Any) -> None:
        """The head was loaded from its own file."""

    def follow(
        self, hidden_RH: Tensor, rows: Sequence[int], sampled: Sequence[Sequence[int]], scheduled: int | None = None
    ) -> None:
        """Take the states behind which vLLM has sampled: `rows` of them per request, of which the accepted ones count.

        The state that counts is the last accepted one's: it has seen all tokens but the newest. scheduled: tokens to
        draft at the batch size at hand, which vLLM's scheduler knows and does not tell proposers of this method; heard
        where there is a schedule.
        """
        self._now = min(self._k, scheduled) if self._by_batch and scheduled is not None else self._k
        starts = [sum(rows[:i]) for i in range(len(rows))]
        last = [start + max(0, len(tokens) - 1) for start, tokens in zip(starts, sampled, strict=True)]
        self._hidden = hidden_RH[torch.tensor(last, device=hidden_RH.device)].float()

    @torch.no_grad()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any = None,
        token_ids_cpu: Any = None,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every request that has a newest token; none for one whose prompt is still being read."""
        assert self._hidden is not None, "the states were not handed over: is the plugin loaded?"
        active = [i for i, tokens in enumerate(sampled_token_ids) if len(tokens)]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not active or not self._now:
            return drafts
        head = self._head = self._head.to(self._hidden.device)
        state = head.begin(self._hidden[active])
        tokens_R = torch.tensor([sampled_token_ids[i][-1] for i in active], device=state.device)
        chosen: list[Tensor] = []
        for i in range(self._now):
            state, logits_RD = head.advance(i, state, tokens_R)
            tokens_R = logits_RD.argmax(-1)
            if head.ids_D is not None:
                tokens_R = head.ids_D[tokens_R]
            chosen.append(tokens_R)
        for i, tokens in zip(active, torch.stack(chosen, 1).tolist(), strict=True):
            drafts[i] = tokens
        return drafts


def register() -> None:
    """Let vLLM's model runner hand its states to a `HeadProposer`. Safe to call again, as vLLM does."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    taken = getattr(GPUModelRunner, _TAKEN)
    if getattr(taken, "hands_states", False):
        return
    setattr(GPUModelRunner, _TAKEN, handing_over(taken))


def handing_over(taken: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method, which first tells a `HeadProposer` the states. Raises `SourceError` for a release without them."""
    signature = inspect.signature(taken)
    lacking = [name for name in _HANDED if name not in signature.parameters]
    if lacking:
        rule = f"has no {', '.join(lacking)}: this release hands no states to drafters as qspec knows it"
        raise SourceError(f"vLLM's {_TAKEN}", rule, "install a release that qspec names as proven")

    @functools.wraps(taken)
    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, HeadProposer):
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            scheduler, sampled, hidden_RH, drafted = (bound.arguments[name] for name in _HANDED)
            rows = [1] * len(sampled) if drafted is None else [n + 1 for n in drafted.num_draft_tokens]
            self.drafter.follow(hidden_RH, rows, sampled, getattr(scheduler, _SCHEDULED, None))
        return taken(self, *args, **kwargs)

    propose.hands_states = True  # type: ignore[attr-defined]
    return propose


def _load(folder: Path, target: Path) -> MLPSpeculator:
    """The head, beside the embedding and output rows of the target's checkpoint."""
    tensors = read_tensors(target)
    embedding_VH = tensors[_EMBEDDING]
    if f"{_HEAD}_scale" in tensors:
        output_VH = tensors[_HEAD].float() * tensors[f"{_HEAD}_scale"].float()
    else:
        output_VH = tensors.get(_HEAD, embedding_VH)
    head = speculator.read(folder, embedding_VH, output_VH)
    made: dict[Int8Map, nn.Linear] = {}  # tied layers stay one
    for name, module in list(head.named_modules(remove_duplicate=False)):
        if isinstance(module, Int8Map):
            if module not in made:
                made[module] = _in_float(module.weight.dequantize())
            parent, _, part = name.rpartition(".")
            setattr(head.get_submodule(parent), part, made[module])
    return head


def _in_float(weight_NK: Tensor) -> nn.Linear:
    """A layer that every device multiplies."""
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    return linear
