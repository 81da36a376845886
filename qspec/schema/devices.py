"""Data-sheet figures of the devices that recipes name (`eval/devices.yaml`)."""

from functools import cache

from pydantic import Field

from qspec.eval_files import eval_dir
from qspec.schema.problems import validate
from qspec.schema.quantization import Strict
from qspec.schema.text import parse_yaml, read_text


class DeviceSheet(Strict):
    """One device. GB and TB/s are decimal; rates are dense 10^12 operations/s; None: unknown, or no such unit."""

    name: str
    title: str
    capability: int | None
    memory_gb: float | None = Field(gt=0)
    bandwidth_tb_s: float | None = Field(gt=0)
    bf16_tflops: float | None = Field(gt=0)
    fp8_tflops: float | None = Field(gt=0)
    int8_tflops: float | None = Field(gt=0)
    estimate_tb_s: float | None = Field(default=None, gt=0)
    estimate_tflops: float | None = Field(default=None, gt=0)
    source: str = Field(min_length=1)

    @property
    def architecture(self) -> str:
        return "CPU" if self.capability is None else f"SM{self.capability}"


@cache
def read_devices() -> dict[str, DeviceSheet]:
    """All sheets by name."""
    path = eval_dir() / "devices.yaml"
    data = parse_yaml(read_text(path, "device table"), str(path))
    return {name: validate(DeviceSheet, {"name": name, **sheet}, f"{path}: {name}") for name, sheet in data.items()}


def read_device(name: str) -> DeviceSheet:
    """The sheet of one device; the recipe schema has already checked the name."""
    return read_devices()[name]
