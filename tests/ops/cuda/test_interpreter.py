"""Runs the kernels' tests in Triton's interpreter: in another process, for it is chosen when triton is imported."""

from collections.abc import Callable
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from tests.conftest import INTERPRETED

Record = Callable[[str, object], None]


def test_kernels_in_the_interpreter(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Catches what the tests in `kernels/` catch, on machines without a GPU."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process interprets kernels itself")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("kernels"))]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, cwd=request.config.rootpath, capture_output=True, text=True, check=False)
    found = re.search(r"kernel tests interpreted: (\d+)", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert found, done.stdout[-6000:]
    record_property(INTERPRETED, int(found[1]))
