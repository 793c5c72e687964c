"""A child process may use all CPUs of its parent, even if OpenMP has bound the parent's thread."""

import os
import subprocess

import pytest

from dovetail.processes import affinity
from dovetail.processes.child_process import start_child


@pytest.mark.skipif(not affinity.has_affinity(), reason="no affinity masks")
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_child_does_not_inherit_the_binding_of_a_thread_by_openmp(monkeypatch, is_bound):
    cpus, inherited = os.sched_getaffinity(0), []
    own = {min(cpus)} if is_bound else cpus

    def refuse(*args, **options):
        inherited.append(os.sched_getaffinity(0))
        raise OSError("no process")

    monkeypatch.setattr(affinity, "allowed_cpus", lambda: cpus)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    try:
        os.sched_setaffinity(0, own)
        with pytest.raises(OSError, match="no process"):
            start_child("module:function", name="child")
        assert inherited == [cpus]
        assert os.sched_getaffinity(0) == own
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_system_without_affinity_masks_starts_children_normally(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with affinity.unbound_thread():
        assert affinity.allowed_cpus() == set(range(os.cpu_count()))
