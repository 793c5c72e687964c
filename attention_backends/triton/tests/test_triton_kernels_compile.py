"""Every kernel compiles for NVIDIA and AMD GPUs, within registers and shared memory."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from dovetail_attn_triton.kernel_cases import kernel_cases
from dovetail_devkit.triton.compiled_kernels import check_kernel

CASES = kernel_cases()


def test_kernel_compile_cases_have_unique_names():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.costly
@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("case", "target"),
    [pytest.param(case, to, id=f"{case.name}, {to}") for case in CASES for to in case.targets],
)
def test_every_kernel_compiles_within_the_register_and_shared_memory_limits(case, target):
    created = check_kernel(case, target)
    assert 0 < created.registers <= (512 if target.startswith("gfx") else 255)
