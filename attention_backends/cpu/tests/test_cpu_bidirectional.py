"""Bidirectional attention of backend `cpu` at every instruction set level.

The tolerance is 2e-2 · max(1, |value|), as in the suite for bf16.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_cpu.backend import CPUAttentionBackend
from dovetail_devkit.attention.bidirectional import check_bidirectional
from dovetail_devkit.suites.attention import AttentionCase, reference_attention

CPU = torch.device("cpu")
LEVELS = native.usable_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=native.status().reason or "no library")
TOLERANCE = 2e-2
LAYER = AttentionLayerContext(
    layer_name="layers.3.attn",
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    scale=0.125,
    dtype=torch.bfloat16,
    device=CPU,
    bidirectional=True,
)


@pytest.fixture(params=LEVELS, ids=lambda level: native.LEVELS[level])
def level(request):
    assert native.library().dk_set_level(request.param) == request.param
    return request.param


def build(lengths, seq_lens=None):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    builder = CPUAttentionBackend.create_builder(
        AttentionGroupContext(
            spec=spec,
            device=CPU,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            bidirectional=True,
        )
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return builder.build(
        AttentionBatch(
            query_start_R1=starts,
            seq_lens_R=torch.tensor(seq_lens or lengths, dtype=torch.int32),
            block_table_RM=torch.zeros((len(lengths), 1), dtype=torch.int32),
            slot_mapping_T=torch.zeros(sum(lengths), dtype=torch.int64),
            query_lens=lengths,
            seq_lens=seq_lens or lengths,
        )
    )


def attend(context, qkv_TND, lengths):
    layer = CPUAttentionBackend.create_layer(context)
    kv_heads = context.num_kv_heads
    q, k, v = qkv_TND.split([context.num_heads, kv_heads, kv_heads], dim=1)
    out_THD = torch.full(q.shape, torch.nan).bfloat16()
    layer.forward(q, k, v, torch.empty(0), build(lengths), out_THD)
    parts = (x.split(lengths) for x in (q, k, v, out_THD))
    return list(zip(*parts, strict=True))


@pytest.mark.costly
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_kernel_passes_the_bidirectional_conformance_case(level, num_threads):
    native.set_num_threads(num_threads)
    case = AttentionCase(runs=(), dtype="bfloat16", head_size=16)
    check_bidirectional(CPUAttentionBackend, case, CPU)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_are_computed_correctly(level, seed):
    rng = random.Random(seed)
    native.set_num_threads(rng.choice([1, 2, 3]))
    num_kv_heads = rng.choice([1, 2, 3])
    context = replace(
        LAYER,
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 7, 13]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([16, 48, 64, 80, 256, 576]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 400)]),
        scale=rng.choice([0.05, 0.3]),
    )
    lengths = [rng.choice([0, 1, rng.randrange(1, 40), rng.randrange(1, 700)]) for _ in range(4)]
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), context.num_heads + 2 * num_kv_heads, context.head_size)
    qkv_TND = torch.randn(shape, generator=generator).bfloat16()
    for q, k, v, out in attend(context, qkv_TND, lengths):
        if not len(q):
            continue
        expected = reference_attention(
            q,
            k,
            v,
            scale=context.scale,
            sliding_window=context.sliding_window,
            bidirectional=True,
        )
        error = (out.double() - expected).abs() / expected.abs().clamp_min(1)
        assert float(error.nan_to_num(nan=torch.inf).max()) <= TOLERANCE


@pytest.mark.costly
def test_results_are_bitwise_equal_in_any_batch_and_with_any_number_of_threads(level):
    lengths = [600, 3, 129]
    qkv_TND = torch.randn(sum(lengths), 12, 64).bfloat16()
    for window in (0, 200):
        context = replace(LAYER, sliding_window=window)
        native.set_num_threads(1)
        parts = qkv_TND.split(lengths)
        alone = [attend(context, part, [len(part)])[0][-1] for part in parts]
        for num_threads in (1, 3):
            native.set_num_threads(num_threads)
            together = [out for *_, out in attend(context, qkv_TND, lengths)]
            assert all(map(torch.equal, together, alone)), (window, num_threads)


def test_values_outside_of_a_prompt_are_not_read():
    """The prompts before and after contain only NaN."""
    lengths = [5, 21, 5]
    qkv_TND = torch.randn(sum(lengths), 12, 64).bfloat16()
    expected = attend(LAYER, qkv_TND, lengths)[1][-1]
    qkv_TND[:5] = qkv_TND[26:] = torch.nan
    assert torch.equal(attend(LAYER, qkv_TND, lengths)[1][-1], expected)


def test_a_chunk_of_a_prompt_is_rejected():
    with pytest.raises(ContractError, match="needs whole prompts"):
        build([4, 5], [4, 9])


@pytest.mark.parametrize(
    "changes",
    [{"soft_cap": 2.0}, {"sinks": torch.zeros(8)}, {"alibi_slopes": torch.zeros(8)}],
    ids=lambda changes: next(iter(changes)),
)
def test_features_without_a_bidirectional_kernel_are_rejected(changes):
    with pytest.raises(ConfigError, match=r"layers\.3\.attn: .* no soft cap, sinks or ALiBi"):
        CPUAttentionBackend.create_layer(replace(LAYER, **changes))
