"""docs/step.md lists the functions that a request passes through and the number of hops."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "step.md").read_text("utf-8")
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", PAGE, re.MULTILINE)
MAX_DIFFERENCE = 10
"""Largest allowed difference between the numbers of hops on the page and in the code."""


@pytest.fixture(scope="module")
def trace():
    pytest.importorskip("dovetail_demo_model")
    program = "import json, step_hops; print(json.dumps(list(step_hops.follow_request())))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT / "bench", capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_each_function_on_the_step_page_is_called(trace):
    called = {(callee, function) for _, callee, function in trace}
    assert len(ROWS) >= 30
    native = {"dovetail_attn_cpu/metadata.py"}  # not selected on a machine without a compiler
    missing = [row for row in ROWS if row not in called and row[0] not in native]
    assert not missing


def test_the_number_of_hops_on_the_step_page_is_up_to_date(trace):
    (stated,) = re.findall(r"^The request makes (\d+) hops", PAGE, re.MULTILINE)
    advice = "run `python bench/step_hops.py --write`"
    assert abs(int(stated) - len(trace)) <= MAX_DIFFERENCE, advice
