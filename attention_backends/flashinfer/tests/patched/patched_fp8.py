"""Caches in fp8: kernels, rounding, scales, and the sink kernels of FlashInfer.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference_kernels
import torch
from cpu_backends import BACKENDS, BlackwellOnCpu, HopperOnCpu, OnCpu
from random_steps import SPEC, B, H, K, Step, attended
from reference_attention import calls

from dovetail.errors import ConfigError
from dovetail_attn_flashinfer import wrappers
from dovetail_attn_flashinfer.cache_dtype import FP8_TYPES


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Discard the state that a new process would not have: launches and loaded sink kernels."""
    monkeypatch.setattr(wrappers, "_sink_kernels", {})
    reference_kernels.loaded_variants.clear()
    calls.clear()


def fp8_step(dtype="fp8_e4m3", runs=((0, 1), (0, 1), (0, B + 2)), **changes):
    """Return prompts for an fp8 cache, and a layer context with scales."""
    step = Step(runs, replace(SPEC, dtype=dtype))
    step.cache = torch.full(step.cache.shape, 0xFF, dtype=torch.uint8).view(FP8_TYPES[dtype])
    return step, step.layer_context(kv_scales=torch.tensor([0.5, 0.25]), **changes)


def test_layers_with_a_second_cache_dtype_do_not_use_the_sink_kernel():
    sinks = torch.linspace(-1, 2, H)
    attended(Step(), sinks=sinks)
    calls.clear()
    step, context = fp8_step(sinks=sinks)
    step.attend(OnCpu.create_layer(context), step.builder().build(step.batch()))
    assert not any(x["module"].extra for _, x in calls)


def test_flashinfer_cannot_load_sink_kernels_for_two_cache_dtypes_in_one_process():
    """If this fails, FlashInfer has removed the limit: remove the cache dtypes from
    `_sink_kernels`."""
    attended(Step(), sinks=torch.zeros(H))
    wrappers._sink_kernels.clear()
    step, context = fp8_step(sinks=torch.zeros(H))
    with pytest.raises(ValueError, match="is loaded with different sizes"):
        step.attend(OnCpu.create_layer(context), step.builder().build(step.batch()))


@pytest.mark.parametrize("dtype", FP8_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_caches_use_fa2_on_every_device(backend, dtype):
    step, context = fp8_step(dtype)
    step.attend(backend.create_layer(context), step.builder(backend).build(step.batch()))
    assert [name for name, _ in calls] == ["plan fa2", "plan fa2", "run fa2", "run fa2"]
    assert {x["module"].module.cache_dtype for _, x in calls} == {FP8_TYPES[dtype]}


@pytest.mark.parametrize(
    ("backend", "kernels"), [(HopperOnCpu, "fa3"), (BlackwellOnCpu, "trtllm-gen")]
)
def test_kernels_that_need_fp8_queries_are_rejected_for_an_fp8_cache(backend, kernels):
    with pytest.raises(ConfigError, match=f"kernels='{kernels}' does not support fp8 caches"):
        fp8_step()[0].builder(backend, kernels=kernels)


@pytest.mark.parametrize("dtype", FP8_TYPES)
def test_large_values_are_clamped_and_scales_are_applied(dtype):
    step, context = fp8_step(dtype, runs=((0, 3),))
    step.qkv[0][1] *= 1e6
    step.attend(OnCpu.create_layer(context), step.builder().build(step.batch()))
    kinds = zip(
        step.cache[1].unbind(0), step.qkv[0].split([H, K, K], 1)[1:], (0.5, 0.25), strict=True
    )
    largest = torch.finfo(FP8_TYPES[dtype]).max
    for kept, x, scale in kinds:
        expected = (x.float() / scale).clamp(-largest, largest).to(FP8_TYPES[dtype])
        assert torch.equal(kept[:, :3].float(), expected.transpose(0, 1).float())
        assert kept[:, 1].float().abs().max() == largest


def test_new_scales_are_effective_in_the_next_step():
    """Weights may be reloaded after a graph was captured, so scales are read on the device."""
    step, context = fp8_step(runs=((0, 1),))
    layer, builder = OnCpu.create_layer(context), step.builder()
    metadata = builder.build_for_graph(step.batch())
    first = step.attend(layer, metadata)
    context.kv_scales.mul_(2)
    builder.update_for_replay(metadata, step.batch())
    second = step.attend(layer, metadata)
    values = step.qkv[0][:, H + K :].repeat_interleave(H // K, 1)
    for out, scale in ((first, 0.25), (second, 0.5)):
        kept = (values / scale).to(torch.float8_e4m3fn).bfloat16() * scale
        assert torch.allclose(out, kept, rtol=0.01)
