"""Kernels compiled to machine code for GPUs that are not there, by `compiled.py` in a process of its own."""

import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

SHARED = {89: 101376, 90: 232448}
"""Bytes of shared memory that one program may take."""
SPILLED = 16
"""Bytes that ptxas may park for one more program on a processor, where it has registers left."""


@pytest.fixture(scope="module", params=[89, 90])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[int, list[dict[str, Any]]]:
    """A capability, and the kernels that a 70B model needs there."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compiled.py")), str(request.param)]
    done = subprocess.run(command, env=env, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return request.param, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def of_kind(kernels: list[dict[str, Any]], name: str, **constants: object) -> list[dict[str, Any]]:
    found = [k for k in kernels if k["name"] == f"{name}_kernel" and constants.items() <= k.items()]
    assert found, f"no {name}_kernel with {constants}"
    return found


def test_kernels_fit(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """Catches what the interpreter lets pass: types, too much shared memory, rows that are longer than registers hold
    (SiLU over 28,672), and tiles of too many query rows."""
    capability, kernels = compiled
    for name in ("rows", "silu", "few_rows", "decode", "finish", "attend", "merge", "rope"):
        of_kind(kernels, name)
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["spilled"] <= SPILLED, kernel


def test_codes_are_multiplied_by_tensor_cores_as_they_are(compiled: tuple[int, list[dict[str, Any]]]) -> None:
    """Catches FP8 that is widened to half first (few rows on Hopper), and products outside of tensor cores."""
    capability, kernels = compiled
    fp8 = of_kind(kernels, "few_rows", DOT="None")
    whole = of_kind(kernels, "few_rows", WHOLE=True)
    tile = "m16n8k32.row.col" if capability == 89 else "m64n16k32"
    assert all(kernel["products"] == [f"{tile}.f32.e4m3.e4m3" + ".f32" * (capability == 89)] for kernel in fp8), fp8
    assert all("s8.s8" in product for kernel in whole for product in kernel["products"]), whole
    floats = [*of_kind(kernels, "few_rows", DOT="bf16"), *of_kind(kernels, "attend", DOT="bf16")]
    assert all(kernel["products"] and all("bf16" in p for p in kernel["products"]) for kernel in floats), floats
