"""Layers that wait outside the device: the same numbers, in as much memory as was asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec.bridges.hf import load_folder
from qspec.errors import RecipeError
from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.decoder import CudaDecoder, Pool
from qspec.nn.cuda.model import CudaModel, load
from qspec.nn.cuda.offload import StreamedLayers, offloaded, tensors
from qspec.numerics.quantization.formats import FP8_E4M3, INT8
from qspec.quantization.rtn import quantize
from qspec.schema.quantization import QuantSpec
from qspec.schemes.build import build_plan
from tests.tiny import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
TOKENS = torch.randint(5, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))
SCHEMES: dict[str, dict[str, Any]] = {
    "float": {},
    "FP8": {"scheme": "FP8_DYNAMIC"},
    "W4A16": {"scheme": "W4A16", "group_size": 32},
}


@pytest.fixture(scope="module", params=SCHEMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CudaModel:
    """Five layers, so that buffers are used again, by another layer than the one that used them first."""
    whole = load_folder(tiny_model("qwen2", tmp_path_factory.mktemp("model"), num_hidden_layers=5))
    if request.param == "float":
        return load(whole, CPU, torch.float32)
    return load(quantize(whole, None, build_plan(QuantSpec(**SCHEMES[request.param]))), CPU, torch.float32)


def sizes(model: CudaModel) -> tuple[int, int]:
    """Bytes around the layers, and of one layer in its buffer."""
    layer = StreamedLayers(list(model.layers), {0}, CPU)
    return sum(x.nbytes for x in tensors(replace(model, layers=()))), len(layer._host[0])


@pytest.mark.parametrize("resident", [0, 2, 5])
def test_numbers_are_those_of_a_resident_model(resident: int, model: CudaModel) -> None:
    """Catches a buffer that is overwritten while it is read, a part at a wrong offset, and layers out of order."""
    around, layer = sizes(model)
    small = offloaded(model, CPU, around + (2 + resident) * layer)
    assert isinstance(small.layers, StreamedLayers) == (resident < 5)
    decoders = [CudaDecoder(Pool(m, 128, 1)) for m in (model, small)]
    for part in TOKENS.split([80, 1, 9]):
        want, got = (decoder.forward(part) for decoder in decoders)
        assert torch.equal(got, want)


def test_what_waits_outside_takes_no_memory_inside(model: CudaModel) -> None:
    """Catches layers that are on the device all the same: none may have storage there but the two buffers."""
    around, layer = sizes(model)
    small = offloaded(model, CPU, around + 3 * layer)
    inside = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for part in small.layers for x in tensors(part)
    }
    assert sum(inside.values()) <= 3 * layer


def test_a_limit_counts_the_cache(model: CudaModel) -> None:
    """Catches a cache that comes on top of what was asked for, or that is guessed wrong."""
    for kv in (None, FP8_E4M3, INT8):
        one = replace(model, kv=kv, kv_scales=((1.0, 1.0),) * 5 if kv == FP8_E4M3 else ())
        assert CudaCache.bytes_of(one, 3, 40) == CudaCache(one, 3, 40).nbytes


def test_a_limit_that_nothing_fits_is_refused(model: CudaModel, tmp_path: Path) -> None:
    """Catches a limit that is passed over in silence."""
    around, layer = sizes(model)
    with pytest.raises(RecipeError, match="embedding, head and 2 layers take"):
        offloaded(model, CPU, around + 2 * layer - 1)
