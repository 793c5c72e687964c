"""Runs the cases of the contract suite with reference kernels.

test_flash_attn_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from cpu_backends import BACKENDS, CPU, HAS_LARGE_BLOCKS, OnCpu

from dovetail_attn_flash_attn.providers.provider import FP8
from dovetail_devkit.attention import case as suite
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.suites.attention import attention_cases

LONG_CONTEXT = 21
"""Number of blocks in the suite's longest context. The memory of the dense reference grows with the
square of the context length: 7 GB with blocks of 512 tokens."""
NUM_SAMPLED = 8 if HAS_LARGE_BLOCKS else 2


def with_shorter_contexts(shapes):
    """Wrap the function `shapes` so that its longest context has 3 blocks."""

    def shorter(block_size):
        return {
            name: tuple(
                (3 * block_size if context == LONG_CONTEXT * block_size else context, n)
                for context, n in runs
            )
            for name, runs in shapes(block_size).items()
        }

    return shorter


if HAS_LARGE_BLOCKS:
    suite._shapes = with_shorter_contexts(suite._shapes)

CASES = [
    pytest.param(case, id=f"{backend.__name__}, {case.name}")
    for backend in BACKENDS
    for case in attention_cases(backend, CPU)
]


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize("case", CASES)
def test_the_backend_passes_the_contract_suite(case):
    try:
        case.run()
    except SkipCase as reason:
        pytest.skip(str(reason))


@pytest.mark.skipif(FP8 not in OnCpu.capabilities.kv_cache_dtypes, reason="the provider has no fp8")
def test_the_suite_rejects_a_backend_that_ignores_per_layer_scales():
    class Ignoring(OnCpu):
        @classmethod
        def create_layer(cls, context):
            return super().create_layer(replace(context, kv_scales=None))

    cases = [item for item in attention_cases(Ignoring, CPU) if "per-layer scales" in item.name]
    for case in cases:
        if "bfloat16" in case.name:
            with pytest.raises(AssertionError, match="attention is wrong"):
                case.run()
    assert len(cases) > 5
