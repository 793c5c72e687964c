"""The conformance suite, and cases that it does not cover: splits, lists, fp8, NaN.

Runs in Triton's interpreter on the host, started by test_triton_attention.py, and unchanged on a
GPU: `pytest -o python_files='interpreted_*.py' attention_backends/triton/tests/interpreted`. All
float32 cases of the suite are run. The interpreter multiplies in float32 for other dtypes, too, so
only their cases with special loads or stores are run; `-m ""` runs all cases.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
    RotaryArgs,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_triton.backend import FP8, TritonAttentionBackend
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.rotary import far_apart, rotary_table, turned
from dovetail_devkit.suites.attention import (
    AttentionCase,
    check_case,
    check_refusals,
    reference_attention,
    standard_cases,
)
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_ops_triton.availability import INTERPRETED
from dovetail_torch.runner.warm_up import STEPS

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK_SIZE = 16
FP8_OF_TORCH = {FP8: torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Rows:
    """Rows of random tokens with separate blocks, in a cache that is otherwise filled with NaN."""

    def __init__(self, lengths, *, cache_dtype="", window=0, padding=0, options=None, **changes):
        """kv_scales: the scales of the layer, so that tokens have no scales."""
        self.kv_scales = changes.get("kv_scales")
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64} | changes
        self.heads = (shape["num_heads"], shape["num_kv_heads"], shape["num_kv_heads"])
        self.dtype = shape.pop("dtype", torch.float32)
        name = cache_dtype or str(self.dtype).removeprefix("torch.")
        self.spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=shape["num_kv_heads"],
            head_size=shape["head_size"],
            dtype=name,
            sliding_window=window,
            scale_bytes=SCALE_BYTES.get(name, 0) if self.kv_scales is None else 0,
        )
        generator = torch.Generator().manual_seed(len(lengths))
        size = (sum(self.heads), shape["head_size"])
        self.qkv = [
            torch.randn((n, *size), generator=generator).to(self.dtype).to(DEVICE) for n in lengths
        ]
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.done = [0] * len(lengths)
        self.cos_sin_PR = None  # the cosine-sine table of the layer's rotation
        self.cache = self._new_cache(sum(counts) + 1, padding)
        self.scale = shape["head_size"] ** -0.5
        self.builder = TritonAttentionBackend.create_builder(
            AttentionGroupContext(
                spec=self.spec,
                device=DEVICE,
                max_num_seqs=len(lengths),
                max_num_batched_tokens=sum(lengths),
                max_model_len=max(lengths),
                options=options or {},
            )
        )
        self.layer_context = AttentionLayerContext(
            layer_name="layers.3.attn",
            scale=self.scale,
            dtype=self.dtype,
            device=DEVICE,
            sliding_window=window,
            **shape,
        )
        self.layer = TritonAttentionBackend.create_layer(self.layer_context)

    def _new_cache(self, num_blocks, padding):
        """Return a cache in which all bytes are 255 (NaN), with `padding` bytes between blocks."""
        dtype = FP8_OF_TORCH.get(self.spec.dtype, self.dtype)
        shape = TritonAttentionBackend.kv_cache_shape(num_blocks, self.spec)
        used = self.spec.page_size_bytes
        pages = torch.full((num_blocks, used + padding), 255, dtype=torch.uint8, device=DEVICE)
        return pages[:, :used].view(dtype).unflatten(1, shape[1:])

    def step(self, counts, layer=None):
        """Run the next `counts` tokens of each row (0 to omit the row), and return the results."""
        runs = [(row, n) for row, n in enumerate(counts) if n]
        metadata = self.builder.build(self.batch(runs))
        return self.forward(runs, metadata, layer or self.layer)

    def forward(self, runs, metadata, layer):
        parts = [self.qkv[row][self.done[row] : self.done[row] + n] for row, n in runs]
        q, k, v = torch.cat(parts).split(self.heads, dim=1)
        out = torch.full(q.shape, torch.nan, dtype=self.dtype, device=DEVICE)
        rotary_args = ()
        if self.cos_sin_PR is not None:
            places = [place for row, n in runs for place in far_apart(self.done[row], n)]
            positions_T = torch.tensor(places, device=DEVICE)
            given = {"positions_T": positions_T, "cos_sin_PR": self.cos_sin_PR}
            rotary_args = (RotaryArgs(ops=FakeOps(), **given),)
        layer.forward(q, k, v, self.cache, metadata, out, *rotary_args)
        for row, n in runs:
            self.done[row] += n
        return out.split([n for _, n in runs])

    def batch(self, runs):
        seq_lens = [self.done[row] + n for row, n in runs]
        width = max(map(len, self.blocks))
        table = [self.blocks[row] + [0] * (width - len(self.blocks[row])) for row, _ in runs]
        slots = [
            self.blocks[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row, n in runs
            for position in range(self.done[row], self.done[row] + n)
        ]
        query_lens = [n for _, n in runs]
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return AttentionBatch(
            query_start_R1=starts.int().to(DEVICE),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            block_table_RM=torch.tensor(table, dtype=torch.int32, device=DEVICE),
            slot_mapping_T=torch.tensor(slots, device=DEVICE),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def kept(self, row):
        """Return the keys and values of a row in the cache, float64 [L, K, D] each."""
        num_kv_heads, head_size = self.spec.num_kv_heads, self.spec.head_size
        shape = (2, num_kv_heads, BLOCK_SIZE, head_size)
        if self.spec.scale_bytes:
            size = torch.Size(shape).numel()
            scales = self.cache[:, size:].view(torch.float32).unflatten(1, shape[:3])
            cache = self.cache[:, :size].float().unflatten(1, shape) * scales.unsqueeze(-1)
        elif self.kv_scales is not None:
            cache = self.cache.float() * self.kv_scales.view(2, 1, 1, 1)
        else:
            cache = self.cache
        both = cache[self.blocks[row]].double().permute(1, 0, 3, 2, 4).flatten(1, 2)
        return both[0, : self.done[row]], both[1, : self.done[row]]

    def want(self, row, num_tokens, **changes):
        """Return the expected results of the last tokens of a row, from the cache's contents."""
        q = self.qkv[row][self.done[row] - num_tokens : self.done[row], : self.heads[0]]
        window = self.spec.sliding_window
        return reference_attention(
            q, *self.kept(row), scale=self.scale, sliding_window=window, **changes
        )


def assert_close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def num_splits(rows, counts):
    """Return the number of splits of each launch of the next step."""
    runs = [(row, n) for row, n in enumerate(counts) if n]
    metadata = rows.builder.build(rows.batch(runs))
    return [item.num_splits for item in metadata.passes(rows.layer._shape)]


CASES = [
    case
    for case in standard_cases(TritonAttentionBackend.capabilities)
    if not case.cache_dtype or case.dtype == "bfloat16"  # fp8 with other dtypes has separate tests
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_backend_passes_the_conformance_suite_in_the_triton_interpreter(case):
    check_case(TritonAttentionBackend, case, DEVICE)


def test_unsupported_requirements_are_refused():
    check_refusals(TritonAttentionBackend, DEVICE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_are_computed_correctly(seed):
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2])
    runs = [(rng.randrange(60), rng.choice([1, 1, 2, rng.randrange(1, 40)])) for _ in range(4)]
    case = AttentionCase(
        runs=((rng.randrange(300), 1), *runs),
        dtype=rng.choice(["float32", "bfloat16", "float16"]),
        num_heads=num_kv_heads * rng.choice([1, 3, 4, 7]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([32, 80, 96, 128]),
        block_size=rng.choice([16, 32, 48]),
        sliding_window=rng.choice([0, 0, rng.randrange(1, 90)]),
        soft_cap=rng.choice([0.0, 0.0, 0.7]),
        sinks=rng.choice([False, True]),
        seed=seed,
    )
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.parametrize("num_heads", [2, 6, 40])
def test_attention_is_correct_for_any_number_of_heads_per_group(num_heads):
    """One and three query heads per key-value head fit a tile of 16 rows. Twenty do not."""
    case = AttentionCase(runs=((20, 1), (3, 9)), num_heads=num_heads, num_kv_heads=2)
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [0, 400])
def test_a_long_context_of_few_rows_is_split(window):
    rows = Rows([901, 140], window=window)
    rows.step([900, 139])
    assert num_splits(rows, [1, 1])[0] > 2
    first, second = rows.step([1, 1])
    assert_close(first, rows.want(0, 1))
    assert_close(second, rows.want(1, 1))


def test_attention_in_splits_counts_the_sinks_once():
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    rows = Rows([700], sinks=sinks)
    rows.step([698])
    assert num_splits(rows, [2]) == [3]
    assert_close(rows.step([2])[0], rows.want(0, 2, sinks_H=sinks.cpu()))


def test_a_chunk_of_a_long_prompt_is_split_with_a_causal_mask():
    rows = Rows([340], num_heads=4, num_kv_heads=1)
    rows.step([300])
    assert num_splits(rows, [40])[0] > 1
    assert_close(rows.step([40])[0], rows.want(0, 40))


def test_the_number_of_splits_stays_within_the_option_and_the_workspace():
    for max_splits in (64, 2):
        rows = Rows([900], options={"max_splits": max_splits})
        rows.done = [899]
        assert num_splits(rows, [1]) == [min(max_splits, 3)]
    rows = Rows([900])
    rows.done = [899]
    metadata = rows.builder.build(rows.batch([(0, 1)]))
    floats = torch.empty(2 * rows.heads[0] * (64 + 1) + 1)
    metadata = replace(metadata, workspace=replace(metadata.workspace, parts=floats))
    assert [item.num_splits for item in metadata.passes(rows.layer._shape)] == [2]


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_warm_up_steps_use_every_variant_of_the_launches(group):
    rows = Rows([300, 300], num_heads=2 * group, num_kv_heads=2)
    variants = set()  # of large tiles, lists and splits
    for step in STEPS:
        rows.done = [start for start, _ in step]
        metadata = rows.builder.build(rows.batch([(row, n) for row, (_, n) in enumerate(step)]))
        workspace = replace(metadata.workspace, num_processors=132)
        for item in replace(metadata, workspace=workspace).passes(rows.layer._shape):
            variants.add((item.tile.rows > 16, item.work_W2 is not None, item.num_splits > 1))
    assert variants == {(False, a, b) for a in (0, 1) for b in (0, 1)} | {(1, 1, 0), (1, 1, 1)}


def test_a_mixed_step_with_many_runs_is_computed_correctly():
    lengths = [(1, 6, 2)[row % 3] for row in range(150)]  # more than `list_work` counts at a time
    rows = Rows(lengths, num_heads=4, num_kv_heads=1, head_size=32)
    results = rows.step(lengths)
    for row in (0, 1, 2, 126, 127, 128, 129, 148, 149):
        assert_close(results[row], rows.want(row, lengths[row]))


def test_layers_with_different_shapes_can_run_in_one_step():
    """Each shape has its own list. Later layers of the first shape reuse its list."""
    rows = Rows([60, 41], num_heads=2, num_kv_heads=1)
    wide = TritonAttentionBackend.create_layer(replace(rows.layer_context, num_heads=32))
    rows.step([20, 32])
    runs = [(0, 40), (1, 9)]
    metadata = rows.builder.build(rows.batch(runs))
    q = torch.randn(49, 32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    _, k, v = torch.cat([rows.qkv[0][20:60], rows.qkv[1][32:41]]).split(rows.heads, dim=1)
    out = torch.empty_like(q)
    wide.forward(q, k, v, rows.cache, metadata, out)
    results = rows.forward(runs, metadata, rows.layer)
    out.fill_(torch.nan)
    wide.forward(q, k, v, rows.cache, metadata, out)
    for row, n in runs:
        assert_close(results[row], rows.want(row, n))
    k, v = rows.kept(0)
    assert_close(out[:40], reference_attention(q[:40], k, v, scale=rows.scale))


def test_blocks_may_be_strided():
    rows = Rows([50, 33], padding=64, dtype=torch.float16)
    rows.step([49, 20])
    for row, result in enumerate(rows.step([1, 13])):
        assert_close(result, rows.want(row, len(result)), 4e-3)


def test_nan_in_one_row_does_not_affect_other_rows():
    rows = Rows([40, 40], dtype=torch.bfloat16)
    rows.qkv[0][20] = torch.nan
    rows.step([39, 39])
    first, second = rows.step([1, 1])
    assert first.isnan().all()
    assert second.isfinite().all()


def test_runs_without_tokens_are_skipped():
    rows = Rows([20, 20])
    rows.step([20, 20])
    batch = rows.batch([(0, 0), (1, 0)])
    q, k, v = rows.qkv[0][:0].split(rows.heads, dim=1)
    rows.layer.forward(q, k, v, rows.cache, rows.builder.build(batch), torch.empty_like(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_and_values_of_an_fp8_cache_are_multiplied_by_their_scales(dtype):
    rows = Rows([180, 40], cache_dtype=FP8, dtype=dtype, padding=64)
    rows.qkv[0] *= 100
    rows.qkv[1] /= 1000
    rows.step([177, 39])
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for row, result in enumerate(rows.step([3, 1])):
        magnitude = float(rows.kept(row)[1].abs().max())
        assert_close(result / magnitude, rows.want(row, len(result)) / magnitude, tolerance)


def test_values_in_an_fp8_cache_are_rounded_to_nearest():
    rows = Rows([40], cache_dtype=FP8, dtype=torch.bfloat16)
    rows.qkv[0][3] = 0.0
    rows.step([40])
    for kept, given in zip(rows.kept(0), rows.qkv[0][:, rows.heads[0] :].split(2, 1), strict=True):
        given = given.double()
        scales = (given.abs().amax(-1, keepdim=True) / 448).float()
        nearest = (given.float() / scales.where(scales > 0, 1)).to(torch.float8_e4m3fn).double()
        distance = (nearest * scales - given).abs()
        wrong = (kept - given).abs() > distance + 1e-6 * given.abs()
        assert not wrong.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", FP8_OF_TORCH)
def test_keys_and_values_of_an_fp8_cache_are_multiplied_by_the_scales_of_the_layer(
    cache_dtype, dtype
):
    """Prefill, chunk and splits, with a soft cap, sinks and scales that differ."""
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    kv_scales = torch.tensor([0.5, 0.02], device=DEVICE)
    shape = {"cache_dtype": cache_dtype, "dtype": dtype, "soft_cap": 3.0, "sinks": sinks}
    rows = Rows([700, 40], kv_scales=kv_scales, padding=64, **shape)
    rows.step([650, 30])
    assert num_splits(rows, [1, 1])[0] > 1
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for counts in ([48, 9], [2, 1]):
        for row, result in enumerate(rows.step(counts)):
            wanted = rows.want(row, len(result), soft_cap=3.0, sinks_H=sinks.cpu())
            assert_close(result, wanted, tolerance)


@pytest.mark.parametrize("cache_dtype", FP8_OF_TORCH)
def test_values_are_divided_by_the_scale_of_the_layer_rounded_and_limited(cache_dtype):
    """The result is that of float64 rounded to fp8; large values become the largest number."""
    kv_scales = torch.tensor([0.25, 4.0], device=DEVICE)
    rows = Rows([40], cache_dtype=cache_dtype, dtype=torch.bfloat16, kv_scales=kv_scales)
    rows.qkv[0][3] = 0.0
    rows.qkv[0][5] *= 1e6
    rows.qkv[0][7, :, 2] = torch.nan
    rows.step([40])
    fp8 = FP8_OF_TORCH[cache_dtype]
    largest = torch.finfo(fp8).max
    pairs = zip(rows.kept(0), rows.qkv[0][:, rows.heads[0] :].split(2, 1), kv_scales, strict=True)
    for kept, given, scale in pairs:
        given = given.double()
        nearest = (given / scale.double()).clamp(-largest, largest).float().to(fp8).double() * scale
        assert kept[7, :, 2].isnan().all() and kept[5].abs().max() == largest * scale
        assert kept.isnan().sum() == 2
        distance = (nearest - given.clamp(-largest * scale, largest * scale)).abs().nan_to_num()
        error = (kept - given.clamp(-largest * scale, largest * scale)).abs().nan_to_num()
        assert not (error > distance + 1e-6 * given.abs().nan_to_num()).any()


def test_without_scales_the_layer_uses_one():
    rows = Rows([40], cache_dtype="fp8_e5m2", dtype=torch.float16)
    assert rows.layer_context.kv_scales is None
    rows.step([39])
    rows.kv_scales = torch.ones(2, device=DEVICE)
    assert_close(rows.step([1])[0], rows.want(0, 1), 4e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rotary_size", [64, 20])
@pytest.mark.parametrize("cache_dtype", ["", FP8])
def test_fused_rotation_equals_a_separate_rotation(cache_dtype, rotary_size):
    """The rotation is tested in splits and prefills, for whole and partial heads, with scales."""
    cos_sin_PR = rotary_table(rotary_size, DEVICE)
    turning = Rows([700, 30], cache_dtype=cache_dtype, padding=64)
    before = Rows([700, 30], cache_dtype=cache_dtype, padding=64)
    turning.cos_sin_PR = cos_sin_PR
    for qkv in before.qkv:
        heads = qkv[:, : sum(before.heads[:2])]
        heads.copy_(turned(heads.clone(), cos_sin_PR[far_apart(0, len(qkv))]))
    for counts in ([698, 10], [2, 12]):
        if counts[0] == 2:
            assert max(num_splits(turning, counts)) > 1
        steps = zip(turning.step(counts), before.step(counts), strict=True)
        for got, want in steps:
            assert_close(got, want.double(), 1e-2 if cache_dtype else 1e-5)
    for row in (0, 1):
        for got, want in zip(turning.kept(row), before.kept(row), strict=True):
            assert_close(got, want, 0.2 if cache_dtype else 1e-5)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_an_engine_generates_the_same_tokens_with_triton_and_torch_attention(tmp_path, cache_dtype):
    """The tokens of mixed steps equal those of backend `torch`.

    With fp8, those of the first step do.
    """
    model = write_tiny_llama(tmp_path, head_dim=32)
    answers = []
    for name, dtype in (("torch", "auto"), ("triton", cache_dtype)):
        options = SMALL_ENGINE | {
            "attention_backend": name,
            "kv_cache_dtype": dtype,
            "block_size": 16,
            "skip_tokenizer_init": True,
        }
        with LLM(model, **options) as llm:
            prompts = [[1, 2, 3], list(range(20, 40))]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    if cache_dtype != "auto":
        answers = [[tokens[:1] for tokens in answer] for answer in answers]
    assert answers[0] == answers[1]


def test_a_layer_refuses_the_metadata_of_another_group():
    rows = Rows([4])
    other = replace(rows.layer_context, sliding_window=4)
    with pytest.raises(ContractError, match=r"layers\.3\.attn has \(window"):
        rows.step([4], TritonAttentionBackend.create_layer(other))
