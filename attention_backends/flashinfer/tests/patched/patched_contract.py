"""The contract suite over FlashInfer's Python code, with kernels in torch.

Started by test_flashinfer_attention.py in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from cpu_backends import BACKENDS

from dovetail_devkit import load_suite


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_passes_the_contract_suite(backend):
    load_suite("attention")(backend, torch.device("cpu"))
