"""optimum: qspec as an `OptimumQuantizer`, and as the sub-command `optimum-cli qspec`."""

from argparse import REMAINDER, ArgumentParser
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.quantization_base import OptimumQuantizer

from qspec.errors import OutputError

Quantize = Callable[..., Any]
"""`qspec.quantize(model, out, *, revision, calibration, **quantization)`."""


class QspecQuantizer(OptimumQuantizer):  # type: ignore[misc]  # optimum carries no types
    """Quantizes one model into a compressed-tensors checkpoint. `quantizer` makes the class that can do it."""

    _quantize: Quantize

    def __init__(self, model: str, revision: str | None = None) -> None:
        """`model` and `revision` as in a recipe."""
        self.model, self.revision = model, revision

    @classmethod
    def from_pretrained(
        cls, model_or_path: str | Path, file_name: str | None = None, revision: str | None = None
    ) -> "QspecQuantizer":
        """`file_name` names a GGUF file inside the folder `model_or_path`."""
        model = str(model_or_path if file_name is None else Path(model_or_path) / file_name)
        return cls(model, revision)

    def quantize(self, save_dir: str | Path, file_prefix: str | None = None, **options: Any) -> Path:
        """Write the checkpoint into the new folder `save_dir` and return it.

        options: fields of a recipe's `quantization` (`scheme="FP8"`, `kv={…}`), and `calibration={…}`.
        """
        if file_prefix is not None:
            fix = "leave file_prefix out"
            raise OutputError(f"file_prefix {file_prefix!r}", "engines load checkpoints by their standard names", fix)
        type(self)._quantize(self.model, save_dir, revision=self.revision, **options)
        return Path(save_dir)


def quantizer(quantize: Quantize) -> type[QspecQuantizer]:
    """The quantizer class that does its work with `quantize` (`qspec.quantize`)."""
    return type("QspecQuantizer", (QspecQuantizer,), {"_quantize": staticmethod(quantize)})


class QspecCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum carries no types
    """`optimum-cli qspec run RECIPE …` is `qspec run RECIPE …`."""

    COMMAND = CommandInfo("qspec", "Quantize a target and its draft as one speculative pair (see `qspec --help`).")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("arguments", nargs=REMAINDER, help="Arguments of the qspec command.")

    def run(self) -> None:
        """Run the installed `qspec` command; ends the process with its status."""
        (script,) = entry_points(group="console_scripts", name="qspec")
        raise SystemExit(script.load()(self.args.arguments))


REGISTER_COMMANDS = [QspecCommand]
