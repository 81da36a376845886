"""Shared fixtures. Nothing in the suite may reach the network, depend on the order of tests, or be timed."""

import os
from pathlib import Path
import random

# Libraries read these when they are first imported, so they are set before any of them is.
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
INTERPRETED = "interpreted"
"""Property of a test that says how many tests of kernels it interpreted; the summary of all processes gets it."""

hypothesis.settings.register_profile("qspec", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("qspec")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test starts from the same random state, alone or in any order."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets and models (`QSPEC_DATA`, default `../shared/data`); skips the test where the folder is absent."""
    folder = Path(os.environ.get("QSPEC_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the data folder {folder}: set QSPEC_DATA")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of kernels ran in the interpreter: a run that skipped them all must not look like one that did."""
    passed = terminalreporter.stats.get("passed", [])
    counts = [int(value) for report in passed for name, value in report.user_properties if name == INTERPRETED]
    if counts:
        terminalreporter.write_line(f"kernel tests interpreted: {sum(counts)}")
