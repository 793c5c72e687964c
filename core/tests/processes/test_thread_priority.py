"""The priority of threads that work in the background."""

import os
import sys
import threading

import pytest

from dovetail.processes.thread_priority import lower_thread_priority


def priority_of_a_thread():
    """Return the priority of a new thread that has lowered it."""
    result = []

    def work():
        lower_thread_priority()
        result.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priorities of threads")
def test_only_the_calling_thread_gets_the_lowest_priority():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert priority_of_a_thread() == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_other_systems_do_not_change_priorities(monkeypatch):
    changed = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", lambda *arguments: changed.append(arguments))
    lower_thread_priority()
    assert not changed


def test_a_system_that_rejects_the_priority_is_ignored(monkeypatch):
    def reject(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", reject)
    lower_thread_priority()
