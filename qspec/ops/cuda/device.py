"""Facts about the device that kernels run on; in Triton's interpreter, those of an H200."""

import os

import torch


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. To be set before triton is imported for the first time."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def processors(device: torch.device) -> int:
    """Streaming multiprocessors: programs that run at once, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def capability(device: torch.device) -> tuple[int, int]:
    """(8, 9) is Ada, the first with FP8; (9, 0) Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
