"""The choice between the C++ core and torch's kernels."""

from pathlib import Path

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.eager.decoder import Decoder
from qspec.nn.engines import device_of, engine_name, gpu_for, native_obstacle, open_decoder
from tests.tiny import tiny_model


def test_torch_serves_what_the_core_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a machine without a compiler, a wide dtype or another architecture that fails instead of running."""
    llama = load_folder(tiny_model("llama", tmp_path / "llama"))
    assert isinstance(open_decoder(load_folder(tiny_model("llama", tmp_path / "odd", head_dim=12))), Decoder)
    assert isinstance(open_decoder(llama, kernels="reference"), Decoder)
    assert "bfloat16" in (native_obstacle(llama, torch.bfloat16) or "")
    monkeypatch.setattr(NativeDecoder, "missing", staticmethod(lambda: "no compiler"))
    assert native_obstacle(llama) == "no compiler"
    decoder = open_decoder(llama, max_length=20)
    assert isinstance(decoder, Decoder)
    assert decoder.max_length == 20
    assert engine_name(decoder) == f"torch kernels, {torch.get_num_threads()} threads"
    assert [record.message for record in caplog.records] == [
        "models run on torch's kernels, several times slower: no compiler"
    ]


def test_a_gpu_serves_what_its_engine_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches pairs for a CPU that a GPU would run in another dtype, and models that a GPU's engine gets wrong."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_for("cpu") is None
    assert gpu_for("h200") == torch.device("cuda")
    here, llama = torch.device("cpu"), load_folder(tiny_model("llama", tmp_path / "llama"))
    decoder = open_decoder(llama, max_length=20, gpu=here)
    assert isinstance(decoder, CudaDecoder)
    assert (decoder.max_length, device_of(decoder)) == (20, here)
    assert decoder.forward(torch.tensor([5])).dtype == torch.float32
    assert decoder._pool.passes.model.dtype == torch.bfloat16
    assert engine_name(decoder) == "CUDA engine (eager twins on the CPU)"
    assert isinstance(open_decoder(llama, kernels="reference", gpu=here), Decoder)
    other = open_decoder(load_folder(tiny_model("gemma2", tmp_path / "gemma")), gpu=here)
    assert not isinstance(other, CudaDecoder)
    assert "gemma2 runs on the CPU, the engine for CUDA does not take it: activation gelu_tanh" in caplog.messages
