"""Attention over subnormal values does not depend on the floating-point mode of the host's threads.

The host may count such numbers as zero in its threads (torch.set_flush_denormal).
"""

import ctypes

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import attention

pytestmark = pytest.mark.skipif(not native.status().available, reason=native.status().reason)
T, H, K, D, SIZE = 300, 4, 2, 32, 16


@pytest.fixture
def level(level):
    native.set_num_threads(3)
    yield native.LEVELS[level]
    torch.set_flush_denormal(False)


def attend(q, k, v):
    """Return the outputs of one prompt with a cache of its own."""
    num_blocks, block = -(-T // SIZE), attention.attention_block_bytes(K, D, SIZE, 0)
    cache, out = torch.zeros(num_blocks * block + 64, dtype=torch.uint8), torch.zeros_like(q)
    start = torch.tensor([0, T], dtype=torch.int32)
    table, slots = torch.arange(num_blocks, dtype=torch.int32), torch.arange(T)
    batch = attention.AttentionBatchSize(1, T)
    args = attention.AttentionArgs(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        q_token_stride=H * D,
        k_token_stride=K * D,
        v_token_stride=K * D,
        out_token_stride=H * D,
        **{f"{name}_head_stride": D for name in ("q", "k", "v", "out")},
        cache=-(-cache.data_ptr() // 64) * 64,
        block_stride=block,
        batch=ctypes.addressof(batch),
        query_start=start.data_ptr(),
        seq_lens=start[1:].data_ptr(),
        block_table=table.data_ptr(),
        slot_mapping=slots.data_ptr(),
        block_table_stride=num_blocks,
        num_heads=H,
        num_kv_heads=K,
        head_size=D,
        block_size=SIZE,
        cache_kind=attention.CACHE_BF16,
        scale=0.1,
    )
    attention.attention_operation()(ctypes.addressof(args))
    return out.view(torch.int16)


def test_the_floating_point_mode_of_the_host_does_not_change_attention(level):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, heads, D, generator=generator).bfloat16() for heads in (H, K, K))
    v = (v.float() * 1e-38).bfloat16()
    expected = attend(q, k, v)
    torch.set_flush_denormal(True)
    assert torch.equal(attend(q, k, v), expected)
    if level in ("portable", "avx2"):
        assert expected[T // 2 :].count_nonzero()
