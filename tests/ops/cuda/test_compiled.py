"""Kernels compiled to machine code for GPUs that are not there, by `compiled.py` in a process of its own."""

import os
from pathlib import Path
import subprocess
import sys

import pytest


@pytest.mark.parametrize("capability", [89, 90])
def test_kernels_compile(capability: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Catches what the interpreter lets pass: types, tiles too small for tensor cores, too much shared memory."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compiled.py")), str(capability)]
    done = subprocess.run(command, env=env, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("rows", "few_rows", "decode", "finish", "attend", "merge", "rope"):
        assert f"compiled {name}_kernel sm_{capability}" in done.stdout
