"""Integer kernels: grouped INT8 and INT4 weights against their eager twin, and instruction sets without their CPU."""

from pathlib import Path
import subprocess

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import NativeLinear, instruction_sets
from qspec.nn.cpp.weights import Packed
from qspec.ops import native_library, reference

INT8_DOT, INT4_DOT = 6, 7  # `WeightKind` of native/kernels.h
ROW, GROUP = 1, 3  # `InputKind`


def panels(x_NK: Tensor) -> Tensor:
    padded = F.pad(x_NK, (0, 0, 0, -x_NK.shape[0] % 8))
    return padded.view(-1, 8, x_NK.shape[1]).transpose(1, 2).contiguous()


def int4_codes(codes_NK: Tensor) -> Tensor:
    """The layout that native/kernels.h documents, written a second time."""
    eights = codes_NK.reshape(len(codes_NK), -1, 2, 4)
    return panels((eights[:, :, 0] | eights[:, :, 1] << 4).view(torch.int32).flatten(1))


@pytest.fixture(autouse=True)
def _library() -> None:
    reason = NativeDecoder.missing()
    if reason is not None:
        pytest.skip(f"needs the C++ core: {reason}")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("inputs", [ROW, GROUP])
def test_groups_equal_their_twin(bits: int, group: int, half: bool, asymmetric: bool, inputs: int) -> None:
    """Catches a group's scale, zero point or sum of inputs that is its neighbour's, and int16 sums that overflow."""
    if asymmetric and bits == 8:
        pytest.skip("INT8 weights have no zero points")
    n, k = 44, 384
    generator = torch.Generator().manual_seed(group)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes_NK = torch.randint(low, high, (n, k), dtype=torch.int16, generator=generator)
    codes_NK[0], codes_NK[1] = high - 1, low  # the largest sums
    codes_NK = codes_NK.to(torch.uint8 if bits == 4 else torch.int8)
    scale_NG = (torch.rand(n, k // group, generator=generator) + 0.1).half().float()
    zero_NG = torch.full(scale_NG.shape, 8) if bits == 4 else None
    if asymmetric:
        zero_NG = torch.randint(0, 16, scale_NG.shape, generator=generator)
    codes = int4_codes(codes_NK) if bits == 4 else panels(codes_NK.view(torch.int32))
    scales = (None, None, panels(scale_NG).half()) if half else (panels(scale_NG), None, None)
    zero = panels((zero_NG - 8).to(torch.int8)) if asymmetric and zero_NG is not None else None
    packed = Packed(INT4_DOT if bits == 4 else INT8_DOT, inputs, n, k, group, 0.0, codes, *scales, zero)
    x_TK = torch.randn(19, k, generator=generator)
    x_TK[2] = x_TK[2].sign()
    x_TK[3] = 1
    x_TK[4] = 0
    want = reference.grouped_int8_linear(x_TK, codes_NK, scale_NG, zero_NG, inputs == GROUP)
    for isa in instruction_sets():
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 19):
            assert torch.equal(NativeLinear(packed, isa)(x_TK[:rows]), want[:rows]), (isa, rows)


def test_given_scales_reach_minus_128() -> None:
    """Catches a product whose sign trick fails for the one code without a negative."""
    codes_NK = torch.full((8, 64), -128, dtype=torch.int8)
    codes_NK[1], codes_NK[2] = 127, -1
    packed = Packed(INT8_DOT, ROW, 8, 64, 64, 0.01, panels(codes_NK.view(torch.int32)), torch.ones(1, 1, 8), None)
    want = codes_NK.sum(1) * -128.0 * torch.tensor(0.01)
    for isa in instruction_sets():
        for rows in (1, 4, 9):
            assert torch.equal(NativeLinear(packed, isa)(torch.full((rows, 64), -9.0)), want.expand(rows, 8)), isa


def test_other_instruction_sets_by_emulation(tmp_path: Path) -> None:
    """Catches wrong AVX-512 and AMX kernels on a CPU that has neither: SIMDe and plain loops stand for them.

    The AMX unit holds the AVX-512 kernels too, and takes them for few rows and for groups.
    """
    if not Path("/usr/include/simde/x86/avx512.h").exists() or "avx2" not in instruction_sets():
        pytest.skip("needs SIMDe (Debian: libsimde-dev) and AVX2")
    cxx, here = native_library.compiler(), Path(__file__).parent
    assert cxx is not None
    flags = {"kernels_amx.cpp": (*native_library.AVX2, "-DQSPEC_EMULATED", "-include", str(here / "emulated_amx.h"))}
    sources = [*native_library.SOURCES.glob("kernels_*.cpp"), native_library.SOURCES / "isa.cpp", here / "emulated.cpp"]
    common = ("-std=c++17", "-O0", "-ffp-contract=off", "-w", f"-I{native_library.SOURCES}")
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    native_library.run_all(
        [
            [*cxx, *common, *flags.get(s.name, ()), "-c", str(s), "-o", str(o)]
            for s, o in zip(sources, objects, strict=True)
        ]
    )
    program = tmp_path / "emulated"
    native_library.run_all([[*cxx, *map(str, objects), "-o", str(program)]])
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["amx agrees"]
