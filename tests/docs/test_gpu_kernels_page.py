"""docs/gpu_kernels.md lists every kernel and target."""

from importlib.util import find_spec

import pytest
from docs.gpu_kernels import (
    EXCEPTIONS,
    MAX_MOVED,
    MAX_PRODUCTS,
    PACKAGES,
    PAGE,
    cases_of,
    count_traffic,
    render,
    rows_of,
    traffic_row,
    traffic_rows_of,
)

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
    counted = {"name": "call", "launches": 1, "needed_bytes": 2048, "moved_bytes": 2100}
    counted |= {"requested_bytes": 4096, "needed_flops": 100, "flops": 105}
    text = render({"package": [first]}, [counted], "1.2")
    assert rows_of(text) == [("f: fp8, size 3", "gfx942")]
    assert "| f: fp8, size 3 | gfx942 | 7 | 0 | 2.0 | 100% |" in text
    assert "| call | 1 | 2 | 1.03 | 2.00 | 1.05 |" in text
    assert traffic_rows_of(text) == {"call": (1.03, 1.05)}


def test_the_recorded_work_of_every_call_is_within_its_limits():
    rows = traffic_rows_of(PAGE.read_text("utf-8"))
    assert len(rows) >= 10
    assert set(EXCEPTIONS) <= set(rows)
    assert not {name: row for name, row in rows.items() if row[0] > EXCEPTIONS.get(name, MAX_MOVED)}
    assert not {name: row for name, row in rows.items() if row[1] > MAX_PRODUCTS}
    assert any(flops for _, flops in rows.values())


@pytest.mark.costly
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_recorded_work_matches_the_kernels():
    text = PAGE.read_text("utf-8")
    for counted in count_traffic("rms_norm", "best_tokens"):
        assert traffic_row(counted) in text, ADVICE
