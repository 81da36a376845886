"""Puts the compiled C++ core into a wheel, where there is a C++ compiler; without one the wheel is pure Python.

With `ziglang` in the build's environment the core is built for manylinux, and the wheel runs on any Linux of its
architecture: `pip install hatchling ziglang && pip wheel --no-deps --no-build-isolation .`
"""

import importlib.util
from pathlib import Path
import platform
import sys
import sysconfig
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install gets nothing here: it compiles at first use, for whatever the sources are then."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        core = _native_library(Path(self.root))
        portable = core.zig(platform.machine())
        try:
            made = core.build(Path(self.root) / "build" / "native", portable)
        except core.NoLibrary as error:
            self.app.display_warning(f"no C++ core in this wheel ({error}): models run on torch's kernels, slower")
            return
        for file in (made, core.digest_file(made)):
            build_data["force_include"][str(file)] = f"qspec/native/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(core.GLIBC if portable else '')}"


def _native_library(root: Path) -> ModuleType:
    """The module, without its package: that would import torch, which a build does not have."""
    path = root / "qspec" / "ops" / "native_library.py"
    spec = importlib.util.spec_from_file_location("native_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform_tag(glibc: str) -> str:
    """Tag of the C library that the core was built for; "": this very machine's, and its C++ runtime, or newer ones."""
    if sys.platform == "linux":
        return f"manylinux_{glibc.replace('.', '_')}_{platform.machine()}" if glibc else f"linux_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
