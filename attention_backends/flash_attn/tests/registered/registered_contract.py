"""The cases of the contract suite over reference kernels.

Started by test_flash_attn_attention.py in a process of its own.
"""

from __future__ import annotations

import pytest
from cpu_backends import BACKENDS, CPU, HAS_LARGE_BLOCKS

from dovetail_devkit.attention import case as suite
from dovetail_devkit.expectation import NotHere
from dovetail_devkit.suites.attention import attention_cases

LONG_CONTEXT = 21
"""Blocks of the longest context in the suite. Its dense reference needs the square of the tokens:
7 GB for blocks of 512 tokens."""
NUM_SAMPLED = 4 if HAS_LARGE_BLOCKS else 1


def with_shorter_contexts(shapes):
    """Return the function `shapes`, with 3 blocks in its longest context."""

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
    except NotHere as reason:
        pytest.skip(str(reason))
