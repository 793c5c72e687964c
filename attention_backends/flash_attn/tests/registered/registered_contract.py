"""The contract suite over reference kernels.

Started by test_flash_attn_attention.py in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from cpu_backends import BACKENDS, BLOCK_SIZE

from dovetail_devkit import load_suite
from dovetail_devkit.attention import case

LONG_CONTEXT = 21
"""Blocks of the longest context in the suite. Its dense reference needs the square of the tokens:
7 GB for blocks of 512 tokens."""


@pytest.fixture(autouse=True)
def shorter_contexts(monkeypatch):
    """For providers with large blocks, let the longest context of the suite have 3 blocks."""
    shapes = case._shapes

    def shorter(block_size):
        return {
            name: tuple(
                (3 * block_size if context == LONG_CONTEXT * block_size else context, n)
                for context, n in runs
            )
            for name, runs in shapes(block_size).items()
        }

    if BLOCK_SIZE >= 256:
        monkeypatch.setattr(case, "_shapes", shorter)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_passes_the_contract_suite(backend):
    load_suite("attention")(backend, torch.device("cpu"))
