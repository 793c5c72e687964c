"""Compares errors in supported cases with the rounding error of the float64 result.

Rounding changes a value by at most eps / 2 of its size.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import reference_kernels
import torch
from cpu_backends import BACKENDS

from dovetail_attn_flashinfer import wrappers
from dovetail_attn_flashinfer.cache_dtype import FP8_TYPES
from dovetail_devkit.attention import rows
from dovetail_devkit.attention.case import LARGEST, LIMITS, AttentionCase
from dovetail_devkit.attention.rows import AttentionRows
from dovetail_devkit.combinations import third_of

B = 16
RUNS = {
    "mixed": ((B, 1), (0, 7), (B + 3, 4), (0, 1), (2 * B - 1, 1), (1, B), (B, 1), (0, 2 * B)),
    "decodes first": ((2 * B, 1), (B - 1, 1), (B, 1), (5 * B, 1), (0, B), (B, B + 1), (2 * B, 2)),
    "decodes": ((0, 1), (B - 2, 1), (B - 1, 1), (B, 1), (2 * B + 2, 1), (9 * B, 1)),
    "chunks": ((B, 5), (B - 1, 2), (3, B + 2), (2 * B + 1, B - 1), (1, 2), (0, 3 * B)),
}
HEADS = ((4, 4), (8, 2), (6, 1))
WINDOWS = (0, 1, 5, B, 2 * B + 5)
SOME_WINDOWS = (0, 5)
"""The windows of cases with other heads than 8 of 128 features with 2 key-value heads."""
MATRIX = [
    values
    for values in third_of(
        BACKENDS,
        ("float16", "bfloat16"),
        (64, 128, 256),
        HEADS,
        WINDOWS,
        (0.0, 1.5),
        (False, True),
        tuple(RUNS),
    )
    if values[2:4] == (128, (8, 2)) or values[4] in SOME_WINDOWS
]
NUM_SAMPLED = 24


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Discard the loaded sink kernels, so that each case may have a different head size."""
    monkeypatch.setattr(wrappers, "_sink_kernels", {})
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
    check_case(backend, case)


@pytest.fixture
def rounded_inputs(monkeypatch, case):
    """Round keys and values of the reference to fp8, and scaled queries to the model's dtype."""
    reference = rows.reference_attention
    scales = torch.tensor([limit / LARGEST[case.cache_dtype] for limit in LIMITS])

    def rounded(q, k, v, **kwargs):
        q = (q * scales[0]).double() / scales[0].double()
        pairs = zip((k, v), scales, strict=True)
        return reference(q, *(through_fp8(x, s, case.cache_dtype) for x, s in pairs), **kwargs)

    monkeypatch.setattr(rows, "reference_attention", rounded)


def through_fp8(x, scale, dtype):
    quotients = (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return quotients.to(FP8_TYPES[dtype]).double() * scale.double()


def fp8_cases():
    for values, dtype in product(MATRIX, FP8_TYPES):
        backend, case = named(values).values
        scaled = replace(case, cache_dtype=dtype, has_layer_scales=True)
        yield pytest.param(backend, scaled, id=f"{backend.__name__}, {scaled}")


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(("backend", "case"), list(fp8_cases()))
def test_the_error_with_an_fp8_cache_is_within_the_same_limit(rounded_inputs, backend, case):
    check_case(backend, case)


def check_case(backend, case):
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
