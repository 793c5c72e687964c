"""Requirements that the `cpu` backend rejects, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    AttentionGroupContext,
    AttentionLayerContext,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import Criteria, choose_platform, explain
from dovetail_attn_cpu import availability
from dovetail_attn_cpu.backend import CPUAttentionBackend

CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(
    not native.usable_levels(), reason=native.status().reason or "no library"
)
LAYER = AttentionLayerContext(
    layer_name="layers.3.attn",
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    scale=0.125,
    dtype=torch.bfloat16,
    device=CPU,
)


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_kv_heads": 3}, "8 query heads and 3"), ({"scale": -1.0}, "attention_backend='torch'")],
)
def test_unsupported_layers_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        CPUAttentionBackend.create_layer(replace(LAYER, **changes))


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "fp8_e4m3"}, "fp8_e4m3"), ({"dtype": "int8"}, "scale_bytes=4")],
)
def test_unsupported_kv_cache_specs_are_rejected(changes, message):
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype="bfloat16")
    with pytest.raises(ConfigError, match=message):
        CPUAttentionBackend.create_builder(
            AttentionGroupContext(
                spec=replace(spec, **changes),
                device=CPU,
                max_num_seqs=16,
                max_num_batched_tokens=64,
                max_model_len=64,
            )
        )


def test_a_model_in_float32_is_rejected():
    requirements = AttentionRequirements(
        device_type="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        head_size=64,
        num_heads=8,
        num_kv_heads=2,
        block_size=16,
    )
    assert any(
        "dtype float32" in why for why in CPUAttentionBackend.capabilities.refusals(requirements)
    )


def test_a_missing_kernel_library_is_reported(monkeypatch):
    missing = native.NativeStatus(available=False, level="", reason="no compiler", compiler="")
    monkeypatch.setattr(availability, "status", lambda: missing)
    assert not availability.probe().usable
    assert "no compiler" in availability.probe().reasons[0]


def test_portable_kernels_are_preferred_only_if_the_user_selects_them(monkeypatch):
    """On ARM64 only portable kernels exist, and torch's attention is faster."""
    portable = native.NativeStatus(available=True, level="portable", reason="", compiler="c++")
    monkeypatch.setattr(availability, "status", lambda: portable)
    monkeypatch.delenv("DOVETAIL_CPU_LEVEL", raising=False)
    assert not availability.probe().usable
    assert "slower than torch's" in availability.probe().reasons[0]
    registry = PluginRegistry()
    criteria = Criteria(references=("auto",), platform=choose_platform(registry, "cpu"))
    report = explain(registry, "attention", criteria)
    assert report.chosen[0].name == "torch"
    (own,) = [verdict for verdict in report.verdicts if verdict.name == "cpu"]
    assert "slower than torch's" in own.reasons[0]
    monkeypatch.setenv("DOVETAIL_CPU_LEVEL", "portable")
    assert availability.probe().usable
