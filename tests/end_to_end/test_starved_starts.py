"""Starts with too few resources raise a Dovetail error, or work without an optional feature.

Limits are set in child processes (`starved_child.py`). A full disk and a small /dev/shm need a
mount namespace; these cases are skipped without one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail_cpu.native_library import probe_fast
from end_to_end.checkpoints import OPTIONS

# Without native kernels, torch multiplies matrices and may crash when an allocation fails.
pytestmark = pytest.mark.skipif(
    not probe_fast().usable, reason="native kernels are not available on this machine"
)

CHILD = Path(__file__).with_name("starved_child.py")
MIB = 1 << 20
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4000,
    "num_hidden_layers": 4,
}
"""A model with about 27 MiB of dummy weights in bfloat16."""
WIDE_OPTIONS = {
    **OPTIONS,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 16 * MIB,
    "block_size": 16,
    "hf_overrides": WIDE,
}
IN_PROCESSES = OPTIONS | {"engine_process": True, "executor_backend": "multiproc"}
# Not less than 4 MiB: Python waits forever for a new thread that has no memory for its first calls.
ROOMS_MIB = (4, 8, 32, 48, 64, 80, 96, 512)
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def has_namespaces():
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, timeout=10)
    return tried.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="this user cannot create mount namespaces"
)


def run_jobs(jobs, *before):
    """Run jobs in one child process, with the command prefix `before`.

    Return the outcomes by name.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*before, sys.executable, str(CHILD)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    return {outcome["name"]: outcome for outcome in outcomes}


def in_namespace(mounts):
    """Return a command prefix that runs a command in a namespace with `mounts`."""
    return [*NAMESPACE, "sh", "-e", "-c", f'{mounts}; exec "$@"', "sh"]


def packed_cache_options(folder):
    """Return the options of an engine that caches packed weights in `folder`."""
    worker = {"packed_cache": str(folder), "packed_cache_min_mib": 0}
    return OPTIONS | {"dtype": "bfloat16", "plugin_options": {"worker:cpu": worker}}


def job(name, model_dir, options, **limits):
    return {"name": name, "model": str(model_dir), "options": options, **limits}


@pytest.fixture(scope="module")
def outcomes(model_dir, tmp_path_factory):
    """Return the outcomes of all starts that need no namespace."""
    full, taken = tmp_path_factory.mktemp("full"), tmp_path_factory.mktemp("taken") / "packed"
    taken.touch()
    rooms = [
        job(f"room {room}", model_dir, WIDE_OPTIONS, address_space=room * MIB) for room in ROOMS_MIB
    ]
    threads = WIDE_OPTIONS | {"num_threads": 64}
    return run_jobs(
        [
            job("plain", model_dir, OPTIONS, imports=True),
            job("wide", model_dir, WIDE_OPTIONS, imports=True),
            *rooms,
            job("threads", model_dir, threads, address_space=200 * MIB),
            job("descriptors", model_dir, OPTIONS, open_files=0),
            job("file size", model_dir, packed_cache_options(full / "packed"), file_size=4096),
            job("a file in its place", model_dir, packed_cache_options(taken)),
            job("ring", model_dir, OPTIONS, ring=MIB, file_size=4096),
        ]
    )


@pytest.fixture(scope="module")
def namespace_outcomes(model_dir, tmp_path_factory):
    """Return the outcomes of starts with a full disk, a read-only disk and a tiny /dev/shm."""
    full, closed = tmp_path_factory.mktemp("full"), tmp_path_factory.mktemp("closed")
    mounts = (
        f"mount -t tmpfs -o size=16k none {full}; "
        f"mount -t tmpfs none {closed}; mount -o remount,ro {closed}; "
        "mount -t tmpfs -o size=4k none /dev/shm"
    )
    return run_jobs(
        [
            job("plain", model_dir, OPTIONS, imports=True),
            job("full", model_dir, packed_cache_options(full / "packed")),
            job("closed", model_dir, packed_cache_options(closed / "packed")),
            job("ring", model_dir, OPTIONS, ring=MIB),
            job("processes", model_dir, IN_PROCESSES),
        ],
        *in_namespace(mounts),
    )


@pytest.mark.costly
def test_every_start_ends_in_time_with_a_result_or_a_typed_error(outcomes):
    for outcome in outcomes.values():
        assert outcome["is_ours"] and not outcome["status"], outcome
        assert outcome["seconds"] < 30
    assert not outcomes["plain"]["error"]


@pytest.mark.parametrize("room", ROOMS_MIB)
def test_an_address_space_limit_is_reported_with_a_remedy(outcomes, room):
    outcome = outcomes[f"room {room}"]
    assert outcome["error"] in ("", "CapacityError"), outcome
    assert bool(outcome["error"]) or room > 32
    assert not outcome["error"] or "free memory, or " in outcome["message"].lower()


def test_a_start_with_enough_memory_succeeds(outcomes):
    assert not outcomes[f"room {ROOMS_MIB[-1]}"]["error"]


def test_the_error_for_too_little_memory_for_threads_names_the_setting(outcomes):
    assert outcomes["threads"]["error"] == "CapacityError"
    assert "num_threads=64" in outcomes["threads"]["message"]


def test_too_few_file_descriptors_at_startup_are_reported(outcomes):
    assert outcomes["descriptors"]["error"]
    assert "Too many open files" in outcomes["descriptors"]["message"]


def test_unavailable_shared_memory_is_reported(outcomes):
    assert outcomes["ring"]["error"] == "CapacityError"
    assert "ulimit -f" in outcomes["ring"]["message"]


@pytest.mark.parametrize("name", ["file size", "a file in its place"])
def test_an_engine_runs_if_packed_weights_cannot_be_cached(outcomes, name):
    check_runs_without_packed_weights(outcomes[name])


@pytest.mark.costly
@pytest.mark.sampled(4)
@needs_namespaces
@pytest.mark.parametrize("name", ["full", "closed"])
def test_an_engine_runs_with_a_full_or_read_only_disk(namespace_outcomes, name):
    check_runs_without_packed_weights(namespace_outcomes[name])


@pytest.mark.costly
@needs_namespaces
@pytest.mark.parametrize("name", ["ring", "processes"])
def test_engine_processes_need_no_space_in_dev_shm(namespace_outcomes, name):
    assert not namespace_outcomes[name]["error"], namespace_outcomes[name]


def check_runs_without_packed_weights(outcome):
    assert not outcome["error"] and not outcome["status"], outcome
    messages = [text for text in outcome["warnings"] if "Packed weights" in text]
    assert messages and all("/packed" in text for text in messages), outcome
