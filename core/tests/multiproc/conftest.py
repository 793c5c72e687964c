"""Fixtures: executors of worker processes. Each test checks that no process or file is left."""

import gc
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail_devkit.contexts import make_executor_context, write_fake_config

HERE = Path(__file__).parent


def open_resources():
    """Return the current descriptors, shared memory and directories."""
    gc.collect()
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("dovetail-")]
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm")), sorted(folders)


@pytest.fixture
def parts(monkeypatch):
    """Return the module `multiproc_parts` with the workers."""
    monkeypatch.syspath_prepend(str(HERE))
    import multiproc_parts

    yield multiproc_parts
    sys.modules.pop("multiproc_parts", None)


@pytest.fixture
def make(parts, tmp_path, tmp_path_factory, monkeypatch):
    """Start workers: `make(2, step=["", "exits"], limits={"stall_s": 1.0})`."""
    # Sockets need a short path.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    model_dir = write_fake_config(tmp_path)
    before, created = open_resources(), []

    def build(
        world_size=1, *, worker_cls=parts.FaultyWorker, config=(), limits=(), **worker_options
    ):
        context = make_executor_context(
            model_dir, worker_cls, tensor_parallel_size=world_size, **dict(config)
        )
        kwargs = {"options": dict(limits), "worker_options": worker_options}
        created.append(MultiprocExecutor(replace(context, **kwargs)))
        return created[-1]

    yield build
    for executor in created:
        executor.shutdown()
    assert open_resources() == before
