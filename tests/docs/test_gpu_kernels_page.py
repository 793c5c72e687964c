"""docs/gpu_kernels.md lists every kernel and target."""

from importlib.util import find_spec

import pytest
from docs.gpu_kernels import PACKAGES, PAGE, cases_of, render, rows_of

from dovetail_devkit.triton.compiled_kernels import CompiledKernel

ADVICE = "run `python tests/docs/record_gpu_kernels.py`"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_page_lists_every_kernel():
    cases = [case for package in PACKAGES for case in cases_of(package)]
    due = [(case.name, target) for case in cases for target in case.targets]
    assert rows_of(PAGE.read_text("utf-8")) == due, ADVICE


def test_a_rendered_kernel_page_can_be_parsed():
    first = CompiledKernel(
        name="f: fp8, size 3", target="gfx942", registers=7, spill_bytes=0, shared_bytes=2048
    )
    text = render({"package": [first]}, "1.2")
    assert rows_of(text) == [("f: fp8, size 3", "gfx942")]
    assert "| f: fp8, size 3 | gfx942 | 7 | 0 | 2.0 |" in text
