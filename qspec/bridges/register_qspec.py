"""The module that `optimum-cli` discovers.

optimum reads `REGISTER_COMMANDS` of every module of the namespace package `optimum.commands.register`, to which any
distribution may contribute: the wheel carries this file there, too.
"""

from qspec.bridges.optimum import REGISTER_COMMANDS

__all__ = ["REGISTER_COMMANDS"]
