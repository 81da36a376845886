"""Which decoder runs a model here: a GPU's for a pair that is for one, else the C++ core, else torch's kernels."""

from functools import lru_cache
import logging

import torch

from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.cuda.model import obstacle as cuda_obstacle
from qspec.nn.eager.decoder import Decoder
from qspec.nn.lm import LM
from qspec.ops.select import Kernels
from qspec.records import LoadedModel, QuantizedModel

AnyDecoder = Decoder | NativeDecoder | CudaDecoder


def gpu_for(device: str) -> torch.device | None:
    """This machine's GPU, if it has one, for a pair whose device (a name of `eval/devices.yaml`) is one."""
    return torch.device("cuda") if device != "cpu" and torch.cuda.is_available() else None


def open_decoder(
    model: LoadedModel | QuantizedModel,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    kernels: Kernels = "auto",
    gpu: torch.device | None = None,
) -> AnyDecoder:
    """The fastest decoder for a model; `kernels="reference"` is always the torch decoder on its eager twins.

    dtype: of what is computed; None is bfloat16 on a GPU and float32 on a CPU. gpu: where `CudaDecoder` runs a model
    that it takes.
    """
    if gpu is not None and kernels == "auto" and _runs_on_cuda(model):
        return CudaDecoder.load(model, dtype or torch.bfloat16, max_length, device=gpu)
    dtype = dtype or torch.float32
    if native_obstacle(model, dtype, kernels) is None:
        return NativeDecoder(model, max_length)
    if isinstance(model, LoadedModel):
        return Decoder.from_float(model, dtype, max_length)
    return Decoder.from_quantized(model, dtype, max_length, kernels)


def _runs_on_cuda(model: LoadedModel | QuantizedModel) -> bool:
    obstacle = cuda_obstacle(model)
    if obstacle is not None:
        _warn_once(f"{model.arch.model_type} runs on the CPU, the engine for CUDA does not take it: {obstacle}")
    return obstacle is None


def native_obstacle(
    model: LoadedModel | QuantizedModel, dtype: torch.dtype = torch.float32, kernels: Kernels = "auto"
) -> str | None:
    """Why `open_decoder` does not take the C++ core, in words; None when it does."""
    return settings_obstacle(dtype, kernels) or NativeDecoder.supports(model) or _missing()


def settings_obstacle(dtype: torch.dtype, kernels: Kernels) -> str | None:
    """The same, of what a user chose."""
    if kernels != "auto":
        return f"{kernels} kernels"
    return None if dtype == torch.float32 else f"dtype {str(dtype).removeprefix('torch.')}"


def _missing() -> str | None:
    missing = NativeDecoder.missing()
    if missing is not None:
        _warn_once(f"models run on torch's kernels, several times slower: {missing}")
    return missing


@lru_cache
def _warn_once(sentence: str) -> None:
    logging.getLogger(__name__).warning(sentence)


def device_of(lm: LM) -> torch.device:
    """Where a model computes."""
    return lm.device if isinstance(lm, CudaDecoder) else torch.device("cpu")


def engine_name(decoder: AnyDecoder) -> str:
    """The engine, for a report: `C++ core (avx2), 2 threads`, `torch kernels, 2 threads`, `CUDA engine (H200)`."""
    if isinstance(decoder, NativeDecoder):
        return f"C++ core ({decoder.isa}), {decoder.threads} threads"
    if isinstance(decoder, CudaDecoder):
        name = torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else "eager twins on the CPU"
        return f"CUDA engine ({name})"
    return f"torch kernels, {torch.get_num_threads()} threads"
