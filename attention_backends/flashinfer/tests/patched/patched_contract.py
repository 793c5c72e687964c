"""Runs the contract suite on FlashInfer's Python code, with kernels in torch.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

import pytest
import torch
from cpu_backends import BACKENDS, BlackwellOnCpu, OnCpu

from dovetail_devkit import load_suite
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.suites.attention import attention_cases

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_passes_the_contract_suite(backend):
    load_suite("attention")(backend, CPU)


@pytest.mark.parametrize("backend", [OnCpu, BlackwellOnCpu])
def test_the_suite_rejects_a_backend_that_does_not_update_graphs(backend):
    class Outdated(backend):
        @classmethod
        def create_builder(cls, context):
            builder = super().create_builder(context)
            builder.update_for_replay = lambda metadata, batch: None
            return builder

    cases = [item for item in attention_cases(Outdated, CPU) if item.name.startswith("graphs")]
    assert cases
    reasons = "attention is wrong|changed the cache of earlier tokens|from the plan"
    num_rejected = 0
    for case in cases:
        try:
            with pytest.raises((AssertionError, ValueError), match=reasons):
                case.run()
            num_rejected += 1
        except SkipCase:  # a cache that the backend does not support
            continue
    assert num_rejected >= 6
