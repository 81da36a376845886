"""optimum: qspec as the sub-command `optimum-cli qspec`."""

from argparse import REMAINDER, ArgumentParser
from importlib.metadata import entry_points

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


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
