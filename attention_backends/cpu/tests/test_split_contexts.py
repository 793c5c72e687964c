"""Long contexts are split among threads.

The tests read the planned division of a call, which needs no keys and values, and measure no time.
test_cpu_attention.py shows that the split does not change the output.
"""

from __future__ import annotations

import ctypes

import pytest

import dovetail_cpu_kernels as native
from dovetail_attn_cpu import metadata
from dovetail_cpu_kernels.attention import (
    CACHE_BF16,
    CACHE_INT8,
    AttentionArgs,
    AttentionBatchSize,
    plan_attention,
)

pytestmark = pytest.mark.skipif(
    not native.status().available, reason=native.status().reason or "no library"
)


def plan_of(query_lens, seq_lens, heads, *, cache_kind=CACHE_BF16, window=0):
    """Return how the backend divides a step, given its workspace. heads: H, K, D."""
    num_runs = len(query_lens)
    starts = [sum(query_lens[:n]) for n in range(num_runs + 1)]
    kept = [
        (ctypes.c_int32 * len(starts))(*starts),
        (ctypes.c_int32 * num_runs)(*seq_lens),
        AttentionBatchSize(num_runs, starts[-1]),
    ]
    query_start, lens, batch = map(ctypes.addressof, kept)
    num_heads, num_kv_heads, head_size = heads
    return plan_attention(
        AttentionArgs(
            batch=batch,
            query_start=query_start,
            seq_lens=lens,
            workspace_floats=metadata.WORKSPACE_FLOATS,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=32,
            cache_kind=cache_kind,
            window=window,
            scale=1.0,
        )
    )


STEPS = {
    "one decode": ((1,), (8192,), (16, 8, 128)),
    "a decode at 128k": ((1,), (131072,), (32, 8, 128)),
    "a decode at a million": ((1,), (1 << 20,), (64, 8, 128)),
    "multi-query decode": ((1,), (32768,), (32, 1, 64)),
    "multi-query decode, large group": ((1,), (32768,), (71, 1, 64)),
    "verification of 2 tokens": ((2,), (32768,), (32, 2, 128)),
    "verification of 8 tokens": ((8,), (32768,), (32, 2, 128)),
    "verification of 8 tokens, multi-query": ((8,), (131072,), (48, 1, 128)),
    "a long and a short context": ((1, 8, 1), (65536, 4096, 300), (32, 4, 128)),
    "verification of many requests": ((8,) * 8, (16384,) * 8, (32, 8, 128)),
    "a short chunk of a long prompt": ((16,), (65536,), (24, 2, 128)),
}


@pytest.mark.parametrize("cache_kind", [CACHE_BF16, CACHE_INT8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_thread_has_work_in_steps_with_long_contexts(step, cache_kind):
    for num_threads in (2, 8, 64):
        native.set_num_threads(num_threads)
        work = plan_of(*step, cache_kind=cache_kind)
        assert work.longest_cost <= 1.4 * work.cost / num_threads, num_threads


def test_a_short_context_and_a_single_thread_are_not_split():
    native.set_num_threads(1)
    assert plan_of((1,), (32768,), (32, 1, 64)).num_items == 1
    native.set_num_threads(8)
    assert plan_of((1,), (60,), (16, 2, 64)).num_items == 1


def test_a_sliding_window_limits_the_context_that_is_split():
    native.set_num_threads(4)
    whole = plan_of((1,), (65536,), (16, 1, 128))
    assert plan_of((1,), (65536,), (16, 1, 128), window=8192).cost < whole.cost / 4


def test_a_small_workspace_is_filled_several_times(monkeypatch):
    monkeypatch.setattr(metadata, "WORKSPACE_FLOATS", 3 * 32 * 66)
    native.set_num_threads(4)
    assert plan_of((1,), (2048,), (32, 1, 64)).num_waves == 4
