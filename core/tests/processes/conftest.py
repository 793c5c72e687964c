"""Fixtures: child processes. Each test checks that no resource of them is left."""

import gc
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.harnesses.process_tree import children_of

HERE = Path(__file__).parent


def open_resources():
    """Return the current descriptors, threads, children, shared memory and directories."""
    gc.collect()
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("dovetail-")]
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("dovetail")]
    children = sorted(children_of(os.getpid()))
    threads = sorted(thread.name for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), children, threads, shared, folders


@pytest.fixture
def kinds(monkeypatch):
    """Return the module `child_kinds` with the three kinds of child processes."""
    monkeypatch.syspath_prepend(str(HERE))
    import child_kinds

    yield child_kinds
    sys.modules.pop("child_kinds", None)


@pytest.fixture
def model_dir(tmp_path):
    return write_fake_config(tmp_path)


@pytest.fixture
def clean(monkeypatch, tmp_path_factory):
    """Fail if a test leaves a process, thread, descriptor or file."""
    # Sockets need a short path.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    before = open_resources()
    yield
    assert open_resources() == before
