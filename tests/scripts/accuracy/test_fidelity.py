"""The comparison where it cannot be made: said, not skipped in silence."""

import os
from pathlib import Path
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[3]
MATRIX = """
m:
  model: runs/m
  llama2c: [m.bin, tok.bin]
  calibration: {}
  corpora: [tinystories]
  windows: 2
  length: 16
  contests: {W8A8: {base: {scheme: W8A8}, ours: {rtn: {}}}}
"""


def test_a_model_that_is_not_here_is_named(tmp_path: Path) -> None:
    """Catches a traceback, or a table that lacks a model without saying why."""
    (tmp_path / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.accuracy.fidelity", "--matrix", "matrix.yaml"],
        cwd=tmp_path,
        env=os.environ | {"QSPEC_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-500:]
    assert "m: skipped, needs m.bin and tok.bin in QSPEC_DATA" in ran.stdout
