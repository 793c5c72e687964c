"""The `cpu` backend: the conformance suite at every instruction set level, and additional cases.

The tolerance is 2e-2 · max(1, |value|), as in the suite for bf16. The same tolerance applies to an
int8 cache, compared with the reference over keys and values that are rounded as in the cache: to
1/127 of the maximum per token and head.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail.errors import ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES
from dovetail_attn_cpu import metadata
from dovetail_attn_cpu.backend import CPUAttentionBackend
from dovetail_devkit.suites.attention import (
    AttentionCase,
    check_attention,
    check_case,
    reference_attention,
)

CPU = torch.device("cpu")
LEVELS = native.usable_levels()
needs_library = pytest.mark.skipif(not LEVELS, reason=native.status().reason or "no library")
TOLERANCE = 2e-2


@pytest.fixture(params=LEVELS, ids=lambda level: native.LEVELS[level])
def level(request):
    assert native.library().dk_set_level(request.param) == request.param
    return request.param


class Rows:
    """Random requests that share one cache and compute steps of any size.

    Stores results by request.
    """

    def __init__(self, lengths, *, seed=0, padding=0, **shape):
        self.case = AttentionCase(runs=(), **{"dtype": "bfloat16", "block_size": 32} | shape)
        case, generator = self.case, torch.Generator().manual_seed(seed)
        self.cache_dtype = torch.bfloat16
        num_values = 0 if case.value_size else case.num_kv_heads
        self.kv = (case.num_heads, case.num_kv_heads, num_values)
        self.qkv = [
            torch.randn((n, sum(self.kv), case.head_size), generator=generator) for n in lengths
        ]
        self.qkv = [x.bfloat16() for x in self.qkv]
        size = case.value_size or case.head_size
        self.out = [torch.zeros_like(x[:, : case.num_heads, :size]) for x in self.qkv]
        self.done = [0] * len(lengths)
        self.sinks = 2 * torch.randn(case.num_heads, generator=generator) if case.sinks else None
        counts = [-(-n // case.block_size) for n in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.padding = padding

    def with_cache(self, dtype):
        """Use a cache with gaps of `padding` elements between blocks, filled with NaN."""
        spec = replace(self.case.spec, dtype=dtype, scale_bytes=SCALE_BYTES.get(dtype, 0))
        num_blocks = sum(map(len, self.blocks)) + 1
        shape = CPUAttentionBackend.kv_cache_shape(num_blocks, spec)
        self.spec, self.cache_dtype = spec, getattr(torch, dtype)
        memory = torch.empty((num_blocks, shape[1] + self.padding), dtype=self.cache_dtype)
        memory.view(torch.uint8).fill_(0xFF)  # 255 is NaN in bf16 and in the scales of int8
        self.cache = memory[:, : shape[1]]
        self.builder = CPUAttentionBackend.create_builder(group_context(spec, len(self.qkv)))
        context = layer_context(self.case, sinks=self.sinks)
        self.layer = CPUAttentionBackend.create_layer(context)
        return self

    def step(self, counts):
        """Compute the given number of tokens of each request, all in one call."""
        runs = [(row, self.done[row], n) for row, n in enumerate(counts) if n]
        tokens = torch.cat([self.qkv[row][first : first + n] for row, first, n in runs])
        q, k, v = self.parts(tokens)
        out = torch.full((*q.shape[:2], v.shape[2]), torch.nan).bfloat16()
        self.layer.forward(q, k, v, self.cache, self.builder.build(self.batch(runs)), out)
        for (row, first, n), part in zip(runs, out.split([n for *_, n in runs]), strict=True):
            self.out[row][first : first + n] = part
            self.done[row] += n
        return self

    def parts(self, qkv):
        q, k, v = qkv.split(self.kv, dim=1)
        return q, k, k[..., : self.case.value_size] if self.case.value_size else v

    def batch(self, runs):
        size = self.case.block_size
        width = max(map(len, self.blocks))
        table = [self.blocks[row] + [0] * (width - len(self.blocks[row])) for row, *_ in runs]
        slots = [
            self.blocks[row][p // size] * size + p % size
            for row, first, n in runs
            for p in range(first, first + n)
        ]
        query_lens = [n for *_, n in runs]
        seq_lens = [first + n for _, first, n in runs]
        return AttentionBatch(
            query_start_R1=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int(),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_RM=torch.tensor(table, dtype=torch.int32),
            slot_mapping_T=torch.tensor(slots),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def worst_error(self):
        """Return the maximum error against the float64 reference, relative for values above 1."""
        case, worst = self.case, 0.0
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = self.parts(qkv)
            if self.cache_dtype == torch.int8:
                k, v = rounded(k), rounded(v)
                v = k[..., : case.value_size] if case.value_size else v
            expected = reference_attention(
                q,
                k,
                v,
                scale=case.scale,
                sliding_window=case.sliding_window,
                soft_cap=case.soft_cap,
                sinks_H=self.sinks,
            )
            error = (out.double() - expected).abs() / expected.abs().clamp_min(1)
            worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
        return worst


def rounded(x_TKD):
    """Round x to int8 with a scale per token and head, and return it in float32."""
    inverse = 127 / x_TKD.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (x_TKD.float() * inverse).round() / inverse


def group_context(spec, num_rows=16):
    return AttentionGroupContext(
        spec=spec,
        device=CPU,
        max_num_seqs=num_rows,
        max_num_batched_tokens=4096,
        max_model_len=4096,
    )


def layer_context(case, **changes):
    values = {
        "layer_name": "layers.3.attn",
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_size": case.head_size,
        "scale": case.scale,
        "dtype": torch.bfloat16,
        "device": CPU,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "value_size": case.value_size,
    }
    return AttentionLayerContext(**(values | changes))


@pytest.mark.costly
@needs_library
@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_backend_passes_the_conformance_suite(level, num_threads):
    native.set_num_threads(num_threads)
    check_attention(CPUAttentionBackend, CPU)


@pytest.mark.costly
@needs_library
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_are_computed_correctly(level, seed):
    rng = random.Random(seed)
    native.set_num_threads(rng.choice([1, 2, 3]))
    num_kv_heads = rng.choice([1, 2, 3, 5])
    runs = [(rng.randrange(400), rng.choice([1, 1, rng.randrange(1, 70)])) for _ in range(5)]
    case = AttentionCase(
        runs=((0, 1), *runs),
        dtype="bfloat16",
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 7, 13]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([64, 80, 96, 128, 256]),
        block_size=rng.choice([16, 32, 48, 64]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 500)]),
        soft_cap=rng.choice([0.0, 0.0, 0.7]),
        sinks=rng.choice([False, True]),
        seed=seed,
    )
    check_case(CPUAttentionBackend, case, CPU)


def cuts_of(lengths, seed):
    """Yield the number of tokens of each request in each step: random chunks up to its length."""
    rng, left = random.Random(seed), list(lengths)
    while any(left):
        counts = [min(n, rng.choice([0, 1, 1, 7, 40, 300])) for n in left]
        left = [n - count for n, count in zip(left, counts, strict=True)]
        if any(counts):
            yield counts


SHAPES = [
    {"num_heads": 16, "num_kv_heads": 8, "head_size": 64},
    {"num_heads": 9, "num_kv_heads": 9, "head_size": 48},
    {"num_heads": 6, "num_kv_heads": 2, "head_size": 80, "sliding_window": 90},
    {"num_heads": 14, "num_kv_heads": 1, "head_size": 32, "soft_cap": 1.5},
    {"num_heads": 5, "num_kv_heads": 1, "head_size": 48, "value_size": 30},
    {"num_heads": 8, "num_kv_heads": 1, "head_size": 64, "sliding_window": 128, "sinks": True},
]
SHAPE_NAMES = ["grouped", "not grouped", "window", "capped", "latent", "sinks"]


@pytest.mark.costly
@needs_library
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_the_attention_output_of_a_request_is_bitwise_equal_in_any_batch(level, shape, dtype):
    lengths = (530, 3, 270)
    native.set_num_threads(1)
    whole = Rows(lengths, **shape).with_cache(dtype).step(lengths)
    assert whole.worst_error() < TOLERANCE
    for seed, (num_threads, block_size) in enumerate([(1, 16), (2, 32), (3, 48)]):
        native.set_num_threads(num_threads)
        rows = Rows(lengths, block_size=block_size, padding=64 * seed, **shape).with_cache(dtype)
        for counts in cuts_of(lengths, seed):
            rows.step(counts)
        for row in range(len(lengths)):
            assert torch.equal(rows.out[row], whole.out[row]), (num_threads, block_size, row)


@pytest.mark.costly
@needs_library
def test_the_number_of_threads_does_not_change_attention_over_long_contexts(level):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
    outs = []
    for num_threads in (1, 2, 4):
        native.set_num_threads(num_threads)
        rows = Rows((1300, 5), **shape).with_cache("bfloat16").step((1298, 4))
        outs.append(rows.step((1, 0)).step((1, 1)).out)
        assert rows.worst_error() < TOLERANCE
    for out in outs[1:]:
        assert all(map(torch.equal, out, outs[0]))


SPLIT_SHAPES = {
    "multi-query": ({"num_heads": 26, "num_kv_heads": 1, "head_size": 16}, (1, 3)),
    "latent": ({"num_heads": 40, "num_kv_heads": 1, "head_size": 80, "value_size": 64}, (1, 3)),
    "draft": ({"num_heads": 8, "num_kv_heads": 2, "head_size": 32}, (2, 8)),
    "window": (
        {"num_heads": 5, "num_kv_heads": 1, "head_size": 48, "sliding_window": 600, "soft_cap": 2},
        (1, 7),
    ),
    "sinks": ({"num_heads": 8, "num_kv_heads": 2, "head_size": 32, "sinks": True}, (1, 7)),
}
OWN_LEVELS = [
    n
    for n in LEVELS
    if native.LEVELS[n] in ("portable", "avx2", "avx512", "avx512_bf16", "avx512_amx")
]


@pytest.mark.costly
@needs_library
@pytest.mark.sampled(6)
@pytest.mark.parametrize("level", OWN_LEVELS, ids=lambda n: native.LEVELS[n], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("shape", "counts"), SPLIT_SHAPES.values(), ids=SPLIT_SHAPES)
def test_the_split_of_a_context_does_not_change_the_output(
    level, shape, counts, dtype, monkeypatch
):
    """Uses one thread, then a workspace of three chunks of eight tokens, then the default."""
    length, outs = 790, []
    small = 3 * 8 * shape["num_heads"] * (shape["head_size"] + 2)
    for num_threads, num_floats in ((1, 0), (3, small), (4, metadata.WORKSPACE_FLOATS)):
        native.set_num_threads(num_threads)
        monkeypatch.setattr(metadata, "WORKSPACE_FLOATS", num_floats)
        rows = Rows((length + sum(counts), 3), **shape).with_cache(dtype).step((length, 2))
        for count in counts:
            rows.step((count, 0))
        outs.append(rows.step((0, 1)).out)
    assert rows.worst_error() < TOLERANCE
    for out in outs[1:]:
        assert all(map(torch.equal, out, outs[0]))


@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_attention_sink_reduces_the_weights_of_the_tokens(level, dtype):
    """The values of the sinks are loaded after the layer is created; one sink is -infinity."""
    rows = Rows((300, 9), num_heads=6, num_kv_heads=2, sinks=True).with_cache(dtype)
    rows.sinks.copy_(torch.tensor([-torch.inf, -3.0, 0.0, 1.0, 4.0, 90.0]))
    rows.step((290, 8)).step((10, 1))
    assert rows.worst_error() < TOLERANCE
    assert rows.out[0][:, 5].abs().max() < 1e-30


@needs_library
def test_a_recorded_attention_call_reads_the_current_values_of_the_sinks():
    rows = Rows((40,), num_heads=4, num_kv_heads=2, sinks=True).with_cache("bfloat16").step((39,))
    q, k, v = rows.parts(rows.qkv[0][39:])
    out = torch.zeros_like(q)
    metadata = rows.builder.build(rows.batch([(0, 39, 1)]))
    rows.layer.forward(q, k, v, rows.cache, metadata, out)
    first = out.clone()
    call = (ctypes.c_void_p * 2)(
        ctypes.cast(native.library().dk_attention, ctypes.c_void_p).value,
        ctypes.addressof(rows.layer.args),
    )
    native.library().dk_replay(ctypes.addressof(call), 1)
    assert torch.equal(out, first)
    rows.sinks.fill_(90.0)
    native.library().dk_replay(ctypes.addressof(call), 1)
    assert out.abs().max() < 1e-30


@needs_library
@pytest.mark.parametrize("group", [24, 25, 32, 71])
def test_a_decode_writes_its_token_for_any_number_of_query_heads_per_key_value_head(level, group):
    rows = Rows((20,), num_heads=group, num_kv_heads=1, head_size=16).with_cache("bfloat16")
    rows.step((16,))
    for _ in range(4):
        rows.step((1,))
    assert rows.worst_error() < TOLERANCE


@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_nan_in_one_request_does_not_affect_other_requests(level, dtype):
    rows = Rows((40, 40), num_heads=4, num_kv_heads=2).with_cache(dtype)
    rows.qkv[0][20] = torch.nan
    rows.step((39, 39)).step((1, 1))
    assert rows.out[0][20:].isnan().all()
    assert rows.out[1].isfinite().all()


@needs_library
def test_a_cached_token_of_zeros_has_a_scale_of_zero():
    rows = Rows((9,), num_heads=4, num_kv_heads=2).with_cache("int8")
    rows.qkv[0].zero_()
    assert torch.equal(rows.step((9,)).out[0], torch.zeros(9, 4, 64).bfloat16())


@needs_library
def test_a_recorded_attention_call_reads_the_inputs_of_the_next_step():
    """The struct, the metadata and the tensors keep their addresses. Only their contents change."""
    rows = Rows((60, 60), num_heads=4, num_kv_heads=2).with_cache("bfloat16").step((50, 20))
    expected = Rows((60, 60), num_heads=4, num_kv_heads=2).with_cache("bfloat16").step((50, 20))
    expected.step((1, 1)).step((1, 1))
    qkv = torch.stack([rows.qkv[0][50], rows.qkv[1][20]])
    out = torch.zeros(2, 4, 64).bfloat16()
    metadata = rows.builder.build(rows.batch([(0, 50, 1), (1, 20, 1)]))
    rows.layer.forward(*qkv.split(rows.kv, dim=1), rows.cache, metadata, out)
    call = (ctypes.c_void_p * 2)(
        ctypes.cast(native.library().dk_attention, ctypes.c_void_p).value,
        ctypes.addressof(rows.layer.args),
    )
    qkv.copy_(torch.stack([rows.qkv[0][51], rows.qkv[1][21]]))
    rows.builder.build(rows.batch([(0, 51, 1), (1, 21, 1)]))
    native.library().dk_replay(ctypes.addressof(call), 1)
    assert torch.equal(out, torch.stack([expected.out[0][51], expected.out[1][21]]))


@needs_library
def test_a_request_without_scheduled_tokens_is_skipped():
    rows = Rows((20, 20), num_heads=4, num_kv_heads=2).with_cache("bfloat16").step((20, 20))
    batch = rows.batch([(0, 20, 0), (1, 20, 0)])
    empty = torch.zeros(0, 8, 64).bfloat16()
    q, k, v = empty.split(rows.kv, dim=1)
    rows.layer.forward(q, k, v, rows.cache, rows.builder.build(batch), q.clone())


@needs_library
def test_a_layer_rejects_the_metadata_of_another_kv_cache_group():
    rows = Rows((4,), num_heads=4, num_kv_heads=2).with_cache("bfloat16")
    rows.layer = CPUAttentionBackend.create_layer(layer_context(rows.case, sliding_window=4))
    with pytest.raises(ContractError, match=r"layers\.3\.attn has \(window"):
        rows.step((4,))
