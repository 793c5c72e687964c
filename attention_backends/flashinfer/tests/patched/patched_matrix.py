"""Errors over the claimed matrix, compared with the rounding of the float64 result.

Rounding changes a value by at most eps / 2 of its size.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from itertools import product

import pytest
import reference_kernels
import torch
from cpu_backends import BACKENDS

from dovetail_attn_flashinfer import wrappers
from dovetail_devkit.attention.case import AttentionCase
from dovetail_devkit.attention.rows import AttentionRows

B = 16
RUNS = {
    "mixed": ((B, 1), (0, 7), (B + 3, 4), (0, 1), (2 * B - 1, 1), (1, B), (B, 1), (0, 2 * B)),
    "decodes first": ((2 * B, 1), (B - 1, 1), (B, 1), (5 * B, 1), (0, B), (B, B + 1), (2 * B, 2)),
    "decodes": ((0, 1), (B - 2, 1), (B - 1, 1), (B, 1), (2 * B + 2, 1), (9 * B, 1)),
    "chunks": ((B, 5), (B - 1, 2), (3, B + 2), (2 * B + 1, B - 1), (1, 2), (0, 3 * B)),
}
HEADS = ((4, 4), (8, 2), (6, 1))
WINDOWS = (0, 1, 5, B, 2 * B + 5)
MATRIX = list(
    product(
        BACKENDS,
        ("float16", "bfloat16"),
        (64, 128, 256),
        HEADS,
        WINDOWS,
        (0.0, 1.5),
        (False, True),
        RUNS,
    )
)
NUM_SAMPLED = 48


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Discard the loaded sink kernels, so that each case may have a different head size."""
    monkeypatch.setattr(wrappers, "_sink_head_sizes", {})
    reference_kernels.loaded_variants.clear()


def named(values):
    backend, dtype, head_size, (num_heads, num_kv_heads), window, cap, sinks, runs = values
    case = AttentionCase(
        runs=RUNS[runs],
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=B,
        sliding_window=window,
        soft_cap=cap,
        sinks=sinks,
        scale_factor=1.25,
    )
    return pytest.param(backend, case, id=f"{backend.__name__}, {runs}: {case}")


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(("backend", "case"), [named(values) for values in MATRIX])
def test_the_error_is_at_most_twice_the_rounding_error_of_the_exact_result(backend, case):
    tests = AttentionRows(backend, case, torch.device("cpu"))
    contexts = [(row, 0, context) for row, (context, _) in enumerate(case.runs) if context]
    runs = [(row, context, n) for row, (context, n) in enumerate(case.runs)]
    decodes = [(row, context + n, 1) for row, (context, n) in enumerate(case.runs)]
    for step in (contexts, runs, decodes):
        if step:
            check_step(tests, step)


def check_step(tests, runs):
    batch = tests.batch(runs)
    actual = tests.attend(runs, batch, tests.builder.build(batch), "")
    for (row, first, n), got_QHD in zip(runs, actual, strict=True):
        want_QHD = tests.want[row][first : first + n]
        rounding = torch.finfo(got_QHD.dtype).eps / 2 * want_QHD.abs()
        values = tests.qkv[row][:, -tests.case.num_kv_heads :]
        bound = 2 * rounding + 1e-3 * values.double().abs().max()
        error = (got_QHD.double() - want_QHD).abs()
        assert (error <= bound).all(), f"row {row}: {(error - bound).max()} more than allowed"
