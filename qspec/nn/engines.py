"""Which decoder runs a model here: the C++ core where it can, torch's kernels otherwise."""

from functools import lru_cache
import logging

import torch

from qspec.nn.decoder import Decoder
from qspec.nn.native import NativeDecoder
from qspec.ops.select import Kernels
from qspec.records import LoadedModel, QuantizedModel

AnyDecoder = Decoder | NativeDecoder


def open_decoder(
    model: LoadedModel | QuantizedModel,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    kernels: Kernels = "auto",
) -> AnyDecoder:
    """The fastest decoder for a model; `kernels="reference"` is always the torch decoder on its eager twins."""
    if native_obstacle(model, dtype, kernels) is None:
        return NativeDecoder(model, max_length)
    if isinstance(model, LoadedModel):
        return Decoder.from_float(model, dtype, max_length)
    return Decoder.from_quantized(model, dtype, max_length, kernels)


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
    found = NativeDecoder.missing()
    if found is not None:
        _say_once(found)
    return found


@lru_cache(maxsize=1)
def _say_once(reason: str) -> None:
    logging.getLogger(__name__).warning("models run on torch's kernels, several times slower: %s", reason)


def engine_name(decoder: AnyDecoder) -> str:
    """What runs, for a report: `C++ core (avx2), 2 threads` or `torch kernels, 2 threads`."""
    if isinstance(decoder, NativeDecoder):
        return f"C++ core ({decoder.isa}), {decoder.threads} threads"
    return f"torch kernels, {torch.get_num_threads()} threads"
