"""The CPU platform and its worker meet their contracts and report memory and threads correctly."""

import pytest
import torch

from dovetail import machine
from dovetail_cpu import platform
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.runtime import CPURuntime
from dovetail_cpu.threads.choice import default_threads
from dovetail_cpu.worker import CPUWorker
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.suites.platform import check_platform
from dovetail_devkit.suites.worker import check_worker
from dovetail_devkit.tiny_model import write_tiny_llama

MIB = 1 << 20


def test_the_platform_meets_its_contract():
    check_platform(CPUPlatform)


@pytest.mark.costly
@pytest.mark.sampled(4)
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


@pytest.mark.parametrize(("limit", "expected"), [("1073741824\n", 1 << 30), ("max\n", None)])
def test_the_platforms_memory_is_at_most_the_cgroup_limit(tmp_path, monkeypatch, limit, expected):
    mounted, proc = tmp_path / "mounted", tmp_path / "proc"
    (mounted / "job").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/job\n")
    (proc / "mountinfo").write_text(f"30 23 0:26 / {mounted} rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(platform, "read_cgroup_limits", lambda: machine.read_cgroup_limits(proc))
    without_limit = CPUPlatform().total_memory_bytes()
    (mounted / "job/memory.max").write_text(limit)
    assert CPUPlatform().total_memory_bytes() == (expected or without_limit)
    assert without_limit > 1 << 30


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
