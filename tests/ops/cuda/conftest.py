"""Where the tests in `kernels/` run: in Triton's interpreter (in a process of its own, which `test_interpreter` starts)
or on a GPU. They say which device their tensors are on, and are counted.
"""

import os

import pytest
import torch

INTERPRETED = pytest.StashKey[list[int]]()


@pytest.fixture
def record_interpreted(request: pytest.FixtureRequest) -> list[int]:
    """Numbers of tests that were interpreted."""
    return request.config.stash.setdefault(INTERPRETED, [])


@pytest.fixture
def device(record_interpreted: list[int]) -> torch.device:
    """A device whose operations are kernels."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        record_interpreted.append(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: test_interpreter runs the kernels' tests in Triton's interpreter")
    return torch.device("cuda")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of kernels ran in the interpreter: a run that skipped them all must not look like one that did."""
    counts = terminalreporter.config.stash.get(INTERPRETED, [])
    if counts:
        terminalreporter.write_line(f"kernel tests interpreted: {sum(counts)}")
