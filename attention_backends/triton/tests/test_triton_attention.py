"""The `triton` backend: its kernels in the interpreter, and its code that needs no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    AttentionGroupContext,
    AttentionLayerContext,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec, LatentAttentionSpec
from dovetail_attn_triton import backend, device_facts
from dovetail_attn_triton.backend import TritonAttentionBackend
from dovetail_attn_triton.device_facts import DeviceFacts
from dovetail_attn_triton.latent_tiles import first_features, latent_shape, rest_features
from dovetail_attn_triton.options import TritonAttentionOptions
from dovetail_attn_triton.tiles import SharedMemory, attention_shape, padded
from dovetail_devkit.triton.interpreted import run_interpreted
from dovetail_ops_triton import availability

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
LEAST_CASES = 28


@pytest.mark.costly(32)
@pytest.mark.partial
@needs_triton
@pytest.mark.timeout(500)
def test_the_attention_kernels_pass_their_tests_in_the_triton_interpreter():
    """Runs a per-commit sample of the conformance suite, and the cases of this package."""
    check_interpreted(LEAST_CASES)


@needs_triton
@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_the_attention_kernels_pass_all_cases_in_the_triton_interpreter():
    check_interpreted(10 * LEAST_CASES, complete=True)


def check_interpreted(num_cases, **options):
    folder = Path(__file__).parent / "interpreted"
    counts = run_interpreted(folder, timeout_s=1980 if options else 480, **options)
    assert not counts.failed, counts.output
    assert not counts.skipped, counts.output
    assert counts.passed >= num_cases, counts.output


def requirements(**changes):
    values = {
        "device_type": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "head_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "block_size": 16,
    }
    return AttentionRequirements(**(values | changes))


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with a given compute capability."""

    def pretend(capability):
        facts = DeviceFacts(capability=capability, num_processors=100, memory=SharedMemory.LARGE)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(backend, "device_facts", lambda device: facts)

    monkeypatch.setattr(availability, "find_spec", lambda name: object())
    return pretend


def test_the_cpu_device_is_rejected():
    reasons = TritonAttentionBackend.capabilities.refusals(requirements(device_type="cpu"))
    assert reasons == ["device cpu is not supported; supported: cuda, xpu"]


@pytest.mark.parametrize(
    ("capability", "cache", "reasons"),
    [
        (
            75,
            "bfloat16",
            ["the GPU has compute capability 7.5; the kernels need 8.0 (Ampere) or newer"],
        ),
        (80, "bfloat16", []),
        (
            80,
            "fp8_e4m3",
            ["the GPU has compute capability 8.0; a KV cache of fp8_e4m3 needs 8.9 (Ada) or newer"],
        ),
        (90, "fp8_e4m3", []),
        (89, "fp8_e5m2", []),
        (
            86,
            "fp8_e5m2",
            ["the GPU has compute capability 8.6; a KV cache of fp8_e5m2 needs 8.9 (Ada) or newer"],
        ),
    ],
)
def test_old_gpus_are_rejected(gpu, capability, cache, reasons):
    gpu(capability)
    assert TritonAttentionBackend.refusals(requirements(kv_cache_dtype=cache)) == reasons


def test_a_cache_of_a_different_dtype_is_rejected(gpu):
    gpu(90)
    (reason,) = TritonAttentionBackend.refusals(requirements(kv_cache_dtype="float16"))
    assert "'float16' is not supported for dtype bfloat16" in reason


def test_fp8_caches_are_rejected_on_devices_other_than_cuda(gpu, monkeypatch):
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        (reason,) = TritonAttentionBackend.refusals(
            requirements(device_type="xpu", kv_cache_dtype=dtype)
        )
        assert f"{dtype} is supported on CUDA devices only" in reason


@pytest.mark.parametrize(
    ("name", "cache", "reasons"),
    [
        ("gfx942", "bfloat16", []),
        ("gfx942", "fp8_e4m3", ["fp8_e4m3 is supported on NVIDIA devices only"]),
        ("gfx90a", "bfloat16", ["the GPU is a gfx90a; the kernels are checked for gfx942 only"]),
        ("gfx1100", "fp8_e5m2", ["checked for gfx942 only", "supported on NVIDIA devices only"]),
    ],
)
@pytest.mark.parametrize("is_assumed", [True, False])
def test_amd_devices_are_supported_if_their_kernels_are_checked(
    gpu, monkeypatch, name, cache, reasons, is_assumed
):
    gpu(0)
    facts = DeviceFacts(
        capability=0, num_processors=304, memory=SharedMemory.SMALL, architecture=name
    )
    if not is_assumed:
        monkeypatch.setattr(backend, "device_facts", lambda device: facts)
    required = requirements(kv_cache_dtype=cache, architecture=name if is_assumed else "")
    shown = TritonAttentionBackend.refusals(required)
    assert len(shown) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, shown, strict=True))


def test_amd_devices_get_the_smallest_tiles(monkeypatch):
    properties = SimpleNamespace(
        multi_processor_count=304, gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_facts.device_facts(torch.device("cuda", 0)) == DeviceFacts(
        capability=0, num_processors=304, memory=SharedMemory.SMALL, architecture="gfx942"
    )


def test_the_properties_of_an_xpu_device_select_the_smallest_tiles(monkeypatch):
    """The local memory of an XPU device may have only 64 KiB."""
    properties = SimpleNamespace(gpu_subslice_count=32)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert device_facts.device_facts(torch.device("xpu", 0)) == DeviceFacts(
        capability=0, num_processors=32, memory=SharedMemory.SMALL
    )


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"features": {"mla"}, "head_size": 576}, []),
        ({"features": {"mla"}, "kv_cache_dtype": "fp8_e4m3"}, ["latent attention with a KV cache"]),
        ({"head_size": 576}, ["head size 576 is supported for latent attention only"]),
    ],
    ids=str,
)
def test_large_heads_are_supported_for_latent_attention_only(gpu, changes, reasons):
    gpu(90)
    changes = changes | {"features": frozenset(changes.get("features", ()))}
    required = requirements(**changes)
    assert not TritonAttentionBackend.capabilities.refusals(required)
    shown = TritonAttentionBackend.refusals(required)
    assert len(shown) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, shown, strict=True))


@needs_triton
@pytest.mark.parametrize(
    "changes", [{"num_kv_heads": 2}, {"sliding_window": 4}, {"soft_cap": 1.0}], ids=str
)
def test_latent_attention_with_unsupported_options_is_rejected(changes):
    values = {"num_heads": 8, "num_kv_heads": 1, "head_size": 576, "value_size": 512} | changes
    context = AttentionLayerContext(
        layer_name="layers.3.attn", scale=0.1, dtype=torch.bfloat16, device=CPU, **values
    )
    with pytest.raises(ConfigError, match=r"layers\.3\.attn has latent attention with"):
        TritonAttentionBackend.create_layer(context)


def test_missing_triton_is_reported(monkeypatch):
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert not availability.probe().usable
    assert "Triton is not installed" in availability.probe().reasons[0]
    (reason,) = TritonAttentionBackend.refusals(requirements(device_type="xpu"))
    assert "Triton is not installed" in reason


def test_the_cache_shape_has_as_many_bytes_as_the_kv_cache_spec():
    spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=80, dtype="bfloat16")
    assert TritonAttentionBackend.kv_cache_shape(7, spec) == (7, 2, 3, 32, 80)
    spec = FullAttentionSpec(
        block_size=32, num_kv_heads=3, head_size=80, dtype="fp8_e4m3", scale_bytes=4
    )
    assert TritonAttentionBackend.kv_cache_shape(7, spec) == (7, 2 * 3 * 32 * 84)
    spec = LatentAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, dtype="bfloat16", value_size=512
    )
    assert TritonAttentionBackend.kv_cache_shape(7, spec) == (7, 1, 32, 576)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "scale_bytes", "message"),
    [
        ("int8", 4, "does not support a KV cache of int8"),
        ("fp8_e4m3", 2, "scale_bytes=2"),
        ("fp8_e5m2", 4, "scale_bytes=4"),
        ("bfloat16", 4, "scale_bytes=4"),
    ],
)
def test_unsupported_kv_cache_specs_are_rejected(dtype, scale_bytes, message):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, scale_bytes=scale_bytes
    )
    context = AttentionGroupContext(
        spec=spec, device=CPU, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64
    )
    with pytest.raises(ConfigError, match=message):
        TritonAttentionBackend.create_builder(context)


@needs_triton
def test_heads_that_do_not_divide_evenly_are_rejected():
    context = AttentionLayerContext(
        layer_name="layers.3.attn",
        num_heads=8,
        num_kv_heads=3,
        head_size=64,
        scale=0.125,
        dtype=torch.bfloat16,
        device=CPU,
    )
    with pytest.raises(ConfigError, match="8 query heads and 3 key-value heads"):
        TritonAttentionBackend.create_layer(context)


def test_unknown_options_are_rejected():
    assert TritonAttentionOptions().max_splits == 64
    with pytest.raises(ValidationError):
        TritonAttentionOptions(num_splits=3)


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "max_splits", "plan"),
    [
        ([1], 64, (1, 64)),
        ([4096], 64, (64, 64)),  # one row: the maximum number of programs
        ([4096], 8, (8, 64)),
        ([4096] * 40, 64, (3, 1664)),  # 960 programs, more than the 792 that keep the device busy
        ([4096] * 256, 64, (1, 10624)),  # there are enough programs without splits
        ([32768] + [500] * 255, 64, (20, 1664)),  # only the long row is split
        ([], 64, (1, 64)),
    ],
)
def test_splits_distribute_the_work_evenly(lengths, max_splits, plan):
    from dovetail_attn_triton.metadata import plan_splits

    actual = plan_splits(lengths, num_heads=8, tile=64, num_programs=792, max_splits=max_splits)
    assert actual == plan


@pytest.mark.parametrize("memory", SharedMemory)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("head_size", [32, 80, 128, 256])
def test_a_tile_contains_all_query_heads_of_a_group(memory, wide, head_size):
    for num_heads in (1, 5, 16, 71):
        shape = attention_shape((num_heads, 1, head_size), wide=wide, memory=memory)
        for tile in (shape.short, shape.long):
            assert tile.rows >= 16 and tile.rows == padded(tile.rows)
            assert shape.tokens_of(tile) >= 1
            assert 128 % tile.positions == 0


@pytest.mark.parametrize("memory", SharedMemory)
@pytest.mark.parametrize("wide", [False, True])
def test_the_blocks_of_latent_attention_contain_all_heads(memory, wide):
    for num_heads in (1, 5, 16, 17, 33, 71, 128):
        shape = latent_shape(num_heads, (576, 512), wide=wide, memory=memory)
        assert (shape.num_kv_heads - 1) * shape.group < num_heads
        assert num_heads <= shape.num_kv_heads * shape.group
        for tile in (shape.short, shape.long):
            assert tile.rows >= 16 and tile.rows == padded(tile.rows)
            assert shape.tokens_of(tile) >= 1


@pytest.mark.parametrize(("size", "parts"), [(576, (512, 64)), (320, (256, 64)), (96, (64, 32))])
def test_vectors_are_divided_at_a_power_of_two(size, parts):
    assert (first_features(size), rest_features(size)) == parts
