"""Whether code that a model wrote passes its tests: run in a process of its own, within limits.

Limits are against accidents, not against intent: a recipe must allow it (`run_code`), in a container.
"""

from collections.abc import Mapping, Sequence
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 10
MEMORY = 1 << 30
_GUARD = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def human_eval(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`pass@1` of an answer to a row of HumanEval: the prompt's function, completed, against the row's tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}


def passes(program: str) -> bool:
    """Whether a program ends by itself, in time and without an error."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", _GUARD + program]
        try:
            done = subprocess.run(
                command, cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
            )
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a null byte in the program
            return False
    return done.returncode == 0
