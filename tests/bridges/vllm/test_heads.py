"""The vLLM plugin: the states it takes are the right ones, and its drafts those of qspec's own engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qspec.bridges.heads import speculator
from qspec.bridges.tensors import write_tensors
from qspec.bridges.vllm import heads as vllm_heads
from qspec.errors import SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, swap_linears
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.types import Sampling

H, V, N = 8, 12, 3
EMBEDDING, OUTPUT = torch.randn(2, V, H, generator=torch.Generator().manual_seed(0))
STATES = torch.randn(6, H, generator=torch.Generator().manual_seed(1))


def _stored(folder: Path) -> tuple[MLPSpeculator, Any]:
    """A head with a reduced vocabulary and INT8 layers, and a vLLM configuration that names it."""
    shape = SpeculatorShape(H, V, N, 16, shared=True, draft_vocab=5)
    head = MLPSpeculator(shape, torch.tensor([0, 3, 4, 9, 11]), EMBEDDING, OUTPUT)
    initialize(head, torch.Generator().manual_seed(2))
    swap_linears(head.requires_grad_(False), lambda linear: Int8Map.rounded(linear.weight))
    speculator.write(head, folder / "draft")
    (folder / "target").mkdir()
    rows = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OUTPUT}
    write_tensors(folder / "target/model.safetensors", rows)
    config = SimpleNamespace(
        additional_config={vllm_heads.FOLDER_KEY: str(folder / "draft")},
        model_config=SimpleNamespace(model=str(folder / "target")),
        speculative_config=SimpleNamespace(num_speculative_tokens=N),
    )
    return head, config


class Runner:
    """As much of vLLM's model runner as the plugin touches."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sample_hidden_states: Tensor,
        spec_decode_metadata: Any = None,
    ) -> Any:
        return self.drafter.propose(sampled_token_ids)


def test_drafts_are_those_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch the state of a rejected token or another request, wrong ids, and a schedule that is not heard."""
    head, config = _stored(tmp_path)
    taken = vllm_heads.handing_over(Runner.propose_draft_token_ids)
    monkeypatch.setattr(Runner, "propose_draft_token_ids", taken)
    config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 2, N]]
    runner = Runner(vllm_heads.HeadProposer(config))
    sampled = [[7, 2], [], [5]]  # of 2 drafts 1 stood; a prompt that goes on; no drafts were there
    drafted = SimpleNamespace(num_draft_tokens=[2, 0, 0])
    drafts = runner.propose_draft_token_ids(None, sampled, STATES, spec_decode_metadata=drafted)
    assert drafts[1] == []
    for request, row in ((0, 1), (2, 4)):
        assert drafts[request] == _expected(head, STATES[row], sampled[request][-1])
    plain = runner.propose_draft_token_ids(None, [[1], [2]], STATES[:2])
    assert plain == [_expected(head, STATES[i], i + 1) for i in range(2)]
    for scheduled in (1, 0):  # of a schedule by batch size
        told = SimpleNamespace(num_spec_tokens_to_schedule=scheduled)
        fewer = runner.propose_draft_token_ids(told, [[1], [2]], STATES[:2])
        assert fewer == [_expected(head, STATES[i], i + 1)[:scheduled] for i in range(2)]


def _expected(head: MLPSpeculator, state_H: Tensor, token: int) -> list[int]:
    class Target:
        vocab_size, max_length, length = V, 100, 4

        def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
            raise NotImplementedError

        def truncate(self, length: int) -> None: ...

        def hidden(self, count: int = 1) -> Tensor:
            return state_H[None]

    drafter = MlpDrafter(head)
    drafter.follow(Target())
    return drafter.propose([1, 1, 1, 1, token], N, Sampling(), torch.Generator()).tokens_K.tolist()


def test_a_release_without_states_is_refused() -> None:
    """Would catch drafts from states of nowhere, accepted one time in a hundred, after an update of vLLM."""

    def other(self: Any, scheduler_output: Any, sampled_token_ids: Any) -> None: ...

    with pytest.raises(SourceError, match="sample_hidden_states, spec_decode_metadata"):
        vllm_heads.handing_over(other)


def test_what_the_head_cannot_do_is_said(tmp_path: Path) -> None:
    """Would catch a server that fails on its first request."""
    _, config = _stored(tmp_path)
    config.speculative_config.num_speculative_tokens = N + 1
    with pytest.raises(SourceError, match="the head drafts 3"):
        vllm_heads.HeadProposer(config)
    config.additional_config = {}
    with pytest.raises(SourceError, match="additional-config"):
        vllm_heads.HeadProposer(config)
