"""What a recipe's bytes depend on: the CPU's instruction set, and only behind a forward pass."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Takes torch's kernels and its matrix library down to AVX2; changes nothing on a CPU that has no more."""
CODE = """
import hashlib, json, sys
from qspec.bridges.hf import load_folder
from qspec.quantization.rotate import prepare
from qspec.quantization.rtn import quantize
from qspec.schema.quantization import QuantSpec
from qspec.schemes.build import build_plan

model = load_folder(sys.argv[1])
for fields in json.loads(sys.argv[2]):
    spec = QuantSpec.model_validate(fields)
    made = quantize(prepare(model, spec, 0)[0], None, build_plan(spec))
    digest = hashlib.sha256()
    for linear in made.linears.values():
        digest.update(linear.weight.codes.numpy().tobytes() + linear.weight.scale.numpy().tobytes())
    print(digest.hexdigest())
"""
UNCALIBRATED = [{"scheme": "W8A8"}, {"scheme": "W8A8", "group_size": 32}, {"scheme": "W8A8", "rotation": {}}]


@pytest.mark.skipif("QSPEC_LONG" not in os.environ, reason="starts two processes; QSPEC_LONG=1 runs it")
def test_rounding_to_nearest_gives_equal_bytes_on_another_instruction_set(tmp_path: Path) -> None:
    """Would catch scales or rotations that are computed in an order which the CPU chooses."""
    tiny_model("llama", tmp_path / "model")
    arguments = [sys.executable, "-c", CODE, str(tmp_path / "model"), json.dumps(UNCALIBRATED)]
    found = [
        subprocess.run(
            arguments, cwd=ROOT, env={**os.environ, **older}, capture_output=True, text=True, check=True
        ).stdout.split()
        for older in ({}, OLDER)
    ]
    assert len(set(found[0])) == len(UNCALIBRATED)
    assert found[0] == found[1]
