"""Compares errors in supported cases with the rounding error of the float64 result.

Rounding changes a value by at most eps / 2 of its size.

test_flash_attn_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_backends import BACKENDS, BLOCK_SIZE, HAS_LARGE_BLOCKS, IS_FA3

from dovetail_devkit.attention import rows
from dovetail_devkit.attention.case import LARGEST, LIMITS, AttentionCase
from dovetail_devkit.attention.rows import AttentionRows
from dovetail_devkit.combinations import third_of

FP8 = "fp8_e4m3"
HEADS = ((4, 4), (8, 2), (6, 1))
BLOCK_SIZES = (BLOCK_SIZE, 128) if IS_FA3 else (BLOCK_SIZE,)
"""With 128, FlashAttention 3 loads whole blocks."""
CROSSED_SIZES = (32, 96, 128, 256)
"""Head sizes that are combined with all other parameters. The others have fewer windows."""
WINDOWS = ((0, 0), (0, 1), (0, 5), (1, 0), (2, 5))
"""Numbers of blocks and of further tokens."""
SOME_WINDOWS = (WINDOWS[0], WINDOWS[2])
RUN_NAMES = ("mixed", "decodes", "chunks")
NUM_SAMPLED = 128 if HAS_LARGE_BLOCKS else 64


def runs_of(block_size):
    """Return steps by name: context and query tokens of each request, near block boundaries."""
    b = block_size
    return {
        "mixed": ((b, 1), (0, 7), (b + 3, 4), (0, 1), (2 * b - 1, 1), (1, b), (b, 1), (0, 2 * b)),
        "decodes": ((0, 1), (b - 2, 1), (b - 1, 1), (b, 1), (2 * b + 2, 1), (3 * b, 1)),
        "chunks": ((b, 5), (b - 1, 2), (3, b + 2), (2 * b + 1, b - 1), (1, 2)),
    }


def cases():
    """Yield each backend with a third of the combinations that it claims to support."""
    for backend in BACKENDS:
        features = backend.capabilities.features
        for dtype, head_size, heads, block_size, cap, sinks, (blocks, extra), name in third_of(
            sorted(backend.capabilities.dtypes),
            sorted(backend.capabilities.head_sizes),
            HEADS,
            BLOCK_SIZES,
            (0.0, 1.5) if "soft_cap" in features else (0.0,),
            (False, True) if "sinks" in features else (False,),
            WINDOWS,
            RUN_NAMES,
        ):
            is_small = not (cap or sinks) and (blocks, extra) in SOME_WINDOWS
            if head_size not in CROSSED_SIZES and not is_small:
                continue
            case = AttentionCase(
                runs=runs_of(block_size)[name],
                dtype=dtype,
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_size=head_size,
                block_size=block_size,
                sliding_window=blocks * block_size + extra,
                soft_cap=cap,
                sinks=sinks,
                scale_factor=1.25,
            )
            yield pytest.param(backend, case, id=f"{backend.__name__}, {name}: {case}")


@pytest.fixture(autouse=True)
def rounded_sinks(monkeypatch):
    """Round the sinks of the reference to bfloat16, as kernels and models do."""
    reference = rows.reference_attention

    def rounded(*args, sinks_H=None, **kwargs):
        if sinks_H is not None and args[0].dtype == torch.bfloat16:
            sinks_H = sinks_H.bfloat16().float()
        return reference(*args, sinks_H=sinks_H, **kwargs)

    monkeypatch.setattr(rows, "reference_attention", rounded)


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(("backend", "case"), list(cases()))
def test_the_error_is_at_most_twice_the_rounding_error_of_the_exact_result(backend, case):
    check_case(backend, case)


def check_case(backend, case):
    tests = AttentionRows(backend, case, torch.device("cpu"))
    contexts = [(row, 0, context) for row, (context, _) in enumerate(case.runs) if context]
    runs = [(row, context, n) for row, (context, n) in enumerate(case.runs)]
    decodes = [(row, context + n, 1) for row, (context, n) in enumerate(case.runs)]
    for step in (contexts, runs, decodes):
        check_step(tests, step)


def fp8_cases():
    """Yield the cases with an fp8 cache, for bfloat16 models without sinks."""
    for item in cases():
        backend, case = item.values
        is_usable = case.dtype == "bfloat16" and not case.sinks
        if is_usable and FP8 in backend.capabilities.kv_cache_dtypes:
            scaled = replace(case, cache_dtype=FP8, has_layer_scales=True)
            yield pytest.param(backend, scaled, id=f"{backend.__name__}, {scaled}")


@pytest.fixture
def rounded_inputs(monkeypatch):
    """Round queries, keys and values of the reference to fp8, as the cache and the kernels do."""
    reference = rows.reference_attention

    def rounded(q, k, v, **kwargs):
        scales = (1.0, *(limit / LARGEST[FP8] for limit in LIMITS))
        inputs = zip((q, k, v), scales, strict=True)
        return reference(*(rounded_to_fp8(x, scale) for x, scale in inputs), **kwargs)

    monkeypatch.setattr(rows, "reference_attention", rounded)


def rounded_to_fp8(x, scale):
    quotients = (x.float() / torch.tensor(scale)).clamp(-LARGEST[FP8], LARGEST[FP8])
    return quotients.to(torch.float8_e4m3fn).double() * torch.tensor(scale).double()


@pytest.mark.skipif(not IS_FA3, reason="the provider has no fp8")
@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(("backend", "case"), list(fp8_cases()))
def test_the_error_with_an_fp8_cache_is_within_the_same_limit(rounded_inputs, backend, case):
    check_case(backend, case)


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
