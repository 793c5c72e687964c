"""An fp8 cache: per-token scales and per-layer scales, rounding and limits.

Started like interpreted_attention.py.
"""

from __future__ import annotations

import pytest
import torch
from attention_rows import DEVICE, FP8_OF_TORCH, Rows, assert_close, num_splits

from dovetail_attn_triton.backend import FP8


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
    for kept, provided in zip(
        rows.kept(0), rows.qkv[0][:, rows.heads[0] :].split(2, 1), strict=True
    ):
        provided = provided.double()
        scales = (provided.abs().amax(-1, keepdim=True) / 448).float()
        nearest = (provided.float() / scales.where(scales > 0, 1)).to(torch.float8_e4m3fn).double()
        distance = (nearest * scales - provided).abs()
        invalid = (kept - provided).abs() > distance + 1e-6 * provided.abs()
        assert not invalid.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", FP8_OF_TORCH)
def test_keys_and_values_of_an_fp8_cache_are_multiplied_by_per_layer_scales(cache_dtype, dtype):
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
            expected = rows.want(row, len(result), soft_cap=3.0, sinks_H=sinks.cpu())
            assert_close(result, expected, tolerance)


@pytest.mark.parametrize("cache_dtype", FP8_OF_TORCH)
def test_values_are_divided_by_the_per_layer_scale_rounded_and_clamped(cache_dtype):
    """Results equal those of float64 rounded to fp8; large values become the largest number."""
    kv_scales = torch.tensor([0.25, 4.0], device=DEVICE)
    rows = Rows([40], cache_dtype=cache_dtype, dtype=torch.bfloat16, kv_scales=kv_scales)
    rows.qkv[0][3] = 0.0
    rows.qkv[0][5] *= 1e6
    rows.qkv[0][7, :, 2] = torch.nan
    rows.step([40])
    fp8 = FP8_OF_TORCH[cache_dtype]
    largest = torch.finfo(fp8).max
    pairs = zip(rows.kept(0), rows.qkv[0][:, rows.heads[0] :].split(2, 1), kv_scales, strict=True)
    for kept, provided, scale in pairs:
        provided = provided.double()
        nearest = (provided / scale.double()).clamp(-largest, largest).float().to(
            fp8
        ).double() * scale
        assert kept[7, :, 2].isnan().all() and kept[5].abs().max() == largest * scale
        assert kept.isnan().sum() == 2
        distance = (nearest - provided.clamp(-largest * scale, largest * scale)).abs().nan_to_num()
        error = (kept - provided.clamp(-largest * scale, largest * scale)).abs().nan_to_num()
        assert not (error > distance + 1e-6 * provided.abs().nan_to_num()).any()


def test_a_layer_without_scales_uses_a_scale_of_1():
    rows = Rows([40], cache_dtype="fp8_e5m2", dtype=torch.float16)
    assert rows.layer_context.kv_scales is None
    rows.step([39])
    rows.kv_scales = torch.ones(2, device=DEVICE)
    assert_close(rows.step([1])[0], rows.want(0, 1), 4e-3)
