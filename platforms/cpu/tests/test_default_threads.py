"""The default number of threads: cores, affinity, CPU quota, and OpenMP's variables."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.machine import CgroupLimits
from dovetail.processes.affinity import has_affinity
from dovetail_cpu import platform, runtime
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.runtime import CPURuntime
from dovetail_cpu.threads import choice
from dovetail_cpu.threads.choice import default_threads
from dovetail_devkit.tiny_model import write_tiny_llama

GIB = 1 << 30
BINDINGS = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0-63", "OMP_PLACES": "cores"}

needs_affinity = pytest.mark.skipif(not has_affinity(), reason="no affinity masks")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that simulates a machine: CPUs, their siblings, and a CPU quota."""

    def pretend(*, cpus, threads_per_core=1, quota=None, memory_bytes=None):
        for cpu in range(cpus):
            folder = tmp_path / f"cpu{cpu}/topology"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "thread_siblings_list").write_text(f"{cpu // threads_per_core}\n")
        limits = CgroupLimits(cpu_quota=quota, memory_bytes=memory_bytes)
        monkeypatch.setattr(choice, "_CPU_FOLDER", tmp_path)
        monkeypatch.setattr(choice, "allowed_cpus", lambda: frozenset(range(cpus)))
        monkeypatch.setattr(choice, "read_cgroup_limits", lambda: limits)
        monkeypatch.setattr(platform, "read_cgroup_limits", lambda: limits)

    return pretend


@pytest.mark.parametrize(
    ("cpus", "threads_per_core", "quota", "sharing", "expected"),
    [
        (8, 1, None, 1, 8),
        (8, 2, None, 1, 4),
        (8, 1, 3.0, 1, 3),
        (8, 1, 2.6, 1, 3),
        (8, 1, 0.2, 1, 1),
        (2, 1, 16.0, 1, 2),
        (16, 2, 6.0, 2, 3),
        (1, 1, None, 4, 1),
    ],
)
def test_the_default_is_the_minimum_of_affinity_quota_and_physical_cores(
    machine, cpus, threads_per_core, quota, sharing, expected
):
    machine(cpus=cpus, threads_per_core=threads_per_core, quota=quota)
    assert default_threads(sharing).number == expected


def test_the_log_contains_the_number_of_threads_and_its_reason(machine, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    machine(cpus=4, quota=0.5, memory_bytes=GIB)
    monkeypatch.setattr(runtime, "find_library", lambda: None)
    device = CPURuntime()
    device.activate(0, num_threads=None)
    assert torch.get_num_threads() == 1
    assert "on 1 threads (4 CPUs in the affinity mask, 4 physical cores, CPU quota" in caplog.text
    assert device.total_memory_bytes() == GIB


@pytest.mark.parametrize(
    ("num_threads", "most", "says"),
    [
        (96, 64, ("64 of 96 threads", "a team has at most 64 threads")),
        (8, 3, ("3 of 8 threads", "the system permits no more", "pids.max")),
    ],
)
def test_a_team_with_fewer_threads_than_requested_is_reported(
    caplog, monkeypatch, num_threads, most, says
):
    monkeypatch.setattr(runtime, "find_library", lambda: "a library")
    monkeypatch.setattr(runtime, "start_threads", lambda num_threads: None)
    monkeypatch.setattr(runtime, "start_team", lambda library, num_threads: min(num_threads, most))
    device = CPURuntime()
    device.activate(0, num_threads=num_threads)
    device.leave_cores_to_team()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and all(part in warned[0] for part in says)


PROGRAM = """
import os, sys
before = len(os.sched_getaffinity(0))
{first}
import dovetail_cpu.platform
import torch
from dovetail_cpu.runtime import CPURuntime
from dovetail.processes.affinity import allowed_cpus
assert len(allowed_cpus()) == before, allowed_cpus()
runtime = CPURuntime()
runtime.activate(0, num_threads=None)
assert runtime.num_threads > 1, runtime.num_threads
import dovetail_cpu_kernels as native
if native.status().available:
    assert len(os.sched_getaffinity(0)) == before  # workers inherit it
"""


@pytest.mark.costly
@needs_affinity
@pytest.mark.sampled(12)
@pytest.mark.parametrize("first", ["", "import torch"])
@pytest.mark.parametrize("variable", BINDINGS)
def test_binding_by_openmp_does_not_reduce_the_default_to_one_thread(variable, first):
    if default_threads(1).number < 2:
        pytest.skip("one core")
    environ = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    environ |= {variable: BINDINGS[variable]}
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_system_without_affinity_masks_is_reported_by_the_probe_and_runs_torch(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    probe = CPUPlatform.probe()
    assert probe.usable and "no affinity mask" in probe.reasons[0]
    llm = LLM(
        str(write_tiny_llama(tmp_path)),
        skip_tokenizer_init=True,
        linear_method="torch",
        attention_backend="torch",
        num_gpu_blocks_override=64,
    )
    outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2))
    assert len(outputs[0].outputs[0].token_ids) == 2


def test_the_probe_rejects_windows_and_reports_the_missing_module(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    probe = CPUPlatform.probe()
    assert not probe.usable and "`resource`" in probe.reasons[0]
