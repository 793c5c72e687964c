"""Occupancy of compiled kernels, and counts of bytes and products in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from dovetail_devkit.triton.compiled_kernels import SHARED_BYTES, CompiledKernel
from dovetail_devkit.triton.occupancy import LIMITS, occupancy

PROGRAM = """
import json, sys
import torch, triton
import triton.language as tl
from dovetail_devkit.triton.traffic import count_traffic

@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, REPEATS: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < n) + tl.load(y_ptr)
    for _ in range(REPEATS - 1):
        x += tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=(at < n) & (n > 0))

@triton.jit
def square(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x))

x, y, out = torch.ones(40), torch.ones(1), torch.empty(40)
found = []
for repeats in (1, 3):
    with count_traffic() as traffic:
        add[(3,)](x, y, out, 40, REPEATS=repeats, TILE=16)
    found.append(vars(traffic))
x, out = torch.ones(16, 16), torch.empty(16, 16)
with count_traffic() as traffic:
    for _ in range(2):
        square[(1,)](x, out, N=16)
found.append(vars(traffic))
add[(3,)](x, y, out, 40, REPEATS=1, TILE=16)
assert vars(traffic) == found[-1], "work after the block was counted"
print(json.dumps(found))
"""


@pytest.mark.costly
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_bytes_and_flops_are_counted(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    once, thrice, squared = json.loads(done.stdout)
    # 40 numbers read and 40 written; three programs read the one number of `y`.
    assert once == {"moved_bytes": 324, "requested_bytes": 332, "flops": 0, "launches": 1}
    assert thrice == once | {"requested_bytes": 332 + 2 * 160}
    assert squared == {
        "moved_bytes": 4096,
        "requested_bytes": 4096,
        "flops": 2 * 2 * 16**3,
        "launches": 2,
    }


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared_bytes", "warps"),
    [
        ("sm_80", 4, 32, 0, 64),
        ("sm_90", 4, 128, 0, 16),  # 4,096 registers per warp
        ("sm_90", 4, 129, 0, 12),  # rounded up to 136 registers
        ("sm_90", 8, 32, 100 << 10, 16),  # two blocks of 101 KiB
        ("sm_90", 4, 32, 227 << 10, 4),
        ("sm_120", 4, 32, 99 << 10, 4),
        ("sm_89", 1, 32, 0, 24),  # at most 24 blocks
        ("gfx942", 4, 128, 0, 16),
        ("gfx942", 4, 64, 33 << 10, 4),
        ("gfx942", 4, 513, 0, 0),
    ],
)
def test_occupancy_is_limited_by_registers_shared_memory_and_blocks(
    target, num_warps, registers, shared_bytes, warps
):
    values = {"num_warps": num_warps, "registers": registers, "shared_bytes": shared_bytes}
    assert occupancy(target, **values) == warps / LIMITS[target].max_warps
    kernel = CompiledKernel(name="f", target=target, spill_bytes=0, **values)
    assert kernel.occupancy == occupancy(target, **values)


def test_every_target_has_limits_and_can_run_a_block_with_the_maximum_shared_memory():
    assert LIMITS.keys() == SHARED_BYTES.keys()
    for target, maximum in SHARED_BYTES.items():
        assert occupancy(target, num_warps=4, registers=64, shared_bytes=maximum) > 0
