"""The CPU platform and its worker meet their contracts and report memory and threads correctly."""

import pytest
import torch

from dovetail_cpu.cores import default_threads
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.runtime import CPURuntime
from dovetail_cpu.worker import CPUWorker
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.suites.platform import check_platform
from dovetail_devkit.suites.worker import check_worker
from dovetail_devkit.tiny_model import write_tiny_llama

MIB = 1 << 20


def test_the_platform_meets_its_contract():
    check_platform(CPUPlatform)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4}])
def test_the_worker_meets_its_contract(fields, tmp_path):
    pytest.importorskip("dovetail_models")
    context = make_worker_context(write_tiny_llama(tmp_path, **fields), CPUPlatform())
    check_worker(CPUWorker, context)


def test_the_number_of_threads_is_the_requested_number_or_the_default():
    runtime = CPURuntime()
    assert runtime.activate(0, num_threads=1) == torch.device("cpu")
    assert torch.get_num_threads() == 1
    runtime.activate(0, num_threads=None)
    assert torch.get_num_threads() == default_threads(1).number


def test_peak_memory_is_measured_since_the_last_reset():
    runtime = CPURuntime()
    runtime.reset_peak()
    # The tensor is larger than the allocator's free memory.
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    assert 48 * MIB < runtime.peak_bytes() < 512 * MIB


def test_memory_in_use_is_less_than_total_memory():
    runtime = CPURuntime()
    total = runtime.total_memory_bytes()
    assert 0 < runtime.memory_in_use_bytes() < total <= CPUPlatform().total_memory_bytes()
