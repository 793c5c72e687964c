"""The `flash_attn` backend: each provider over reference kernels, the cache, options and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionGroupContext, AttentionLayerContext
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn.backend import FlashAttentionBackend
from dovetail_attn_flash_attn.options import FlashAttentionOptions
from dovetail_attn_flash_attn.providers import PROVIDERS, fa3
from dovetail_attn_flash_attn.providers.provider import HEAD_SIZES

CPU = torch.device("cpu")
REGISTERED = Path(__file__).parent / "registered"
NAMES = ("vllm", "fa3", "flash_attn", "torch")
MIN_CASES = {"vllm": 200, "fa3": 85, "flash_attn": 30, "torch": 25}


@pytest.mark.costly
@pytest.mark.partial
@pytest.mark.timeout(400)
@pytest.mark.sampled(8)
@pytest.mark.parametrize("provider", NAMES)
def test_a_provider_passes_its_tests_with_reference_kernels(provider):
    """Runs the contract suite, the limits, and a per-commit sample of the error matrix."""
    check_registered(provider, MIN_CASES[provider], 380)


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("provider", NAMES)
def test_a_provider_passes_all_cases_with_reference_kernels(provider):
    check_registered(provider, 8 * MIN_CASES[provider], 3900, "-m", "")


def check_registered(provider, num_cases, timeout_s, *options):
    """Run the tests in `registered` in a separate process: registrations cannot be undone."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=registered_*.py", *options, str(REGISTERED)]
    paths = [str(REGISTERED), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PROVIDER": provider,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (num_passed,) = re.findall(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert int(num_passed) >= num_cases, done.stdout


def test_the_kernels_of_all_head_sizes_are_known():
    assert all(size % 8 == 0 and size <= 256 for size in HEAD_SIZES)
    assert [fa3._flag(size) for size in (32, 80, 112, 160, 224)] == [
        *("HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256")
    ]


def test_the_keys_and_values_of_a_block_are_adjacent_in_the_cache():
    spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=128, dtype="bfloat16")
    assert FlashAttentionBackend.kv_cache_shape(7, spec) == (7, 2, 32, 3, 128)


@pytest.mark.parametrize(
    ("dtype", "scale_bytes"), [("fp8_e4m3", 4), ("fp8_e5m2", 0), ("float32", 0), ("bfloat16", 4)]
)
def test_unsupported_caches_raise_an_error(dtype, scale_bytes):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, scale_bytes=scale_bytes
    )
    context = AttentionGroupContext(
        spec=spec, device=CPU, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1
    )
    with pytest.raises(ConfigError, match=f"cannot use a KV cache of {dtype} with scale_bytes="):
        FlashAttentionBackend.create_builder(context)


def test_layers_whose_heads_do_not_divide_evenly_raise_an_error():
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
        FlashAttentionBackend.create_layer(context)


def test_unknown_options_are_rejected():
    assert FlashAttentionOptions().provider == "auto"
    for invalid in ({"provider": "fa4"}, {"graph_splits": 0}, {"splits": 3}):
        with pytest.raises(ValidationError):
            FlashAttentionOptions(**invalid)


def test_the_provider_option_accepts_every_provider_name():
    values = FlashAttentionOptions.model_fields["provider"].annotation.__args__
    assert values == ("auto", *(provider.name for provider in PROVIDERS)) == ("auto", *NAMES)
