"""The common behavior of child processes: engine, worker and sandbox."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.errors import DovetailError, EngineDeadError
from dovetail.faults import VARIABLE
from dovetail.sandbox.child import ChildFailure
from dovetail_devkit.harnesses.process_tree import is_running

HERE = Path(__file__).parent
NOTICE_S = 2.0
every_kind = pytest.mark.parametrize("name", ["engine", "worker", "sandbox"])


def wait_until(actual, timeout_s=NOTICE_S):
    end = time.monotonic() + timeout_s
    while not actual() and time.monotonic() < end:
        time.sleep(0.01)
    return actual()


@pytest.mark.sampled(6)
@every_kind
def test_a_stopped_child_sends_no_heartbeat_and_the_signal_of_a_killed_child_is_reported(
    kinds, clean, model_dir, name
):
    others = kinds.running_children()
    kind = kinds.KINDS[name](model_dir)
    assert kind.use()
    (child,) = (item for item in kinds.running_children() if item not in others)
    os.kill(child.pid, signal.SIGSTOP)
    assert wait_until(lambda: child.liveness.read().silence_s > 0.8)
    os.kill(child.pid, signal.SIGCONT)
    assert wait_until(lambda: child.liveness.read().silence_s < 0.5)
    assert kind.use()
    os.kill(child.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises((EngineDeadError, ChildFailure), match="SIGKILL"):
        kind.use()
    assert time.monotonic() - start < NOTICE_S
    kind.close()
    kind.close()
    assert child.is_closed and kinds.running_children() == others


@pytest.mark.costly
@every_kind
def test_children_work_without_packet_sockets_memfd_and_pidfd(
    kinds, clean, model_dir, name, monkeypatch
):
    """As on macOS."""
    make_pair = socket.socketpair

    def refuse(family=socket.AF_UNIX, kind=socket.SOCK_STREAM):
        if kind == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, "no packet sockets")
        return make_pair(family, kind)

    monkeypatch.setattr(socket, "socketpair", refuse)
    for missing in ("pidfd_open", "memfd_create", "waitid", "sched_getaffinity"):
        monkeypatch.delattr(os, missing, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    others = kinds.running_children()
    kind = kinds.KINDS[name](model_dir)
    assert kind.use()
    (child,) = (item for item in kinds.running_children() if item not in others)
    assert child.control.type == socket.SOCK_STREAM
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises((EngineDeadError, ChildFailure), match="SIGKILL"):
        kind.use()
    kind.close()


@pytest.mark.sampled(6)
@every_kind
@pytest.mark.parametrize(
    ("how", "message"),
    [("exits", "status 3"), ("raises", "InjectedError|the handler melted")],
)
def test_the_error_for_a_child_process_that_fails_at_startup_names_the_cause(
    kinds, clean, model_dir, monkeypatch, name, how, message
):
    kind = kinds.KINDS[name]
    kwargs = {"handler": f"child_handlers:{how}"} if name == "sandbox" else {}
    if name != "sandbox":
        action = {"exits": "exit=3", "raises": "raise"}[how]
        monkeypatch.setenv(VARIABLE, f"{kind.boot_fault}:{action}")
    with pytest.raises(DovetailError, match=message):
        kind(model_dir, **kwargs)


@pytest.mark.sampled(6)
@every_kind
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_child_process_exits_when_its_parent_is_killed(
    model_dir, tmp_path_factory, name, stopped
):
    folder = tmp_path_factory.mktemp("t")
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(folder)}
    command = [sys.executable, str(HERE / "child_kinds.py"), name, str(model_dir)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        pids = json.loads(parent.stdout.readline())
        assert pids and all(map(is_running, pids))
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert wait_until(lambda: not list(folder.glob("dovetail-*")))
