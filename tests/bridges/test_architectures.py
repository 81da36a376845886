"""An architecture that differs in nothing from Llama is one row."""

from pathlib import Path

import pytest
import torch

from qspec.bridges.architectures import ARCHITECTURES, Architecture
from qspec.bridges.hf import load_folder
from qspec.errors import SourceError
from qspec.nn.eager.decoder import Decoder
from tests import tiny


def test_a_llama_like_architecture_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a list of kinds beside the table: config, tensors and logits follow from the row alone."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setitem(
        tiny._OWN, "cwm", {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_theta": 1e4}}
    )
    folder = tiny.tiny_model("cwm", tmp_path)
    with pytest.raises(SourceError, match="'cwm'"):
        load_folder(folder)
    monkeypatch.setitem(ARCHITECTURES, "cwm", Architecture())
    ids = torch.arange(5, 15)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    found = Decoder.from_float(load_folder(folder)).forward(ids)
    # float32, two layers: only the order of summation differs, by what a CPU's matmuls do
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
