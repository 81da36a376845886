"""A device that is not the CPU: `python elsewhere.py FOLDER` quantizes the model there on both, and compares.

Its tensors hold CPU tensors that only its operations reach: one with operands of both devices fails, as on a GPU, and
so does whatever takes a tensor's memory for the CPU's. In a process of its own, for torch keeps a device for good.
"""
# ruff: noqa: E402 (torch is prepared before qspec is imported)

import json
from pathlib import Path
import sys
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

torch.inference_mode = torch.no_grad  # before qspec is imported: tensors in Python have no inference mode

from qspec.bridges.hf import load_folder
from qspec.progress import Progress
from qspec.quantization.job import Calibration, quantize_model
from qspec.quantization.pieces import CPU
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec

_setup_privateuseone_for_python_backend("elsewhere")
DEVICE = torch.device("elsewhere", 0)
MOVES = ("copy_", "_to_copy", "to", "index", "index_put_", "_index_put_impl_")
"""Operations whose operands may be on both devices: copies, and indices that are on the host."""


class There(Tensor):
    """A tensor of that device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: Self = torch.Tensor._make_wrapper_subclass(cls, held.shape, **shape, device=DEVICE)  # type: ignore
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on that device, or one that makes a tensor there."""
    name, tensors = func.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if not isinstance(x, There) and x.dim() > 0]
    assert name in MOVES or not here, f"{func}: operands of two devices"
    known = {id(x.held): x for x in tensors if isinstance(x, There)}

    def held(x: Any) -> Any:
        return x.held if isinstance(x, There) else CPU if isinstance(x, torch.device) else x

    def there(x: Any) -> Any:
        return known[id(x)] if id(x) in known else There(x) if isinstance(x, Tensor) else x

    out = func(*tree_map(held, args), **tree_map(held, kwargs))
    if CPU in tree_leaves((args, kwargs), lambda x: isinstance(x, Tensor)):
        return out
    return args[0] if name == "copy_" else tree_map(there, out)


class Literals(TorchFunctionMode):
    """Tensors of numbers, and the other way: torch does neither with a device in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = args[0], torch.tensor(args[1]), *args[2:]
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].held.tolist()
        if func in (torch.tensor, torch.arange, torch.linspace, torch.eye) and (kwargs or {}).get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": CPU}).to(DEVICE)
        return func(*args, **(kwargs or {}))


LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")

SPECS: dict[str, dict[str, Any]] = {
    "stored scales": {"scheme": "FP8", "kv": {"format": "fp8_e4m3", "query": "head"}},
    "smoothing": {"scheme": "W8A8", "smoothing": {}, "clip": {"method": "mse"}},
    "feedback": {"scheme": "W4A16", "group_size": 32, "method": "gptq", "random_rows": 1, "symmetric": False},
    "feedback of INT8": {"scheme": "W8A8", "method": "gptq"},
    "choices": {"scheme": "FP8", "kv": {"granularity": "auto", "scales": "auto"}},
    "outliers": {"scheme": "W4A16", "group_size": 32, "outliers": {"share": 0.5}},
    "mixed": {"mixed": {"bits": 9.0, "candidates": ["W8A8", "FP8_DYNAMIC", "none"]}, "ignore": []},
    "mixed by KL": {"mixed": {"bits": 9.0, "metric": "kl", "candidates": ["W8A8", "none"]}},
    "rotation": {"scheme": "W8A8", "rotation": {}},
}


class Text(Calibration):
    """Random tokens."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(CalibrationSpec(), model.tokenizer, 0, Progress(quiet=True))
        draw = torch.Generator().manual_seed(1)
        self.__dict__["rows"] = torch.randint(5, model.arch.vocab_size, (4, 24), generator=draw).tolist()


def made(model: LoadedModel, spec: dict[str, Any], work: Path, device: torch.device) -> dict[str, Tensor]:
    """All that a checkpoint would hold."""
    from qspec.bridges.compressed import stored_tensors

    whole: QuantizedModel = quantize_model(
        model, QuantSpec.model_validate(spec), FusionSpec(), Text(model), work, torch.float32, device
    )
    return dict(stored_tensors(whole, torch.float32))


def refuses() -> None:
    """The double is one: operands of two devices, and memory that is not the CPU's."""
    x = torch.ones(2, device=DEVICE)
    for wrong in (lambda: x + torch.ones(2), x.numpy):
        try:
            wrong()
        except (AssertionError, RuntimeError, TypeError):
            continue
        raise AssertionError("a GPU would fail")


def main() -> None:
    refuses()
    folder = Path(sys.argv[1])
    model = load_folder(folder)
    for name in sys.argv[2:] or SPECS:
        here, there = (made(model, SPECS[name], folder / f"{name} {device.type}", device) for device in (CPU, DEVICE))
        assert here.keys() == there.keys(), name
        codes, floats = 0.0, 0.0
        for key, x in here.items():
            assert (x.shape, x.dtype) == (there[key].shape, there[key].dtype), f"{name}: {key}"
            a, b = x.double(), there[key].double()
            if x.element_size() == 1 or not x.is_floating_point():
                codes = max(codes, float((a != b).double().mean()))
            else:
                floats = max(floats, float((a - b).norm() / a.norm().clamp(min=1e-30)))
        print(json.dumps({"case": name, "codes": codes, "floats": floats}), flush=True)


if __name__ == "__main__":
    with torch.no_grad(), Literals():
        main()
