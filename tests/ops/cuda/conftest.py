"""Where the tests in `kernels/` run: in Triton's interpreter (in a process of its own, which `test_interpreter` starts)
or on a GPU. They say which device their tensors are on, and are counted.
"""

from collections.abc import Callable
import os
from typing import Any

import pytest
import torch

from tests.conftest import INTERPRETED


def mend_interpreter() -> None:
    """Make Triton's interpreter (3.7) compute bfloat16 as a GPU does, so that kernels need no code of their own for it.

    It holds bfloat16 as the bits, which it multiplies as if they were integers, takes an integer for, and cuts off
    where a conversion rounds.
    """
    tl, interpreter = pytest.importorskip("triton.language"), pytest.importorskip("triton.runtime.interpreter")
    builder, convert = interpreter.InterpreterBuilder, interpreter._convert_float
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()

    def cast_by_value(self: Any, x: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and x.dtype.scalar.is_int():
            x = cast(self, x, tl.float32)
        return cast(self, x, target)

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._convert_float = rounded
    builder.cast_impl, builder.create_dot = cast_by_value, multiplied


if os.environ.get("TRITON_INTERPRET") == "1":
    mend_interpreter()


@pytest.fixture
def device(record_property: Callable[[str, object], None]) -> torch.device:
    """A device whose operations are kernels."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        record_property(INTERPRETED, 1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: test_interpreter runs the kernels' tests in Triton's interpreter")
    return torch.device("cuda")
