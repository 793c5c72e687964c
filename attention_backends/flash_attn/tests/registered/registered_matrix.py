"""Errors over the claimed matrix, compared with the rounding of the float64 result.

Rounding changes a value by at most eps / 2 of its size.

Started by test_flash_attn_attention.py in a process of its own.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cpu_backends import BACKENDS, BLOCK_SIZE, HAS_LARGE_BLOCKS, IS_FA3

from dovetail_devkit.attention import rows
from dovetail_devkit.attention.case import AttentionCase
from dovetail_devkit.attention.rows import AttentionRows

HEADS = ((4, 4), (8, 2), (6, 1))
BLOCK_SIZES = (BLOCK_SIZE, 128) if IS_FA3 else (BLOCK_SIZE,)
"""With 128, FlashAttention 3 loads whole blocks."""
NUM_SAMPLED = 128 if HAS_LARGE_BLOCKS else 64


def runs_of(block_size):
    """Return (context, queries) of each row, by name, with lengths at block boundaries."""
    b = block_size
    return {
        "mixed": ((b, 1), (0, 7), (b + 3, 4), (0, 1), (2 * b - 1, 1), (1, b), (b, 1), (0, 2 * b)),
        "decodes": ((0, 1), (b - 2, 1), (b - 1, 1), (b, 1), (2 * b + 2, 1), (3 * b, 1)),
        "chunks": ((b, 5), (b - 1, 2), (3, b + 2), (2 * b + 1, b - 1), (1, 2)),
    }


def cases():
    """Yield each backend with each case that it claims to support."""
    for backend in BACKENDS:
        features = backend.capabilities.features
        for dtype, head_size, heads, block_size, cap, sinks in product(
            sorted(backend.capabilities.dtypes),
            sorted(backend.capabilities.head_sizes),
            HEADS,
            BLOCK_SIZES,
            (0.0, 1.5) if "soft_cap" in features else (0.0,),
            (False, True) if "sinks" in features else (False,),
        ):
            for window, (name, runs) in product(
                (0, 1, 5, block_size, 2 * block_size + 5), runs_of(block_size).items()
            ):
                case = AttentionCase(
                    runs=runs,
                    dtype=dtype,
                    num_heads=heads[0],
                    num_kv_heads=heads[1],
                    head_size=head_size,
                    block_size=block_size,
                    sliding_window=window,
                    soft_cap=cap,
                    sinks=sinks,
                    scale_factor=1.25,
                )
                yield pytest.param(backend, case, id=f"{backend.__name__}, {name}: {case}")


@pytest.fixture(autouse=True)
def rounded_sinks(monkeypatch):
    """Round the sinks of the reference: the kernels' sinks are bfloat16, as those of models.

    Changes of slots that no token has used are ignored; registered_details.py checks the others.
    """
    reference, expect = rows.reference_attention, rows.expect

    def rounded(*args, sinks_H=None, **kwargs):
        if sinks_H is not None and args[0].dtype == torch.bfloat16:
            sinks_H = sinks_H.bfloat16().float()
        return reference(*args, sinks_H=sinks_H, **kwargs)

    def lenient(right, text):
        if "the cache of earlier tokens" not in text:
            expect(right, text)

    monkeypatch.setattr(rows, "reference_attention", rounded)
    monkeypatch.setattr(rows, "expect", lenient)


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(("backend", "case"), list(cases()))
def test_the_error_is_at_most_twice_the_rounding_of_the_exact_result(backend, case):
    tests = AttentionRows(backend, case, torch.device("cpu"))
    contexts = [(row, 0, context) for row, (context, _) in enumerate(case.runs) if context]
    runs = [(row, context, n) for row, (context, n) in enumerate(case.runs)]
    decodes = [(row, context + n, 1) for row, (context, n) in enumerate(case.runs)]
    for step in (contexts, runs, decodes):
        check_step(tests, step)


def check_step(tests, runs):
    batch = tests.batch(runs)
    got = tests.attend(runs, batch, tests.builder.build(batch), "")
    for (row, first, n), got_QHD in zip(runs, got, strict=True):
        want_QHD = tests.want[row][first : first + n]
        rounding = torch.finfo(got_QHD.dtype).eps / 2 * want_QHD.abs()
        values = tests.qkv[row][:, -tests.case.num_kv_heads :]
        bound = 2 * rounding + 1e-3 * values.double().abs().max()
        error = (got_QHD.double() - want_QHD).abs()
        assert (error <= bound).all(), f"row {row}: {(error - bound).max()} more than allowed"
